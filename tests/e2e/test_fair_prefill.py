"""The real engine with a tiny model: a short prompt behind a long one, counted in steps."""

from __future__ import annotations

from typing import Any

import pytest

from serve.engine.core import EngineCore
from serve.messages import AddRequest, Control, FromEngine
from serve.scheduler.policy.passing import TIMES_SHORTER
from tests.e2e.shared_model import Engine, SharedModel, greedy
from tests.tiny_models import random_tokens, save_model

BUDGET = 16
LONG, SHORT, OTHER = random_tokens(800, 1), random_tokens(30, 2), random_tokens(200, 3)
Answers = dict[str, tuple[int, list[int]]]
"""Of each request: the step of its first token, and all of its tokens."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> SharedModel:
    path = tmp_path_factory.mktemp("tiny")
    save_model(path, max_position_embeddings=1024)
    return SharedModel(path, num_threads=1)


def start(shared: SharedModel, **settings: Any) -> EngineCore:
    core = shared.start(Engine(budget=BUDGET))
    control(core, "configure", **settings)
    return core


def control(core: EngineCore, name: str, **args: Any) -> Any:
    box: list[FromEngine] = []
    core.outbox.send = box.append  # type: ignore[method-assign]
    core.handle(Control(0, name, args))
    return box[0].value  # type: ignore[union-attr]


def ask(core: EngineCore, **prompts: list[int]) -> None:
    for name, prompt in prompts.items():
        core.handle(AddRequest(name, prompt, greedy(6), arrival_time=0.0))


def finish(core: EngineCore) -> Answers:
    answers: Answers = {}
    number = 0
    while core.has_work():
        number += 1
        for delta in core.step():
            assert delta.error is None, delta.error
            _, tokens = answers.setdefault(delta.request_id, (number, []))
            tokens += delta.token_ids
    return answers


def test_a_short_prompt_is_not_kept_waiting_and_nobodys_answer_changes(
    shared: SharedModel,
) -> None:
    core = start(shared)
    ask(core, long=LONG)
    alone = finish(core)["long"]
    assert alone[0] == len(LONG) // BUDGET
    found: dict[bool, Answers] = {}
    for fair in (True, False):
        core = start(shared, fair_prefill=fair)
        ask(core, long=LONG)
        core.step()
        ask(core, other=OTHER, short=SHORT)
        found[fair] = finish(core)
    fair, strict = found[True], found[False]
    assert fair["short"][0] <= alone[0] / 10
    assert fair["long"][0] <= 1.1 * alone[0]
    assert strict["short"][0] > strict["long"][0] >= alone[0] - 1
    for name in ("long", "short", "other"):
        assert fair[name][1] == strict[name][1]
    assert fair["long"][1] == alone[1]


def test_an_explanation_says_who_passes_and_who_waits(shared: SharedModel) -> None:
    core = start(shared)
    ask(core, long=LONG)
    core.step()
    ask(core, other=OTHER, short=SHORT)

    def reason(name: str) -> str:
        (entry,) = control(core, "requests", request_id=name)
        return str(entry["reason"])

    left = len(LONG) - BUDGET
    assert reason("short").startswith("waiting: it starts in one of the next steps")
    assert reason("other").startswith(
        f"waiting: a prompt that has begun lacks {left} tokens, "
        f"and only prompts of {left // TIMES_SHORTER} or fewer pass it"
    )
    control(core, "configure", fair_prefill=False)
    assert reason("short").startswith(
        f"waiting: a prompt that has begun lacks {left} tokens; 1 request ahead"
    )
    finish(core)


def test_a_newcomer_finds_its_prefix_and_passes(shared: SharedModel) -> None:
    core = start(shared)
    ask(core, first=OTHER)
    finish(core)
    ask(core, long=LONG)
    core.step()
    ask(core, second=[*OTHER, *random_tokens(9, 4)])
    assert finish(core)["second"][0] <= 3
