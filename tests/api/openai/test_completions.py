"""`POST /v1/completions`: prompts of every shape, echo, limits."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from serve.messages import AddRequest
from tests.api.conftest import ANSWER, MODEL, Server
from tests.api.scripted import Script
from tests.api.sse import events


def complete(http: httpx.Client, prompt: Any = "Hello", **fields: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": prompt, **fields})


def texts(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def test_a_completion_has_openais_shape(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=100)

    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (ANSWER, "stop", 0)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}])
def test_val_04_sixteen_tokens_are_the_default(
    http: httpx.Client, server: Server, fields: dict[str, Any]
) -> None:
    server.script = " one" * 50

    answer = complete(http, **fields).json()

    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_each_shape_of_prompt_is_understood(http: httpx.Client, server: Server) -> None:
    ids = server.ids("Hello world")
    shapes: list[tuple[Any, list[list[int]]]] = [
        ("Hello world", [ids]),
        (["Hello world", "Hello"], [ids, ids[:1]]),
        (ids, [ids]),
        ([ids, [1], [2, 3, 4]], [ids, [1], [2, 3, 4]]),
    ]
    for prompt, expected in shapes:
        before = len(server.client.received)
        answer = complete(http, prompt, max_tokens=1)
        added = [m for m in server.client.received[before:] if isinstance(m, AddRequest)]
        assert [m.prompt_token_ids for m in added] == expected
        assert len(texts(answer)) == len(expected)
        assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_choices_run_over_prompts_and_then_over_n(http: httpx.Client, server: Server) -> None:
    server.script = lambda request: Script(request.prompt_token_ids)

    answer = complete(http, ["one", " two"], n=2)

    assert texts(answer) == ["one", "one", " two", " two"]
    assert [c["index"] for c in answer.json()["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], {"a": 1}, None, 5, True, ["a", 5], [1, "a"], [-1], [1.5], ["a", None], [10**10]],
)
def test_a_misshapen_prompt_is_refused_by_name(http: httpx.Client, prompt: Any) -> None:
    response = complete(http, prompt)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("prompt", ["", [100_000], ["ok", [100_000]]])
def test_a_prompt_without_tokens_or_with_unknown_ones_is_refused(
    http: httpx.Client, prompt: Any
) -> None:
    response = complete(http, prompt)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


def test_a_prompt_beyond_the_context_is_refused_with_the_limit(
    http: httpx.Client, server: Server
) -> None:
    for prompt in (" one" * 600, [1] * 600, "x" * 3_000_000):
        response = complete(http, prompt)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert str(server.client.max_model_len) in response.json()["error"]["message"]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_log_03_echo_without_new_tokens_scores_a_prompt(
    http: httpx.Client, server: Server, as_ids: bool, logprobs: int | None
) -> None:
    prompt = server.ids("Hello world") if as_ids else "Hello world"

    answer = complete(http, prompt, max_tokens=0, echo=True, logprobs=logprobs).json()

    (choice,) = answer["choices"]
    assert choice["text"] == "Hello world"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    if logprobs is not None:
        assert choice["logprobs"]["tokens"] == ["Hello", " world"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    else:
        assert choice["logprobs"] is None


def test_echo_repeats_each_prompt(http: httpx.Client) -> None:
    answer = complete(http, ["one", "Hello"], echo=True, max_tokens=1)

    assert texts(answer) == ["one Hello", "Hello Hello"]


def test_an_echoed_prompt_shows_what_truncation_left(http: httpx.Client) -> None:
    answer = complete(http, "one two three", echo=True, max_tokens=1, truncate_prompt_tokens=2)

    assert texts(answer) == [" two three Hello"]


def test_token_ids_come_on_request_streamed_or_not(http: httpx.Client, server: Server) -> None:
    fields: dict[str, Any] = {"return_token_ids": True, "max_tokens": 20}
    (choice,) = complete(http, "Hello", **fields).json()["choices"]
    chunks = events(complete(http, "Hello", stream=True, **fields))[:-1]

    assert choice["token_ids"] == server.ids(ANSWER)[:20]
    assert choice["prompt_token_ids"] == server.ids("Hello")
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
    assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert all("prompt_token_ids" not in part for part in parts[1:])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 100_000}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"seed": 10**20}, "seed"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "much"}}, "logit_bias.1"),
        ({"bad_words": [""]}, "bad_words"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_interval": 0}, "stream_interval"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)
def test_str_11_a_bad_value_is_a_400_that_names_the_field_streaming_or_not(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    for stream in ({}, {"stream": True}):
        response = complete(http, **{**stream, **fields})
        if "stream_options" in fields and stream:
            continue
        assert response.status_code == 400, response.text
        assert response.headers["content-type"] == "application/json"
        assert response.json()["error"]["param"] == param
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_smp_08_an_unknown_stop_token_id_is_refused(http: httpx.Client, server: Server) -> None:
    response = complete(http, stop_token_ids=[server.engine.model.vocab_size + 5], min_tokens=3)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop_token_ids"


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_tok_03_an_empty_stop_string_is_refused(http: httpx.Client, stop: Any) -> None:
    response = complete(http, stop=stop)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop"


@pytest.mark.parametrize("stop", [[], None, list("QVXYZ"), "x" * 1024])
def test_tok_03_none_many_and_long_stop_strings_are_fine(http: httpx.Client, stop: Any) -> None:
    assert texts(complete(http, stop=stop, max_tokens=100)) == [ANSWER]


def test_prompts_are_limited_in_number(http: httpx.Client) -> None:
    response = complete(http, ["a"] * 1025)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert len(texts(complete(http, ["a"] * 64, max_tokens=1))) == 64


def test_a_failed_step_is_a_500_and_the_next_request_is_fine(
    http: httpx.Client, server: Server
) -> None:
    server.script = Script(server.ids(ANSWER), fail_after=2)
    failed = complete(http)
    server.script = ANSWER

    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "step_failed"
    assert failed.json()["error"]["message"] == "the step blew up"
    assert texts(complete(http, max_tokens=100)) == [ANSWER]
