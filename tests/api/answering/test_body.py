"""Bodies that are no JSON, too large, or hold what JSON should not hold."""

from __future__ import annotations

import gzip
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve.config import ServerConfig
from tests.api.conftest import running_server

GOOD = b'{"prompt": "Hello", "max_tokens": 1}'
JSON = {"content-type": "application/json"}


def post(
    http: httpx.Client, content: bytes, headers: dict[str, str] | None = None
) -> httpx.Response:
    return http.post(
        "/v1/completions", content=content, headers=JSON if headers is None else headers
    )


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "application/json; charset=utf-8",
        'application/json;charset="UTF-8"',
        "Application/JSON",
        "application/vnd.api+json",
        None,
    ],
)
def test_ops_06_json_is_taken_under_its_names(http: httpx.Client, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}

    assert post(http, GOOD, headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json; charset=latin-1"},
        {**JSON, "content-encoding": "gzip"},
    ],
)
def test_ops_06_anything_else_is_a_415(http: httpx.Client, headers: dict[str, str]) -> None:
    response = post(http, gzip.compress(GOOD), headers)

    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"  ",
        b"{",
        b'{"prompt": "Hello"',
        b"{'prompt': 'Hello'}",
        b'{"prompt": "Hello",}',
        b"\xff\xfe{}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        rb'{"prompt": "\ud800"}',
        rb'{"prompt": "\udc00 x"}',
        b"prompt=Hello",
        b"[" * 40_000,
        b'{"prompt": "a", "x": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
        b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
    ],
)
def test_ops_06_broken_json_is_a_400(http: httpx.Client, content: bytes) -> None:
    response = post(http, content)

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"
    assert len(response.content) < 1000


@pytest.mark.parametrize("content", [b"[]", b"5", b"null", b'"text"', b"true", b"NaN", b"-1e999"])
def test_json_that_is_no_object_is_a_400(http: httpx.Client, content: bytes) -> None:
    assert post(http, content).status_code == 400


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1" * 400])
@pytest.mark.parametrize("field", ["temperature", "top_p", "max_tokens", "seed", "n", "logit_bias"])
def test_numbers_beyond_floats_are_a_400_that_names_the_field(
    http: httpx.Client, field: str, number: str
) -> None:
    value = f'{{"1": {number}}}' if field == "logit_bias" else number

    response = post(http, f'{{"prompt": "a", "{field}": {value}}}'.encode())

    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)


def test_numbers_in_fields_that_nobody_reads_do_no_harm(http: httpx.Client) -> None:
    response = post(http, b'{"prompt": "a", "max_tokens": 1, "metadata": {"x": 1e400, "y": NaN}}')

    assert response.status_code == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = [
    *("prompt", "model", "n", "max_tokens", "temperature", "top_p", "stop", "logprobs", "echo"),
    *("stream", "stream_options", "seed", "logit_bias", "stop_token_ids", "bad_words"),
    *("allowed_token_ids", "prompt_logprobs", "truncate_prompt_tokens", "request_id", "messages"),
    *("tools", "response_format", "chat_template_kwargs", "priority", "min_tokens"),
]


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]),
    body=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=5),
)
def test_whatever_is_sent_the_server_does_not_fail(
    http: httpx.Client, path: str, body: dict[str, object]
) -> None:
    usual = {"prompt": "Hello", "messages": [{"role": "user", "content": "a"}], "tokens": [1]}
    if path == "/tokenize":
        usual.pop("messages")
    content = json.dumps({**usual, "max_tokens": 2, **body}).encode()

    response = post_to(http, path, content)

    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def post_to(http: httpx.Client, path: str, content: bytes) -> httpx.Response:
    return http.post(path, content=content, headers=JSON)


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "a", "x": [' + b"[]," * 300_000 + b"[]]}",
        b'{"prompt": "a", "chat_template_kwargs": {"x": [' + b"{}," * 300_000 + b"{}]}}",
        b'{"prompt": "a", "x": ["\\"[", ' + b'["]"],' * 60_000 + b"[]]}",
        b'{"prompt": "a", "x": [' + b"1," * 2**20 + b"1]}",
        b'{"prompt": "a"' + b"".join(b', "%d": 1' % i for i in range(200_000)) + b"}",
        b'{"prompt": "' + b'\\"[' * 200_000,  # a text without an end is no JSON
    ],
)
def test_ops_06_bodies_of_too_many_pieces_are_refused_before_they_are_parsed(
    http: httpx.Client, content: bytes
) -> None:
    response = post(http, content)

    assert response.status_code == 400
    assert response.json()["error"]["code"] in ("invalid_value", "invalid_json")


def test_a_text_may_hold_any_number_of_brackets(http: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 1, "metadata": {"text": '[{"a\\": [,' * 200_000}}

    assert post(http, json.dumps(body).encode()).status_code == 200


def test_a_body_beyond_the_limit_is_a_413_announced_or_not() -> None:
    with (
        running_server(ServerConfig(max_request_bytes=1024)) as server,
        server.http() as http,
    ):
        large = json.dumps({"prompt": "a" * 1024}).encode()
        announced = post(http, large)
        in_chunks = http.post(
            "/v1/completions", content=iter([large[:600], large[600:]]), headers=JSON
        )
        small = post(http, GOOD)

    assert announced.status_code == in_chunks.status_code == 413
    assert "--max-request-bytes" in announced.json()["error"]["message"]
    assert small.status_code == 200
