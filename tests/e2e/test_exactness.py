"""The master property on the real model: scheduling never changes an answer.

Greedy output equals transformers' `generate`, and stays so whatever the concurrency, token budget,
block size, chunking or preemption. Where two runs part, the candidates must be a tie: their logits
within 1e-4 of each other, which is what float32 rounding in another batch shape may turn around.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from serve.engine.tokenizer import Tokenizer
from tests.e2e.shared_model import MAX_MODEL_LEN, Completion, Engine, SharedModel, greedy

TIE = 1e-4

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8,",
    "Die Hauptstadt von Deutschland ist",
    "Q: What is the boiling point of water?\nA:",
    "Once upon a time, in a village by the sea,",
    '{"name": "Ada", "born": 1815, "knows": [',
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, count(*) FROM",
    "The quick brown fox",
    "🙂🙃 means",
    "日本の首都は",
    "<html>\n  <body>\n    <h1>",
    "Roses are red,",
    "To be, or not to be,",
    "import numpy as np\n\nx = np.",
    "The three laws of thermodynamics are: 1.",
    "Ingredients:\n- 2 eggs\n- 100 g sugar\n-",
    "E = mc",
    "She opened the door and saw",
    "Les trois couleurs du drapeau français sont",
    "for (int i = 0; i < n; i++) {",
    "Abstract. We show that",
    "Monday, Tuesday, Wednesday,",
    "a a a a a a a a a a a a a a a a a a a a",
    "Once",
    "The patient presented with a fever of",
    "In 1969, humans first walked on the",
    "Translate to Spanish: Good morning. ->",
    "x",
    "README\n======\n\nThis project",
    "The meaning of life is",
]


@dataclass
class Reference:
    """transformers' answers, and its logits to judge a tie by."""

    hf_model: torch.nn.Module
    prompts: list[list[int]]
    completions: list[list[int]]

    def assert_equal_up_to_ties(self, completions: Sequence[Completion]) -> None:
        for prompt, expected, got in zip(self.prompts, self.completions, completions, strict=True):
            assert len(got.token_ids) == len(expected)
            if got.token_ids != expected:
                self._assert_parted_at_a_tie(prompt, expected, got.token_ids)

    def _assert_parted_at_a_tie(
        self, prompt: list[int], expected: list[int], got: list[int]
    ) -> None:
        parted = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
        with torch.inference_mode():
            ids = torch.tensor([prompt + expected[:parted]])
            logits = self.hf_model(ids).logits[0, -1]
        gap = abs(logits[expected[parted]] - logits[got[parted]])
        assert gap < TIE, f"after {prompt} + {expected[:parted]}: {gap=}"


@pytest.fixture(scope="module")
def shared(default_model: Path) -> SharedModel:
    return SharedModel(default_model)


@pytest.fixture(scope="module")
def hf_model(shared: SharedModel) -> torch.nn.Module:
    """transformers' model with the same dequantized weights."""
    config = copy.deepcopy(shared.checkpoint.hf_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {name: tensor.to(torch.float32) for name, tensor in shared.checkpoint.tensors()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    # Buffers (the rotary frequencies) are not in a checkpoint: make them as an ordinary start does.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    missing = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    assert not missing, missing
    model.eval()
    return model  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def prompts(default_model: Path) -> list[list[int]]:
    """32 prompts of 1 to about 250 tokens."""
    texts = list(TEXTS)
    for place, repeats in ((3, 3), (9, 12), (17, 7), (22, 24)):
        texts[place] = " ".join(TEXTS[(place + i) % len(TEXTS)] for i in range(repeats))
    tokenizer = Tokenizer.load(default_model)
    try:
        return [tokenizer.encode_now(text) for text in texts]
    finally:
        tokenizer.close()


def make_reference(
    hf_model: torch.nn.Module, prompts: list[list[int]], max_tokens: int
) -> Reference:
    """transformers' greedy answers, all prompts in one left-padded batch."""
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    output = hf_model.generate(  # type: ignore[operator]
        torch.tensor([[0] * n + p for n, p in zip(padding, prompts, strict=True)]),
        attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in padding]),
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=max_tokens, eos_token_id=None, pad_token_id=0
        ),
    )
    return Reference(hf_model, prompts, output[:, longest:].tolist())


SMALL_MAX_TOKENS = 12
FEW_BLOCKS = Engine(max_num_seqs=8, block_size=2, num_blocks=30)


