"""The Responses API, through OpenAI's official client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from serve.api.protocol.chat import Message
from serve.api.response_store import ResponseStore, StoredResponse
from serve.messages import AddRequest
from tests.api.conftest import ANSWER, MODEL, Server
from tests.api.scripted import Script


def rendered(server: Server) -> str:
    request = next(m for m in reversed(server.client.received) if isinstance(m, AddRequest))
    return server.tokenizer.decode_now(request.prompt_token_ids, False)


def test_an_answer_has_the_apis_shape(client: openai.OpenAI, server: Server) -> None:
    answer = client.responses.create(model=MODEL, input="Hello", instructions="be kind")

    assert answer.output_text == ANSWER
    assert answer.status == "completed"
    assert answer.id.startswith("resp_")
    assert answer.instructions == "be kind"
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(server.ids(ANSWER)) + 1
    assert rendered(server) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_cut_answer_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Hello", max_output_tokens=2)

    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == " Hello world"


def test_a_stream_has_the_apis_order_and_the_same_text(client: openai.OpenAI) -> None:
    events: list[Any] = list(client.responses.create(model=MODEL, input="Hello", stream=True))

    names = [event.type for event in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(names[4:-4]) == {"response.output_text.delta"}
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == ANSWER == events[-4].text
    final = events[-1].response
    assert final.output_text == ANSWER
    assert final.id == events[0].response.id
    assert client.responses.retrieve(final.id).output_text == ANSWER


def test_the_clients_stream_helper_understands_it(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Hello") as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()

    assert "".join(deltas) == final.output_text == ANSWER


def test_a_conversation_goes_on_from_a_stored_answer(client: openai.OpenAI, server: Server) -> None:
    server.script = "two"
    first = client.responses.create(model=MODEL, input="one", instructions="only now")
    server.script = "four"
    second = client.responses.create(model=MODEL, input="three", previous_response_id=first.id)
    server.script = ANSWER
    client.responses.create(model=MODEL, input="five", previous_response_id=second.id)

    assert rendered(server) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
        "<|im_start|>user\nfive<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second.previous_response_id == first.id


def test_answers_that_are_not_stored_or_deleted_are_not_found(client: openai.OpenAI) -> None:
    unstored = client.responses.create(model=MODEL, input="one", store=False)
    deleted = client.responses.create(model=MODEL, input="one")
    client.responses.delete(deleted.id)

    for response_id in (unstored.id, deleted.id, "resp_unheard"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(response_id)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model=MODEL, input="x", previous_response_id=response_id)


def test_items_of_every_kind_become_turns(client: openai.OpenAI, server: Server) -> None:
    items: Any = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
    ]

    client.responses.create(model=MODEL, input=items)

    assert rendered(server) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
        "<|im_start|>assistant\ntwo<|im_end|>\n"
        '<|im_start|>assistant\n[f {"a": 1}]<|im_end|>\n'
        "<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_come_when_included(client: openai.OpenAI, stream: bool) -> None:
    answer: Any = client.responses.create(
        model=MODEL,
        input="Hello",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        max_output_tokens=2,
        stream=stream,
    )
    if stream:
        answer = list(answer)[-1].response

    (first, second) = answer.output[0].content[0].logprobs
    assert (first.token, second.token) == (" Hello", " world")
    assert [top.logprob for top in first.top_logprobs] == [-0.5, -9999.0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"content": "a"}]}, "input.0.role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "temperature": -1}, "temperature"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "a", "background": True, "store": False}, "background"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "text": {"format": {"type": "json_object"}}}, "text.format"),
    ],
)
def test_errors_name_the_field_by_its_name_here(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        response = http.post("/v1/responses", json={"stream": stream, **fields})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


def test_a_failure_in_mid_stream_ends_with_a_failed_response(
    client: openai.OpenAI, server: Server
) -> None:
    server.script = Script(server.ids(ANSWER), fail_after=3)

    events: list[Any] = list(client.responses.create(model=MODEL, input="Hello", stream=True))

    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.message == "the step blew up"


def test_a_background_response_is_asked_for_until_it_is_there(
    client: openai.OpenAI, server: Server
) -> None:
    server.script = Script(server.ids(ANSWER), hold_after=2)
    begun = client.responses.create(model=MODEL, input="Hello", background=True)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    assert client.responses.retrieve(begun.id).status == "in_progress"

    server.on_loop(lambda: resume(server))
    done = until_ended(client, begun.id)

    assert (done.status, done.output_text) == ("completed", ANSWER)
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        client.responses.cancel(begun.id)
    server.script = ANSWER
    following = client.responses.create(model=MODEL, input="And?", previous_response_id=begun.id)
    assert following.output_text == ANSWER
    assert ANSWER in rendered(server)


def test_a_background_response_can_be_cancelled(client: openai.OpenAI, server: Server) -> None:
    server.script = Script(server.ids(ANSWER), hold_after=2)
    begun = client.responses.create(model=MODEL, input="Hello", background=True)

    cancelled = client.responses.cancel(begun.id)

    assert (cancelled.id, cancelled.status) == (begun.id, "cancelled")
    assert client.responses.retrieve(begun.id).status == "cancelled"
    assert server.on_loop(lambda: dict(server.client.running)) == {}
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(begun.id)


def test_a_background_response_that_fails_says_so(client: openai.OpenAI, server: Server) -> None:
    server.script = Script(server.ids(ANSWER), fail_after=2)
    begun = client.responses.create(model=MODEL, input="Hello", background=True)

    failed = until_ended(client, begun.id)

    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.message == "the step blew up"


def test_what_cannot_be_cancelled_is_refused(client: openai.OpenAI, http: httpx.Client) -> None:
    ended = client.responses.create(model=MODEL, input="Hello")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(ended.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_unknown")
    streamed = http.post("/v1/responses", json={"input": "a", "background": True, "stream": True})
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "background")


def resume(server: Server) -> None:
    """Let a held request go on to its end (on the event loop)."""
    for entry in server.client.running.values():
        entry.script = Script(entry.script.token_ids)
    server.client.wake()


def until_ended(client: openai.OpenAI, response_id: str) -> Any:
    while (response := client.responses.retrieve(response_id)).status == "in_progress":
        pass
    return response


def test_the_store_forgets_the_least_recently_used_first() -> None:
    store = ResponseStore(max_bytes=100)

    def response(size: int) -> StoredResponse:
        return StoredResponse([Message(role="user", content="x" * (size - 10))], b"y" * 10)

    store.put("a", response(40))
    store.put("b", response(40))
    assert store.get("a") is not None
    store.put("c", response(40))
    assert store.get("b") is None
    assert store.get("a") is not None
    assert store.get("c") is not None
    store.put("huge", response(1000))
    assert [store.get(name) for name in ("a", "c", "huge")] == [None] * 3
    store.put("d", response(100))
    assert store.get("d") is not None
    assert store.delete("d")
    assert not store.delete("d")
    store.put("e", response(100))
    assert store.get("e") is not None
