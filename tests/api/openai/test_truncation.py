"""`truncation: "auto"` makes room by whole items, oldest first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serve.messages import AddRequest
from tests.api.conftest import Server, running_server
from tests.api.scripted import TEMPLATE

CONTEXT = 512


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[Server, httpx.Client]]:
    with running_server(max_model_len=CONTEXT) as server, server.http() as http:
        yield server, http


def asked(stage: tuple[Server, httpx.Client], items: Any, **fields: Any) -> tuple[Any, str]:
    """The answer, and the prompt that the engine got."""
    server, http = stage
    answer = http.post("/v1/responses", json={"input": items, "truncation": "auto", **fields})
    assert answer.status_code == 200, answer.text
    request = next(m for m in reversed(server.client.received) if isinstance(m, AddRequest))
    return answer.json(), server.tokenizer.decode_now(request.prompt_token_ids, False)


def turn(role: str, name: str, size: int = 60) -> dict[str, str]:
    return {"role": role, "content": name + "." * size}


def shown(prompt: str, names: str) -> str:
    return "".join(name for name in names if f"\n{name}" in prompt)


def test_api_41_whole_items_go_until_the_answer_has_its_room(
    stage: tuple[Server, httpx.Client],
) -> None:
    turns = [turn("user" if i % 2 == 0 else "assistant", name) for i, name in enumerate("ABCDEFG")]
    kept = []
    for room in (16, 100, 200, 300, 400, 500):
        fields = {"instructions": "be kind", "max_output_tokens": room}
        if room == 500:  # not even the last one fits beside it
            _, http = stage
            body = {"input": turns, "truncation": "auto", **fields}
            refused = http.post("/v1/responses", json=body)
            assert refused.json()["error"]["param"] == "max_output_tokens"
            continue
        answer, prompt = asked(stage, turns, **fields)
        assert prompt.startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>")
        assert answer["usage"]["input_tokens"] + room <= CONTEXT
        kept.append(shown(prompt, "ABCDEFG"))
        dropped = 7 - len(kept[-1])
        assert kept[-1] == "ABCDEFG"[dropped:]
        if dropped:  # one more would not have fitted
            one = answer["usage"]["input_tokens"] / (len(kept[-1]) + 0.5)
            assert answer["usage"]["input_tokens"] + 1.2 * one + room > CONTEXT
    assert kept[0] > ""
    assert [len(each) for each in kept] == sorted((len(each) for each in kept), reverse=True)


def test_api_41_without_a_stated_length_there_is_room_for_an_answer(
    stage: tuple[Server, httpx.Client],
) -> None:
    answer, prompt = asked(stage, [turn("user", name) for name in "ABCDEFGH"])
    assert answer["status"] == "completed"
    assert answer["usage"]["input_tokens"] <= CONTEXT * 3 // 4
    assert prompt.count("<|im_end|>") == prompt.count("<|im_start|>") - 1
    alone, _ = asked(stage, [turn("user", "A", 440)])  # less room is better than none
    assert alone["usage"]["output_tokens"] > 1


def test_api_41_an_item_is_never_cut(stage: tuple[Server, httpx.Client]) -> None:
    _, http = stage
    for items in ("word " * 3000, [turn("user", "A"), turn("user", "B", 3000)]):
        for fields in ({}, {"max_output_tokens": 16}):
            body = {"input": items, "truncation": "auto", **fields}
            refused = http.post("/v1/responses", json=body).json()["error"]
            assert (refused["code"], refused["param"]) == ("context_length_exceeded", "input")


def test_api_41_what_instructs_stays_and_results_go_with_their_calls(
    stage: tuple[Server, httpx.Client],
) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "R" + "." * 60}
    items = [
        turn("developer", "A", 5),
        turn("user", "B", 200),
        call,
        call,
        result,
        result,
        turn("user", "C", 60),
    ]
    kept = set()
    for room in range(16, 360, 8):
        _, prompt = asked(stage, items, max_output_tokens=room)
        assert shown(prompt, "AC") == "AC"
        assert (prompt.count("[f {}]"), prompt.count("\nR")) in ((2, 2), (0, 0))
        kept.add(shown(prompt, "ABRC"))
    assert kept >= {"ARC", "AC"}


def test_api_41_a_template_that_wants_a_user_first_gets_one() -> None:
    refusal = "{{ raise_exception('a user must begin') }}"
    strict = f"{{% if messages[0].role != 'user' %}}{refusal}{{% endif %}}{TEMPLATE}"
    with (
        running_server(chat_template=strict, max_model_len=CONTEXT) as server,
        server.http() as http,
    ):
        turns = [
            turn("user" if i % 2 == 0 else "assistant", name) for i, name in enumerate("ABCDEFG")
        ]
        for room in (16, 60, 100, 140, 180, 220, 260):
            _, prompt = asked((server, http), turns, max_output_tokens=room)
            assert prompt.startswith("<|im_start|>user")
            assert len(shown(prompt, "ABCDEFG")) >= 1


def test_api_41_the_whole_conversation_is_kept_and_counted_as_it_is_cut(
    stage: tuple[Server, httpx.Client],
) -> None:
    _, http = stage
    first, _ = asked(stage, [turn("user", name) for name in "ABCD"], max_output_tokens=5)
    body = {
        "input": [turn("user", name) for name in "EFGH"],
        "previous_response_id": first["id"],
        "max_output_tokens": 16,
    }
    second, prompt = asked(stage, body.pop("input"), **body)
    body["input"] = [turn("user", name) for name in "EFGH"]
    counted = http.post("/v1/responses/input_tokens", json={**body, "truncation": "auto"}).json()
    listed = http.get(f"/v1/responses/{second['id']}/input_items?limit=100").json()
    assert shown(prompt, "ABCDEFGH") in "ABCDEFGH"[1:]
    assert counted["input_tokens"] == second["usage"]["input_tokens"]
    assert len(listed["data"]) == 9
