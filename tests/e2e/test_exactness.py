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
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from serve.models.weights.checkpoint import Checkpoint
from serve.text.tokenizer import Tokenizer
from tests.e2e.shared_model import MAX_MODEL_LEN, Completion, Engine, SharedModel, greedy

TIE = 1e-4

# Loading the real model into both implementations takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)

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

    hf_model: Any
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


@dataclass
class Stand:
    """A model in both implementations, and the 32 prompts as its ids."""

    shared: SharedModel
    hf_model: Any
    prompts: list[list[int]]

    def reference(self, prompts: list[list[int]], max_tokens: int) -> Reference:
        """transformers' greedy answers, all prompts in one left-padded batch."""
        longest = max(len(prompt) for prompt in prompts)
        padding = [longest - len(prompt) for prompt in prompts]
        output = self.hf_model.generate(
            torch.tensor([[0] * n + p for n, p in zip(padding, prompts, strict=True)]),
            attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in padding]),
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
            ),
        )
        return Reference(self.hf_model, prompts, output[:, longest:].tolist())


def make_stand(path: Path) -> Stand:
    texts = list(TEXTS)
    for place, repeats in ((3, 3), (9, 12), (17, 7), (22, 24)):  # up to 600 bytes or 250 tokens
        texts[place] = " ".join(TEXTS[(place + i) % len(TEXTS)] for i in range(repeats))
    tokenizer = Tokenizer.load(path)
    prompts = [tokenizer.encode_now(text) for text in texts]
    tokenizer.close()
    shared = SharedModel(path)
    hf_model = load_into_transformers(shared.checkpoint)
    hf_model.generation_config.eos_token_id = None  # answers go on behind an end token, like ours
    return Stand(shared, hf_model, prompts)


