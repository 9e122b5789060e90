"""Drafts change how many steps an answer takes, and nothing of the answer: real weights, real
kernels, each wish that depends on the tokens before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from serve import LLM, SamplingParams
from serve.llm import LLMOutput
from serve.scheduler.drafting.length import Acceptance, RowCosts
from tests.e2e.tiny_model import save_tiny_model

NGRAM = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}'
SUFFIX = '{"method": "suffix", "num_speculative_tokens": 8}'
PROMPTS = [
    "one two three one two three one two",
    "abcabcabcabcabcabc",
    "x = 1; y = 2; x = 1; y = 2; x = 1;",
    "nothing is said twice",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def every_draft_pays() -> Iterator[None]:
    """Or how much is drafted would depend on how busy this machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowCosts, "curve", lambda self, first, last: [1.0] * (last - first + 1))
        patch.setattr(Acceptance, "rate", lambda self, request, num_matched: 1.0)
        yield


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[LLM]:
    with LLM(str(model), max_model_len=512) as llm:
        yield llm


@pytest.fixture(scope="module", params=[NGRAM, SUFFIX], ids=["ngram", "suffix"])
def drafting(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(model), max_model_len=512, speculative_config=request.param) as llm:
        yield llm


def check_same(
    plain: LLM, drafting: LLM, sampling: SamplingParams, prompts: Sequence[str] = PROMPTS
) -> tuple[int, int]:
    """Together and alone; how many tokens were drafted and accepted meanwhile."""
    before = drafting.stats
    wanted = plain.generate(prompts, sampling)
    assert drafting.generate(prompts, sampling) == wanted
    assert drafting.generate(prompts[:1], sampling) == wanted[:1]
    after = drafting.stats
    return (
        after.total_spec_draft_tokens - before.total_spec_draft_tokens,
        after.total_spec_accepted_tokens - before.total_spec_accepted_tokens,
    )


@pytest.mark.parametrize(
    "wishes",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 11},
        {"temperature": 1.5, "seed": 42, "top_p": 0.9},
        {"temperature": 0.5, "seed": 3, "min_p": 0.05, "top_k": 20},
        {"temperature": 0.0, "repetition_penalty": 1.1},
        {"temperature": 0.3, "seed": 5, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"temperature": 0.2, "seed": 6, "logit_bias": {97: 2.0, 98: 1.5}},
        {"temperature": 0.0, "min_tokens": 30, "stop": ("a", "e")},
        {"temperature": 0.0, "bad_words_token_ids": ((97, 98), (99,))},
    ],
    ids=lambda wishes: " ".join(map(str, wishes)),
)
def test_answers_are_the_same_with_and_without_drafts(
    plain: LLM, drafting: LLM, wishes: dict[str, Any]
) -> None:
    drafted, _ = check_same(plain, drafting, SamplingParams(max_tokens=60, **wishes))
    assert drafted > 0


def test_loops_are_drafted_and_accepted(plain: LLM, drafting: LLM) -> None:
    loop = SamplingParams(max_tokens=100, temperature=0.0, allowed_token_ids=(97, 98))
    drafted, accepted = check_same(plain, drafting, loop)
    assert accepted > drafted // 2 > 100


def test_spec_01_a_seed_means_the_same_with_and_without_drafts(plain: LLM, drafting: LLM) -> None:
    prompt = "one two three one two three one two"
    seeded = SamplingParams(max_tokens=40, temperature=1.5, seed=42)
    texts = set()
    for llm in (plain, drafting):
        for _ in range(2):
            texts.add(llm.generate([prompt], seeded)[0].text)
        company = [SamplingParams(max_tokens=40, temperature=1.5, seed=i) for i in range(7)]
        texts.add(llm.generate([prompt] * 8, [seeded, *company])[0].text)
    assert len(texts) == 1
    unseeded = SamplingParams(max_tokens=40, temperature=1.5)
    one, other = drafting.generate([prompt, prompt], unseeded)
    assert one.token_ids != other.token_ids


@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_spec_04_logprobs_of_accepted_drafts_are_those_without(
    plain: LLM, drafting: LLM, temperature: float
) -> None:
    wanted = SamplingParams(
        max_tokens=60, temperature=temperature, seed=1, logprobs=5, prompt_logprobs=2
    )
    check_same(plain, drafting, wanted)
    (output,) = drafting.generate(PROMPTS[:1], wanted)
    assert output.logprobs is not None
    assert [score.token_id for score in output.logprobs] == output.token_ids


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_changes_no_answer_with_drafts(model: Path, plain: LLM, mode: str) -> None:
    wanted = SamplingParams(max_tokens=120, temperature=0.3, seed=2, repetition_penalty=1.05)
    prompts = [text * 2 for text in PROMPTS]
    pool = {"num_gpu_blocks_override": 20, "max_model_len": 256, "preemption_mode": mode}
    with LLM(str(model), speculative_config=NGRAM, thrash_guard=False, **pool) as tight:
        outputs: list[LLMOutput] = tight.generate(prompts, wanted)
        stats = tight.stats
    assert outputs == plain.generate(prompts, wanted)
    assert stats.total_preemptions_recompute + stats.total_preemptions_swap > 0
    assert stats.total_spec_accepted_tokens > 0


def test_a_request_may_do_without(plain: LLM, drafting: LLM) -> None:
    alone = SamplingParams(max_tokens=60, temperature=0.0, speculative=False)
    assert check_same(plain, drafting, alone) == (0, 0)
