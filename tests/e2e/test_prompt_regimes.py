"""RoPE whose angles depend on a sequence's length: the prefix cache never changes an answer.

Greedy output equals `generate` of a transformers model that has seen nothing else, whatever was
asked of our engine before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from serve.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from serve.engine.build import build_engine_core
from serve.engine.core import EngineCore
from serve.messages import Control, FromEngine, ToEngine
from tests.e2e.shared_model import Engine, SharedModel, answer, greedy
from tests.tiny_models import random_tokens, save_model

ORIGINAL = 64
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 5.0, 8.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
KINDS: dict[str, dict[str, Any]] = {
    "longrope": {"max_position_embeddings": 8 * ORIGINAL, "rope_parameters": LONGROPE},
    "dynamic": {"max_position_embeddings": ORIGINAL, "rope_parameters": DYNAMIC},
}
SHARED = random_tokens(48, seed=1)
SHORT = SHARED + random_tokens(3, seed=2)
NEARLY = SHARED + random_tokens(12, seed=3)  # its answer passes the original length
LONG = SHARED + random_tokens(60, seed=4)
LONGER = SHARED + random_tokens(70, seed=5)
EXACT = SHARED + random_tokens(ORIGINAL - 48, seed=6)
PAST = EXACT + random_tokens(1, seed=7)
PROMPTS = [SHORT, NEARLY, LONG, LONGER, EXACT, PAST]
NUM_TOKENS = 10


class Stand:
    """One tiny model in both implementations."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        save_model(path, **KINDS[kind])
        self.shared = SharedModel(path, num_threads=1)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def reference(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        """What a fresh model says."""
        key = (*prompt, -num_tokens)
        if key not in self._known:
            model = AutoModelForCausalLM.from_pretrained(self.path, attn_implementation="eager")
            model.generation_config.eos_token_id = None
            greedily = GenerationConfig(
                do_sample=False, max_new_tokens=num_tokens, pad_token_id=0, eos_token_id=None
            )
            found = model.generate(torch.tensor([list(prompt)]), generation_config=greedily)
            self._known[key] = found[0, len(prompt) :].tolist()
        return self._known[key]

    def check(self, core: EngineCore, prompts: Sequence[list[int]]) -> None:
        """All at once, of an engine that may have been asked before."""
        completions, _ = answer(core, prompts, greedy(NUM_TOKENS))
        for prompt, completion in zip(prompts, completions, strict=True):
            assert completion.token_ids == self.reference(prompt), (self.kind, len(prompt))


@pytest.fixture(scope="module", params=KINDS)
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stand:
    return Stand(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("order", [PROMPTS, PROMPTS[::-1], [EXACT, PAST, NEARLY, LONGER]])
def test_sch_41_no_order_of_prompts_changes_an_answer(stand: Stand, order: list[list[int]]) -> None:
    core = stand.shared.start(Engine(block_size=4, budget=20))
    for prompt in order:
        stand.check(core, [prompt])
    stand.check(core, order)  # and together, over whatever is cached by now


def test_sch_41_a_chat_whose_later_turns_pass_the_original_length(stand: Stand) -> None:
    core = stand.shared.start(Engine(block_size=4))
    history = SHORT
    for turn in range(3):
        stand.check(core, [history])
        history = history + stand.reference(history) + random_tokens(9, seed=turn)
        stand.check(core, [history[:ORIGINAL], history])


@pytest.mark.parametrize(("mode", "host"), [("recompute", 0), ("swap", 60)])
def test_sch_41_preemption_and_several_answers_to_one_prompt(
    stand: Stand, mode: str, host: int
) -> None:
    engine = Engine(
        block_size=1, num_blocks=140, budget=30, preemption_mode=mode, num_host_blocks=host
    )
    prompts = [NEARLY, NEARLY, SHORT, SHORT, SHORT, EXACT, LONG, PAST]
    completions, stats = stand.shared.run(engine, prompts, greedy(30))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == stand.reference(prompt, 30)
    assert stats.total_preemptions_recompute + stats.total_preemptions_swap > 1


def test_sch_41_prompts_of_one_regime_still_share(stand: Stand) -> None:
    core = stand.shared.start(Engine(block_size=16))
    cached = []
    for prompt in (SHORT, NEARLY, LONG, LONGER, LONGER):
        before = core.scheduler.stats().total_prefix_cache_hits
        stand.check(core, [prompt])
        cached.append(core.scheduler.stats().total_prefix_cache_hits - before)
    shared, again = 48, 112
    assert (
        cached
        == {
            "longrope": [0, shared, 0, shared, again],
            "dynamic": [0, shared, 0, 0, again],
        }[stand.kind]
    )


def test_sch_41_a_pin_keeps_a_prefix_for_the_prompts_that_can_share_it(stand: Stand) -> None:
    core = stand.shared.start(replace(Engine(block_size=16), num_blocks=100))
    box: list[FromEngine] = []
    core.outbox.send = box.append  # type: ignore[method-assign]

    def control(name: str, **args: Any) -> Any:
        core.handle(Control(0, name, args))
        return box.pop()

    wish: dict[str, Any] = {"cache_salt": "", "ttl_s": None}
    pinned = control("pin", token_ids=SHARED, **wish).value
    assert pinned["num_tokens"] == 48
    for prompts in ([SHORT], [LONG], [NEARLY, LONGER]):
        stand.check(core, prompts)
    control("reset_prefix_cache")
    stand.check(core, [LONG, SHORT])
    own_length = control("pin", token_ids=LONG, **wish)
    assert ("not shared by longer prompts" in str(own_length)) == (stand.kind == "dynamic")


def test_sch_41_a_prefix_cache_file(stand: Stand, tmp_path: Path) -> None:
    config = EngineConfig(
        model=ModelConfig(str(stand.path)),
        cache=CacheConfig(
            block_size=16,
            num_gpu_blocks_override=60,
            prefix_cache_file=str(tmp_path / "blocks.safetensors"),
        ),
        device=DeviceConfig(device="cpu", cpu_threads=1),
    )
    hits = []
    for prompt in (LONG, SHORT, NEARLY, LONG):
        core, _ = build_engine_core(config, stand.path, _NoMail(), _NoMail())
        stand.check(core, [prompt])
        hits.append(core.scheduler.stats().total_prefix_cache_hits)
        assert core._prefix_file is not None
        core._prefix_file.save()
        core.close()
    assert hits == [0, 0, 48, 96]


class _NoMail:
    def drain(self, block: bool) -> list[ToEngine]:
        return []

    def send(self, message: FromEngine) -> None:
        raise AssertionError(message)