def load_into_transformers(checkpoint: Checkpoint) -> Any:
    """transformers' model with the checkpoint's weights; GGUF's as our loader dequantizes them."""
    if checkpoint.format != "gguf":
        return AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval()
    config = copy.deepcopy(checkpoint.for_transformers().hf_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {name: tensor.to(torch.float32) for name, tensor in checkpoint.tensors()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    # Buffers (the rotary frequencies) are not in a checkpoint: make them as an ordinary start does.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    empty = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    assert not empty, empty
    return model.eval()


RANGE = [
    *(Engine(max_num_seqs=n) for n in (1, 4, 16, 32)),
    *(Engine(budget=n) for n in (1, 7, 16, 64, 2048)),
    *(Engine(block_size=n, budget=100) for n in (1, 16, 32)),
    *(Engine(budget=MAX_MODEL_LEN, chunking=False, max_num_seqs=n) for n in (2, 32)),
]
CROWDED = Engine(max_num_seqs=64, block_size=1, num_blocks=100)
CROWDED_RANGE = [
    replace(CROWDED, budget=budget, preemption_mode=mode, num_host_blocks=host)
    for budget, mode, host in (
        (16, "recompute", 0),
        (2048, "recompute", 0),
        (2048, "swap", 1500),
        (16, "auto", 28),
    )
]


def assert_settings_change_nothing(stand: Stand, reference: Reference, engine: Engine) -> None:
    max_tokens = len(reference.completions[0])
    completions, _ = stand.shared.run(engine, reference.prompts, greedy(max_tokens))
    reference.assert_equal_up_to_ties(completions)


def assert_preemption_changes_nothing(
    stand: Stand, reference: Reference, engine: Engine, *, copies: int, at_least: int
) -> None:
    """Run several copies of the prompts through a pool that holds a few of them at a time."""
    count, max_tokens = len(reference.prompts), len(reference.completions[0])
    completions, stats = stand.shared.run(engine, reference.prompts * copies, greedy(max_tokens))
    for first in range(0, len(completions), count):
        reference.assert_equal_up_to_ties(completions[first : first + count])
    assert stats.total_generation_tokens == copies * count * max_tokens
    by_swap, by_recompute = stats.total_preemptions_swap, stats.total_preemptions_recompute
    assert by_swap + by_recompute >= at_least
    assert (by_swap > 0) == (engine.preemption_mode != "recompute")
    if engine.preemption_mode == "swap":  # auto mixes both as it finds them cheaper
        assert by_recompute == 0


# ------------------------------------------------------------------------ a tiny random model


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Stand:
    return make_stand(tiny_model)


@pytest.fixture(scope="module")
def tiny_reference(tiny: Stand) -> Reference:
    return tiny.reference([p for p in tiny.prompts if len(p) < 200], 12)


@pytest.mark.parametrize("engine", RANGE, ids=repr)
def test_sch_15_a_tiny_models_answers_equal_transformers_over_the_range_of_settings(
    tiny: Stand, tiny_reference: Reference, engine: Engine
) -> None:
    assert_settings_change_nothing(tiny, tiny_reference, engine)


@pytest.mark.parametrize("engine", CROWDED_RANGE, ids=repr)
def test_sch_01_a_tiny_models_answers_survive_dozens_of_preemptions(
    tiny: Stand, engine: Engine
) -> None:
    reference = tiny.reference([p for p in tiny.prompts if len(p) < 28], 24)
    assert_preemption_changes_nothing(tiny, reference, engine, copies=6, at_least=30)


# ------------------------------------------------------------------------ the real model


@pytest.fixture(scope="module")
def real(default_model: Path) -> Stand:
    return make_stand(default_model)


@pytest.fixture(scope="module")
def few(real: Stand) -> Reference:
    """Answers to seven prompts, for what runs every time."""
    return real.reference([real.prompts[i] for i in (0, 1, 10, 19, 24, 29, 31)], 10)


@pytest.mark.parametrize(
    "engine",
    [Engine(), Engine(max_num_seqs=3, budget=7, block_size=1), Engine(budget=1024, chunking=False)],
    ids=repr,
)
def test_smp_14_the_real_models_answers_equal_transformers(
    real: Stand, few: Reference, engine: Engine
) -> None:
    assert_settings_change_nothing(real, few, engine)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_sch_01_the_real_models_answers_survive_preemption(
    real: Stand, few: Reference, mode: str
) -> None:
    engine = Engine(block_size=1, num_blocks=45, preemption_mode=mode, num_host_blocks=200)
    assert_preemption_changes_nothing(real, few, engine, copies=2, at_least=4)


def test_smp_01_seeded_requests_draw_the_same_through_preemption_and_company(
    real: Stand, few: Reference
) -> None:
    sampling = [
        replace(greedy(8), temperature=0.8, seed=number // 2, top_p=0.95)
        for number in range(len(few.prompts))
    ]
    apart, _ = real.shared.run(Engine(max_num_seqs=2), few.prompts, sampling)
    together, stats = real.shared.run(Engine(block_size=1, num_blocks=40), few.prompts, sampling)
    assert [c.token_ids for c in together] == [c.token_ids for c in apart]
    assert stats.total_preemptions_recompute > 0


def test_log_04_logprobs_equal_a_plain_forward_pass(real: Stand, few: Reference) -> None:
    params = replace(greedy(3), logprobs=2, prompt_logprobs=2)
    prompts = few.prompts[:3]
    completions, _ = real.shared.run(Engine(budget=5), prompts, params)
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = prompt + completion.token_ids
        with torch.inference_mode():
            logits = real.hf_model(torch.tensor([ids])).logits[0]
        scores = completion.prompt_logprobs + completion.logprobs
        assert [s.token_id for s in scores] == ids[1:]
        expected = logits[:-1].log_softmax(-1)
        own = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert torch.allclose(torch.tensor([s.logprob for s in scores]), own, atol=1e-3)
        best = torch.tensor([s.top_logprobs for s in scores])
        assert torch.allclose(best, expected.topk(2).values, atol=1e-3)


@pytest.fixture(scope="module")
def all_32(real: Stand) -> Reference:
    return real.reference(real.prompts, 32)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", RANGE, ids=repr)
def test_32_answers_equal_transformers_over_the_whole_range_of_settings(
    real: Stand, all_32: Reference, engine: Engine
) -> None:
    assert_settings_change_nothing(real, all_32, engine)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", CROWDED_RANGE, ids=repr)
def test_real_answers_survive_hundreds_of_preemptions(real: Stand, engine: Engine) -> None:
    reference = real.reference([p for p in real.prompts if len(p) <= 30], 32)
    assert_preemption_changes_nothing(real, reference, engine, copies=12, at_least=200)
