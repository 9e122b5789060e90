"""The default model with int8 weights: as good as it was, and its bits are as much its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from serve.messages import TokenLogprobs
from serve.text.tokenizer import Tokenizer
from tests.e2e.passages import PASSAGES
from tests.e2e.shared_model import Completion, Engine, SharedModel, greedy

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.timeout(900)

ALLOWED = 1.02  # times the perplexity of the weights as stored

TEXTS = [
    "The capital of France is",
    "1, 1, 2, 3, 5, 8,",
    "She opened the door and saw",
    "Once",
    "The patient presented with a fever of",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
]

ALONE = Engine(max_num_seqs=1)
COMPANY = [
    Engine(),
    Engine(budget=7, block_size=1),
    Engine(max_num_seqs=3, budget=33, block_size=32),
    Engine(budget=1024, chunking=False),
]
CROWDED = [
    Engine(block_size=1, num_blocks=45, preemption_mode="recompute"),
    Engine(block_size=1, num_blocks=45, preemption_mode="swap", num_host_blocks=200),
]


@pytest.fixture(scope="module")
def encode(default_model: Path) -> Callable[[Sequence[str]], list[list[int]]]:
    tokenizer = Tokenizer.load(default_model)
    tokenizer.close()
    return lambda texts: [tokenizer.encode_now(text) for text in texts]


@pytest.fixture(scope="module")
def stored(default_model: Path) -> SharedModel:
    return SharedModel(default_model, "cpu")


@pytest.fixture(scope="module")
def quantized(default_model: Path) -> SharedModel:
    return SharedModel(default_model, "cpu", quantization="int8")


def read(model: SharedModel, passages: list[list[int]]) -> list[TokenLogprobs]:
    """Every token of the passages but the first, as the model expected it."""
    completions, _ = model.run(Engine(), passages, replace(greedy(1), prompt_logprobs=1))
    return [score for completion in completions for score in completion.prompt_logprobs]


def perplexity(scores: Sequence[TokenLogprobs]) -> float:
    return math.exp(-sum(score.logprob for score in scores) / len(scores))


def test_int8_costs_less_than_two_per_cent_of_perplexity(
    stored: SharedModel,
    quantized: SharedModel,
    encode: Callable[[Sequence[str]], list[list[int]]],
) -> None:
    passages = encode(PASSAGES)

    before, after = read(stored, passages), read(quantized, passages)

    same = [a.top_token_ids[0] == b.top_token_ids[0] for a, b in zip(before, after, strict=True)]
    agreement = sum(same) / len(same)
    text = "perplexity %.3f as stored, %.3f in int8; the same most likely token at %.1f %%"
    logger.info(text, perplexity(before), perplexity(after), 100 * agreement)
    assert len(before) > 1200
    assert perplexity(after) < ALLOWED * perplexity(before)
    assert agreement > 0.94
    assert before != after  # the weights are not the same


@pytest.mark.parametrize("weights", ["stored", "quantized"])
def test_logits_have_the_same_bits_in_any_company_and_after_preemption(
    weights: str,
    encode: Callable[[Sequence[str]], list[list[int]]],
    request: pytest.FixtureRequest,
) -> None:
    model: SharedModel = request.getfixturevalue(weights)
    prompts = encode(TEXTS)
    params = replace(greedy(8), logprobs=10)
    scored = replace(params, prompt_logprobs=10)
    alone, _ = model.run(ALONE, prompts, scored)

    for engine in COMPANY:
        together, _ = model.run(engine, prompts, scored)
        assert together == alone, engine
    for engine in CROWDED:
        twice, stats = model.run(engine, prompts * 2, params)
        assert [generated(c) for c in twice] == [generated(c) for c in alone] * 2, engine
        assert stats.total_preemptions_recompute + stats.total_preemptions_swap > 0
    cached, stats = model.run(replace(ALONE, block_size=1), prompts * 2, params)
    assert [generated(c) for c in cached] == [generated(c) for c in alone] * 2
    assert stats.total_prefix_cache_hits > 0


def generated(completion: Completion) -> tuple[list[int], list[TokenLogprobs]]:
    return completion.token_ids, completion.logprobs
