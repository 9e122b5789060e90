"""The Responses API, through OpenAI's official client."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest

from serve.api.openai.responses_answer import ResponseWriter
from serve.config import ServerConfig
from serve.messages import AddRequest
from tests.api.conftest import ANSWER, MODEL, Server, running_server
from tests.api.scripted import Script

NAMED_SCHEMA = {"type": "json_schema", "name": "x"}


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


def test_api_45_a_stream_has_the_apis_order_and_the_same_text(client: openai.OpenAI) -> None:
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
@pytest.mark.parametrize("scored", [False, True])
def test_an_answer_with_log_probabilities_is_not_written_on_the_event_loop(
    server: Server,
    client: openai.OpenAI,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
    scored: bool,
) -> None:
    threads: list[int] = []
    write = ResponseWriter.whole

    def whole(self: ResponseWriter, *args: Any) -> Any:
        threads.append(threading.get_ident())
        return write(self, *args)

    monkeypatch.setattr(ResponseWriter, "whole", whole)
    include: Any = ["message.output_text.logprobs"] if scored else []
    answer: Any = client.responses.create(
        model=MODEL, input="Hello", include=include, max_output_tokens=2, stream=stream
    )
    if stream:
        list(answer)
    (thread,) = threads
    assert (thread == server.on_loop(threading.get_ident)) is not scored


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
        ({"input": [{"type": "item_reference"}]}, "input.0.id"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        (
            {
                "instructions": "x",
                "input": [
                    {"role": "user", "content": "a"},
                    {"type": "function_call_output", "output": [{"type": "input_image"}]},
                ],
            },
            "input.1.output.0",
        ),
        ({"input": [{"type": "function_call", "arguments": "{"}]}, "input.0.arguments"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "temperature": -1}, "temperature"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "a", "background": True, "store": False}, "background"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "a" * 10**4}, "input"),
        ({"input": "a", "text": {"format": "text"}}, "text.format"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.name"),
        (
            {
                "input": "a",
                "text": {"format": {"type": "json_schema", "name": "x", "json_schema": {}}},
            },
            "text.format.schema",
        ),
        (
            {"input": "a", "text": {"format": {**NAMED_SCHEMA, "schema": {"type": "x"}}}},
            "text.format.schema",
        ),
    ],
)
def test_errors_name_the_field_by_its_name_here(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        response = http.post("/v1/responses", json={"stream": stream, **fields})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        chats = ("messages", "max_tokens", "response_format", "json_schema'", "previous_response")
        assert not any(name in error["message"].replace("json_schema'.", "") for name in chats)


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


def test_items_are_referred_to_by_the_ids_that_answers_and_lists_tell(
    client: openai.OpenAI, server: Server
) -> None:
    server.script = "two"
    first = client.responses.create(model=MODEL, input="one")
    (given,) = client.responses.input_items.list(first.id).data
    items: Any = [
        {"type": "item_reference", "id": given.id},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"id": first.output[0].id},
        {"role": "user", "content": [{"type": "input_text", "text": "three"}]},
    ]

    second = client.responses.create(model=MODEL, input=items)

    assert rendered(server) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )
    client.responses.delete(first.id)  # the second conversation holds the items as well
    client.responses.create(model=MODEL, input=items)
    client.responses.delete(second.id)


@pytest.mark.parametrize("stream", [False, True])
def test_an_item_that_is_not_stored_or_twice_there_is_refused(
    client: openai.OpenAI, stream: bool
) -> None:
    unstored = client.responses.create(model=MODEL, input="one", store=False)
    deleted = client.responses.create(model=MODEL, input="one")
    client.responses.delete(deleted.id)
    named = {"role": "user", "content": "a", "id": "item_1"}  # anybody may name an item so
    client.responses.create(model=MODEL, input=[named])  # type: ignore[list-item]
    for item_id in ("msg_unheard", unstored.output[0].id, deleted.output[0].id, "item_1"):
        items: Any = [{"type": "item_reference", "id": item_id}, {"role": "user", "content": "a"}]
        with pytest.raises(openai.NotFoundError) as refused:
            client.responses.create(model=MODEL, input=items, stream=stream)
        assert refused.value.param == "input.0.id"

    kept = client.responses.create(model=MODEL, input="one")
    items = [{"type": "item_reference", "id": kept.output[0].id}]
    with pytest.raises(openai.BadRequestError, match="already"):
        client.responses.create(model=MODEL, input=items * 2, stream=stream)
    with pytest.raises(openai.BadRequestError, match="already"):
        client.responses.create(
            model=MODEL, input=items, previous_response_id=kept.id, stream=stream
        )


def test_what_a_response_was_given_is_listed_in_pages(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    items: Any = [
        {"role": "developer", "content": "be kind"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
        {"role": "user", "content": "one", "id": "mine"},
    ]
    first = client.responses.create(model=MODEL, input=items, instructions="not this")
    second = client.responses.create(model=MODEL, input="two", previous_response_id=first.id)

    def page(**query: Any) -> Any:
        answer = http.get(f"/v1/responses/{second.id}/input_items", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    oldest = page(order="asc", limit=100)
    kinds = ["message", "function_call", "function_call_output", "message", "message", "message"]
    assert [item["type"] for item in oldest["data"]] == kinds
    assert oldest["data"][0]["content"] == [{"type": "input_text", "text": "be kind"}]
    ids = [item["id"] for item in oldest["data"]]
    assert ids[3:5] == ["mine", first.output[0].id]
    assert len(set(ids)) == 6
    assert (oldest["first_id"], oldest["last_id"]) == (ids[0], ids[-1])
    assert page()["data"] == oldest["data"][::-1]
    pages = [page(limit=4), page(limit=4, after=ids[2])]
    assert [item["id"] for each in pages for item in each["data"]] == ids[::-1]
    assert [each["has_more"] for each in pages] == [True, False]
    listed = client.responses.input_items.list(second.id, limit=2)
    assert [item.id for item in listed] == ids[::-1]
    for query in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "unheard"}):
        refused = http.get(f"/v1/responses/{second.id}/input_items", params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, *query)
    assert http.get("/v1/responses/resp_x/input_items").status_code == 404


@pytest.mark.parametrize("scored", [False, True])
def test_a_kept_answer_is_streamed_again_as_it_was(
    client: openai.OpenAI, http: httpx.Client, scored: bool
) -> None:
    asked: Any = {"model": MODEL, "input": "Hello", "stream": True}
    if scored:
        asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    live = http.post("/v1/responses", json=asked).text.split("\n\n")
    events: list[Any] = list(client.responses.create(**asked))
    response_id = events[0].response.id

    again = list(client.responses.retrieve(response_id, stream=True))
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=5))

    def plain(event: Any) -> Any:
        return event.model_dump(exclude_unset=True)

    assert len(live) == len(events) + 1
    assert list(map(plain, again)) == list(map(plain, events))
    assert list(map(plain, rest)) == list(map(plain, events[6:]))
    assert (
        list(client.responses.retrieve(response_id, stream=True, starting_after=len(events) - 1))
        == []
    )
    path = f"/v1/responses/{response_id}"
    for query, param in (
        ({"stream": "true", "starting_after": len(events)}, "starting_after"),
        ({"stream": "true", "starting_after": -1}, "starting_after"),
        ({"starting_after": 1}, "starting_after"),
        ({"stream": "maybe"}, "stream"),
    ):
        refused = http.get(path, params=query)  # type: ignore[arg-type]
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert http.get("/v1/responses/resp_x?stream=true").status_code == 404


def test_an_answer_that_was_not_streamed_is_one_piece_in_its_events(
    client: openai.OpenAI, server: Server
) -> None:
    done = client.responses.create(model=MODEL, input="Hello", max_output_tokens=2)

    events: list[Any] = list(client.responses.retrieve(done.id, stream=True))

    assert [event.sequence_number for event in events] == list(range(9))
    assert (events[4].delta, events[-1].type) == (" Hello world", "response.incomplete")
    assert events[-1].response == done

    server.script = Script(server.ids(ANSWER), fail_after=2)
    failed = client.responses.create(model=MODEL, input="Hello", background=True)
    until_ended(client, failed.id)
    names = [event.type for event in client.responses.retrieve(failed.id, stream=True)]
    assert names == ["response.created", "response.in_progress", "response.failed"]


def test_no_response_is_called_as_a_route_is(http: httpx.Client) -> None:
    for name in ("input_tokens", "compact"):
        for method in ("GET", "DELETE"):
            wrong = http.request(method, f"/v1/responses/{name}")
            assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    compact = http.post("/v1/responses/compact", json={"input": "a"})
    assert compact.status_code == 400
    assert "/v1/responses/compact" in compact.json()["error"]["message"]


def test_input_tokens_are_counted_as_the_answer_counts_them(client: openai.OpenAI) -> None:
    kept = client.responses.create(model=MODEL, input="one")
    asked: Any = {
        "model": MODEL,
        "instructions": "be kind",
        "input": [{"role": "user", "content": "two"}],
        "previous_response_id": kept.id,
    }
    counted = client.responses.input_tokens.count(**asked)
    usage = client.responses.create(**asked).usage
    assert usage is not None
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", usage.input_tokens)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(**{**asked, "previous_response_id": "resp_x"})


def test_what_was_asked_is_told_in_the_answer(http: httpx.Client) -> None:
    asked: dict[str, Any] = {
        "instructions": "be kind",
        "max_output_tokens": 5,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "reasoning": {"effort": "low", "summary": "auto"},
        "safety_identifier": "s",
        "service_tier": "flex",
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": "none",
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "top_logprobs": 2,
        "top_p": 0.5,
        "truncation": "auto",
        "user": "u",
    }
    answer = http.post("/v1/responses", json={"input": "a", **asked}).json()
    assert {name: answer[name] for name in asked} == asked
    begun = http.post("/v1/responses", json={"input": "a", "stream": True, **asked}).text
    first = json.loads(begun.splitlines()[1].removeprefix("data: "))["response"]
    assert {name: first[name] for name in asked} == asked
    plain = http.post("/v1/responses", json={"input": "a"}).json()
    assert {name: plain[name] for name in asked if name not in ("temperature", "top_p")} == {
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        "user": None,
    }


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
def test_an_answer_that_is_gone_is_named_by_its_id(
    client: openai.OpenAI, http: httpx.Client, method: str
) -> None:
    gone = client.responses.create(model=MODEL, input="a").id
    client.responses.delete(gone)
    refused = http.request(method, f"/v1/responses/{gone}" + "/cancel" * (method == "POST"))
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (404, "response_id")
    assert "it was deleted" in error["message"]
    following = http.post("/v1/responses", json={"input": "a", "previous_response_id": gone})
    assert following.status_code == 404
    assert following.json()["error"]["param"] == "previous_response_id"


def test_background_responses_are_limited_and_deleted_while_they_run() -> None:
    with running_server(ServerConfig(max_background_responses=1)) as server, server.http() as http:
        server.script = Script(server.ids(ANSWER), hold_after=2)
        wish = {"input": "a", "background": True}
        begun = http.post("/v1/responses", json=wish).json()
        refused = http.post("/v1/responses", json=wish)
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        assert "--max-background-responses" in refused.json()["error"]["message"]
        path = f"/v1/responses/{begun['id']}"
        assert http.get(f"{path}?stream=true").json()["error"]["param"] == "stream"
        assert len(http.get(f"{path}/input_items").json()["data"]) == 1
        assert http.delete(path).status_code == 200
        assert http.get(path).status_code == 404
        assert server.on_loop(lambda: dict(server.client.running)) == {}
        assert http.post("/v1/responses", json=wish).status_code == 200