@pytest.fixture(scope="module")
def small(hf_model: torch.nn.Module, prompts: list[list[int]]) -> Reference:
    chosen = [prompts[i] for i in (0, 1, 3, 10, 19, 24, 29, 31)]
    return make_reference(hf_model, chosen, SMALL_MAX_TOKENS)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(Engine(), id="all at once"),
        pytest.param(Engine(max_num_seqs=1), id="one at a time"),
        pytest.param(Engine(max_num_seqs=3, budget=7), id="budget 7"),
        pytest.param(Engine(block_size=1), id="blocks of one token"),
        pytest.param(Engine(block_size=32, budget=16), id="blocks of 32, budget 16"),
        pytest.param(Engine(budget=MAX_MODEL_LEN, chunking=False), id="whole prompts"),
    ],
)
def test_smp_14_sch_15_greedy_answers_equal_transformers_under_any_settings(
    shared: SharedModel, small: Reference, engine: Engine
) -> None:
    completions, stats = shared.run(engine, small.prompts, greedy(SMALL_MAX_TOKENS))
    small.assert_equal_up_to_ties(completions)
    assert stats.total_preemptions_recompute == stats.total_preemptions_swap == 0


def test_sch_01_recompute_preemption_changes_no_answer(
    shared: SharedModel, small: Reference
) -> None:
    completions, stats = shared.run(FEW_BLOCKS, small.prompts, greedy(SMALL_MAX_TOKENS))
    small.assert_equal_up_to_ties(completions)
    assert stats.total_preemptions_recompute > 5
    assert stats.total_generation_tokens == len(small.prompts) * SMALL_MAX_TOKENS


@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_swap_preemption_changes_no_answer(
    shared: SharedModel, small: Reference, mode: str
) -> None:
    engine = replace(FEW_BLOCKS, preemption_mode=mode, num_host_blocks=60)
    completions, stats = shared.run(engine, small.prompts, greedy(SMALL_MAX_TOKENS))
    small.assert_equal_up_to_ties(completions)
    assert stats.total_preemptions_swap > 5


def test_smp_01_seeded_requests_draw_the_same_through_preemption_and_company(
    shared: SharedModel, small: Reference
) -> None:
    sampling = [
        replace(greedy(SMALL_MAX_TOKENS), temperature=0.8, seed=number // 2, top_p=0.95)
        for number in range(len(small.prompts))
    ]
    alone = [
        shared.run(Engine(), [prompt], [params])[0][0].token_ids
        for prompt, params in zip(small.prompts, sampling, strict=True)
    ]
    together, stats = shared.run(FEW_BLOCKS, small.prompts, sampling)
    assert [c.token_ids for c in together] == alone
    assert stats.total_preemptions_recompute > 5


def test_log_04_logprobs_equal_a_plain_forward_pass(shared: SharedModel, small: Reference) -> None:
    params = replace(greedy(4), logprobs=2, prompt_logprobs=2)
    completions, _ = shared.run(Engine(budget=5, max_num_seqs=3), small.prompts, params)
    for prompt, completion in zip(small.prompts, completions, strict=True):
        ids = prompt + completion.token_ids
        with torch.inference_mode():
            logits = small.hf_model(torch.tensor([ids])).logits[0]
        scores = completion.prompt_logprobs + completion.logprobs
        assert [s.token_id for s in scores] == ids[1:]
        expected = logits[:-1].log_softmax(-1)
        own = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert torch.allclose(torch.tensor([s.logprob for s in scores]), own, atol=1e-3)
        best = torch.tensor([s.top_logprobs for s in scores])
        assert torch.allclose(best, expected.topk(2).values, atol=1e-3)


# ------------------------------------------------------------------------ the full sweep

FULL_MAX_TOKENS = 40


@pytest.fixture(scope="module")
def full(hf_model: torch.nn.Module, prompts: list[list[int]]) -> Reference:
    return make_reference(hf_model, prompts, FULL_MAX_TOKENS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "engine",
    [
        *(Engine(max_num_seqs=n) for n in (1, 4, 16, 32)),
        *(Engine(budget=n) for n in (1, 7, 16, 64, 2048)),
        *(Engine(block_size=n, budget=100) for n in (1, 16, 32)),
        *(Engine(budget=MAX_MODEL_LEN, chunking=False, max_num_seqs=n) for n in (2, 32)),
    ],
    ids=repr,
)
def test_32_answers_equal_transformers_over_the_whole_range_of_settings(
    shared: SharedModel, full: Reference, engine: Engine
) -> None:
    completions, _ = shared.run(engine, full.prompts, greedy(FULL_MAX_TOKENS))
    full.assert_equal_up_to_ties(completions)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("budget", [16, 2048])
def test_32_answers_survive_hundreds_of_preemptions(
    shared: SharedModel, full: Reference, mode: str, budget: int
) -> None:
    engine = Engine(
        block_size=1,
        num_blocks=400,
        budget=budget,
        preemption_mode=mode,
        num_host_blocks=0 if mode == "recompute" else 1500,
    )
    completions, stats = shared.run(engine, full.prompts * 4, greedy(FULL_MAX_TOKENS))
    for first in range(0, len(completions), len(full.prompts)):
        full.assert_equal_up_to_ties(completions[first : first + len(full.prompts)])
    assert stats.total_preemptions_recompute + stats.total_preemptions_swap >= 200
    if mode != "recompute":
        assert stats.total_preemptions_swap >= 100
