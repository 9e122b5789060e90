"""`POST /v1/chat/completions`: answers and what each field does to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from serve.config import ServerConfig
from serve.messages import AddRequest
from serve.sampling_params import SamplingParams
from tests.api.conftest import ANSWER, MODEL, Server, running_server
from tests.api.scripted import Script
from tests.api.sse import events

HI: list[Any] = [{"role": "user", "content": "Hello"}]
OPTIONAL_FIELDS = (
    "temperature top_p n stop max_tokens max_completion_tokens presence_penalty frequency_penalty "
    "logit_bias seed user tools tool_choice parallel_tool_calls response_format stream "
    "stream_options logprobs top_logprobs min_tokens top_k min_p repetition_penalty "
    "stop_token_ids bad_words allowed_token_ids ignore_eos skip_special_tokens prompt_logprobs "
    "truncate_prompt_tokens truncation_side add_special_tokens return_token_ids priority "
    "request_id add_generation_prompt continue_final_message chat_template chat_template_kwargs "
    "reasoning_effort documents stream_interval model service_tier store metadata echo suffix"
)


def chat(http: httpx.Client, messages: Any = HI, **fields: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"messages": messages, **fields})


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def last_request(server: Server) -> AddRequest:
    return next(m for m in reversed(server.client.received) if isinstance(m, AddRequest))


def test_an_answer_has_openais_shape(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI)

    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(server.ids(ANSWER)) + 1  # the end token counts
    assert answer.usage.total_tokens == (
        answer.usage.prompt_tokens + answer.usage.completion_tokens
    )


def test_the_raw_response_is_open_to_the_client(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HI)

    assert raw.headers["x-request-id"]
    assert raw.parse().choices[0].message.content == ANSWER


async def test_the_asynchronous_client_gets_the_same(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HI)
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        streamed = [chunk.choices[0].delta.content or "" async for chunk in stream]

    assert answer.choices[0].message.content == ANSWER == "".join(streamed)


def test_ops_09_null_means_the_same_as_leaving_a_field_out(
    http: httpx.Client, server: Server
) -> None:
    bare = chat(http, temperature=0)  # else each request has a seed of its own
    bare_request = last_request(server)

    nulls = chat(http, **dict.fromkeys(OPTIONAL_FIELDS.split()) | {"temperature": 0})

    assert text_of(nulls) == text_of(bare)
    assert last_request(server).sampling == bare_request.sampling
    assert last_request(server).prompt_token_ids == bare_request.prompt_token_ids


def test_sampling_fields_reach_the_engine(http: httpx.Client, server: Server) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.2,
        "seed": 42,
        "min_tokens": 2,
        "max_tokens": 9,
        "logit_bias": {"3": -100, "4": 500},
        "allowed_token_ids": [1, 2],
        "bad_words": ["one"],
        "stop_token_ids": [5],
        "ignore_eos": True,
    }

    assert chat(http, **fields).status_code == 200

    sampling = last_request(server).sampling
    assert sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.2,
        seed=42,
        min_tokens=2,
        max_tokens=9,
        logit_bias={3: -100.0, 4: 100.0},
        allowed_token_ids=(1, 2),
        bad_words_token_ids=(tuple(server.ids("one")), tuple(server.ids(" one"))),
        stop_token_ids=(5,),
        ignore_eos=True,
    )


def test_ops_17_explicit_fields_win_over_the_models_defaults(
    http: httpx.Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = {"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.05}
    model = replace(server.engine.model, generation_defaults=defaults)
    monkeypatch.setattr(server.engine, "model", model)
    chat(http)
    by_default = last_request(server).sampling
    chat(http, temperature=0, top_k=0, repetition_penalty=1)
    explicit = last_request(server).sampling

    assert (by_default.temperature, by_default.top_k, by_default.repetition_penalty) == (
        0.1,
        1,
        1.05,
    )
    assert (explicit.temperature, explicit.top_k, explicit.repetition_penalty) == (0.0, 0, 1.0)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 7}, 5),
        ({"max_tokens": 6.0}, 6),
    ],
)
def test_val_04_max_tokens_by_either_name_or_up_to_the_context(
    http: httpx.Client, server: Server, fields: dict[str, Any], limit: int | None
) -> None:
    server.script = " one" * 600

    usage = chat(http, ignore_eos=True, **fields).json()["usage"]

    room = server.client.max_model_len - usage["prompt_tokens"]
    assert usage["completion_tokens"] == (room if limit is None else limit)


def test_lim_02_an_answer_that_never_ends_itself_ends_with_the_context(
    http: httpx.Client, server: Server
) -> None:
    server.script = " one" * 600

    answer = chat(http, ignore_eos=True).json()

    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == server.client.max_model_len


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "stop_reason"),
    [
        ({"max_tokens": 2}, "length", None),
        ({}, "stop", None),
        ({"stop": "world"}, "stop", "world"),
        ({"max_tokens": 2, "stop": [" world"]}, "stop", " world"),
        ({"stop_token_ids": [265]}, "stop", 265),
    ],
)
def test_lim_01_finish_reason_tells_length_from_stop(
    client: openai.OpenAI,
    server: Server,
    fields: dict[str, Any],
    reason: str,
    stop_reason: str | int | None,
    stream: bool,
) -> None:
    assert server.ids(" world") == [265]
    answer = client.chat.completions.create(
        model=MODEL, messages=HI, stream=stream, extra_body=fields
    )

    last = list(answer)[-1].choices[0] if stream else answer.choices[0]  # type: ignore

    assert last.finish_reason == reason
    assert last.model_extra["stop_reason"] == stop_reason


def test_val_05_messages_that_are_none_or_no_list_are_refused(http: httpx.Client) -> None:
    for messages in ([], None, "hi", [5], [{}], [{"role": "wizard", "content": "x"}]):
        response = chat(http, messages)
        assert response.status_code == 400, messages
        assert response.json()["error"]["param"].startswith("messages")
    assert http.post("/v1/chat/completions", json={}).json()["error"]["param"] == "messages"
    assert text_of(chat(http)) == ANSWER


def test_val_08_a_call_without_content_is_rendered_as_one_with_empty_content(
    http: httpx.Client, server: Server
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    rendered = []
    for content in ({"content": None}, {}, {"content": ""}, {"content": []}):
        history = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "tool_calls": [call], **content},
            {"role": "tool", "tool_call_id": "1", "content": "5"},
        ]
        assert chat(http, history).status_code == 200
        rendered.append(server.tokenizer.decode_now(last_request(server).prompt_token_ids, False))

    assert len(set(rendered)) == 1
    assert '[f {"a": 1}]' in rendered[0]
    assert "tool\n5" in rendered[0]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "hologram"},
        {"type": "text"},
        {},
    ],
)
def test_ops_21_a_part_that_is_no_text_is_refused_by_name(
    http: httpx.Client, part: dict[str, Any]
) -> None:
    content = [{"type": "text", "text": "what is this?"}, part]

    response = chat(http, [{"role": "user", "content": content}])

    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages.0.content.1")
    assert text_of(chat(http)) == ANSWER


def test_tpl_06_text_parts_count_as_the_joined_text(http: httpx.Client, server: Server) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]

    chat(http, [{"role": "user", "content": parts}])
    by_parts = last_request(server).prompt_token_ids
    chat(http, [{"role": "user", "content": "one two"}])

    assert by_parts == last_request(server).prompt_token_ids


def test_what_a_template_refuses_is_a_400_in_its_words(http: httpx.Client) -> None:
    response = chat(http, [{"role": "user", "content": "raise"}])

    assert response.status_code == 400
    assert "no raising here" in response.json()["error"]["message"]


def test_tpl_04_without_a_template_the_answer_says_how_to_give_one() -> None:
    with running_server(chat_template=None) as server, server.http() as http:
        response = chat(http)
        completion = http.post("/v1/completions", json={"prompt": "Hello"})

    assert response.status_code == 400
    assert "--chat-template" in response.json()["error"]["message"]
    assert completion.status_code == 200


def test_a_requests_own_template_needs_the_servers_trust(http: httpx.Client) -> None:
    template = "{{ messages[0].content }}{{ extra }}"
    refused = chat(http, chat_template=template)
    with (
        running_server(ServerConfig(trust_request_chat_template=True)) as server,
        server.http() as trusting,
    ):
        chat(trusting, chat_template=template, chat_template_kwargs={"extra": " world"})
        ids = last_request(server).prompt_token_ids

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template"
    assert ids == server.ids("Hello world")


def test_an_answer_can_be_continued(http: httpx.Client, server: Server) -> None:
    history = [*HI, {"role": "assistant", "content": "one two"}]

    response = chat(http, history, continue_final_message=True)

    assert response.status_code == 200
    prompt = server.tokenizer.decode_now(last_request(server).prompt_token_ids, False)
    assert prompt.endswith("assistant\none two")
    both = chat(http, history, continue_final_message=True, add_generation_prompt=True)
    assert both.json()["error"]["param"] == "continue_final_message"


def test_smp_15_choices_of_a_greedy_request_are_equal(http: httpx.Client, server: Server) -> None:
    answer = chat(http, n=3, temperature=0).json()

    assert [c["message"]["content"] for c in answer["choices"]] == [ANSWER] * 3
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    alone = chat(http, temperature=0).json()["usage"]
    assert answer["usage"]["prompt_tokens"] == alone["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 3 * alone["completion_tokens"]


def test_choices_of_a_seeded_request_have_seeds_of_their_own(
    http: httpx.Client, server: Server
) -> None:
    before = len(server.client.received)

    chat(http, n=3, seed=2**63 - 2)

    added = [m for m in server.client.received[before:] if isinstance(m, AddRequest)]
    assert sorted(m.sampling.seed or 0 for m in added) == [0, 2**63 - 2, 2**63 - 1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_json": {"type": "notatype"}}, "guided_json"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
    ],
)  # fmt: skip
def test_sto_01_what_is_not_supported_is_refused_by_name(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    error = chat(http, **fields).json()["error"]

    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert text_of(chat(http)) == ANSWER


@pytest.mark.parametrize(
    "response_format",
    [{"type": "json_schema", "schema": {}}, {"type": "json_schema"}, {"type": "xml"}, {}, "json"],
)
def test_sto_04_a_misshapen_response_format_is_refused_by_name(
    http: httpx.Client, response_format: Any
) -> None:
    response = chat(http, response_format=response_format)

    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("response_format")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"tools": []},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tool_choice": "auto"},
        {"best_of": 1},
        {"service_tier": "auto", "store": True, "metadata": {"a": "b"}, "user": "me"},
        {"reasoning_effort": "low"},
        {"unheard_of": {"deep": [1, 2]}},
    ],
)
def test_what_asks_for_nothing_special_is_accepted(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    assert text_of(chat(http, **fields)) == ANSWER


def test_a_conversation_beyond_the_context_is_refused_with_the_limit(
    http: httpx.Client, server: Server
) -> None:
    for path, name in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        body = {name: [{"role": "user", "content": " one" * 600}]}
        error = http.post(path, json=body).json()["error"]
        assert error["param"] == name
        assert error["code"] == "context_length_exceeded"
        assert str(server.client.max_model_len) in error["message"]


def test_token_ids_come_on_request(http: httpx.Client, server: Server) -> None:
    answer = chat(http, return_token_ids=True, max_tokens=2).json()

    assert answer["choices"][0]["token_ids"] == server.ids(ANSWER)[:2]
    assert answer["prompt_token_ids"] == last_request(server).prompt_token_ids
    assert "prompt_token_ids" not in chat(http).json()


def test_sch_23_requests_with_one_client_given_id_are_answered_both(
    http: httpx.Client, server: Server
) -> None:
    server.script = lambda request: Script(request.prompt_token_ids[-12:-8])
    headers = {"X-Request-Id": "same"}

    answers = [
        http.post(
            "/v1/chat/completions",
            json={"messages": HI, "request_id": "same", "n": 2},
            headers=headers,
        )
        for _ in range(2)
    ]

    assert {a.status_code for a in answers} == {200}
    assert {a.headers["x-request-id"] for a in answers} == {"same"}
    assert {a.json()["id"] for a in answers} == {"chatcmpl-same"}
    ids = [m.request_id for m in server.client.received if isinstance(m, AddRequest)]
    assert len(set(ids)) == len(ids)


def test_prompts_may_be_cut_at_either_end(http: httpx.Client, server: Server) -> None:
    chat(http)
    whole = last_request(server).prompt_token_ids

    chat(http, truncate_prompt_tokens=5)
    assert last_request(server).prompt_token_ids == whole[-5:]
    chat(http, truncate_prompt_tokens=5, truncation_side="right")
    assert last_request(server).prompt_token_ids == whole[:5]
    chat(http, truncate_prompt_tokens=-1)
    assert last_request(server).prompt_token_ids == whole


# ------------------------------------------------------------------ fields beyond OpenAI's


def test_fields_that_only_describe_the_caller_change_nothing(
    http: httpx.Client, server: Server
) -> None:
    bare = chat(http, seed=1)
    sampling = last_request(server).sampling

    described = chat(
        http,
        seed=1,
        service_tier="flex",
        store=True,
        metadata={"team": "a"},
        user="u",
        safety_identifier="s",
    )

    assert text_of(described) == text_of(bare)
    assert last_request(server).sampling == sampling


def test_priority_and_salt_reach_the_engine() -> None:
    with running_server(scheduling_policy="priority") as server, server.http() as http:
        assert chat(http, priority=-7, cache_salt="tenant-1", n=2).status_code == 200
        requests = [m for m in server.client.received if isinstance(m, AddRequest)]

    assert [(r.priority, r.cache_salt) for r in requests] == [(-7, "tenant-1")] * 2


@pytest.mark.parametrize("salt", ["", "a" * 129, "a@b", "a/b", "a\\b", "a\0b", 5])
def test_a_salt_that_is_none_is_refused_by_name(http: httpx.Client, salt: Any) -> None:
    response = chat(http, cache_salt=salt)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"


def test_an_answer_that_repeats_itself_can_be_ended(http: httpx.Client, server: Server) -> None:
    server.script = server.ids(" one two" * 30)
    wish = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}

    (choice,) = chat(http, repetition_detection=wish).json()["choices"]
    (last,) = events(chat(http, repetition_detection=wish, stream=True))[-2]["choices"]

    assert choice["message"]["content"] == " one two" * 3
    assert choice["finish_reason"] == last["finish_reason"] == "repetition"


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"max_pattern_size": 10_000, "min_count": 2}, "repetition_detection.max_pattern_size"),
        ({"max_pattern_size": 3, "min_count": 1}, "repetition_detection.min_count"),
        ({"max_pattern_size": 3}, "repetition_detection.min_count"),
        ({"max_pattern_size": "3", "min_count": 2}, "repetition_detection.max_pattern_size"),
        (5, "repetition_detection"),
    ],
)
def test_a_misshapen_repetition_wish_is_refused_by_name(
    http: httpx.Client, wish: Any, param: str
) -> None:
    response = chat(http, repetition_detection=wish)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_metrics_come_when_asked_for(http: httpx.Client, path: str) -> None:
    body = {"messages": HI} if "chat" in path else {"prompt": "Hello"}

    bare = http.post(path, json=body).json()
    asked = http.post(path, json={**body, "return_metrics": True, "n": 2}).json()["metrics"]
    streamed = events(http.post(path, json={**body, "return_metrics": True, "stream": True}))

    assert "metrics" not in bare
    for metrics in (asked, streamed[-2]["metrics"]):
        assert 0 <= metrics["queue_time_ms"] <= metrics["time_to_first_token_ms"]
        assert metrics["generation_time_ms"] >= 0
        assert metrics["mean_itl_ms"] >= 0
        assert metrics["tokens_per_second"] > 0
        assert metrics["num_preemptions"] == 0
    assert streamed[-2]["choices"] == []
    assert all("metrics" not in event for event in streamed[:-2])
