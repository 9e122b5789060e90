"""The one table of errors, and the shape of what clients see."""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from serve import errors
from serve.api.errors import (
    ERROR_KINDS,
    MAX_MESSAGE_CHARS,
    error_body,
    error_kind,
    error_response,
    field_path,
    from_validation,
)
from serve.api.protocol.chat import ChatCompletionRequest
from serve.api.protocol.common import ErrorBody


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.InvalidRequest("x", param="a"), 400, "invalid_value"),
        (errors.PromptTooLong("x", param="prompt"), 400, "context_length_exceeded"),
        (errors.ModelNotFound("x", param="model"), 404, "model_not_found"),
        (errors.QueueFull("x", retry_after_s=2.4), 429, "queue_full"),
        (errors.StepFailed("x"), 500, "step_failed"),
        (errors.EngineDead("x"), 503, "engine_dead"),
        (errors.EngineError("x"), 500, "engine_error"),
        (ZeroDivisionError("x"), 500, "internal_error"),
        (errors.ConfigError("x"), 500, "internal_error"),
    ],
)
def test_each_error_has_its_status_and_code(error: Exception, status: int, code: str) -> None:
    response = error_response(error)

    assert response.status_code == status
    body = json.loads(bytes(response.body))
    assert body["error"]["code"] == code
    assert body["error"]["param"] == getattr(error, "param", None)
    ErrorBody.model_validate(body)


def test_an_error_without_an_entry_has_its_ancestors() -> None:
    class Special(errors.PromptTooLong):
        pass

    assert error_kind(Special("x")) is ERROR_KINDS[errors.PromptTooLong]


def test_a_full_queue_says_when_to_come_back() -> None:
    assert error_response(errors.QueueFull("x", retry_after_s=2.6)).headers["retry-after"] == "3"
    assert error_response(errors.QueueFull("x", retry_after_s=0.0)).headers["retry-after"] == "1"
    assert int(error_response(errors.EngineDead("x")).headers["retry-after"]) > 0


def test_unforeseen_errors_keep_their_text_to_themselves() -> None:
    assert "secret" not in error_body(RuntimeError("secret"))


def test_messages_are_cut() -> None:
    body = error_body(errors.InvalidRequest("x" * 10**6))

    assert len(body) < MAX_MESSAGE_CHARS + 200


def validation_error(body: str) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate_json(body)
    return caught.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"messages": [{"role": "user", "content": 5}]}', "messages.0.content"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}',
            "messages.0.content.0.text",
        ),
        ('{"messages": [{"role": "user", "content": "a"}], "stop": [1]}', "stop.0"),
        ('{"messages": [{"role": "user", "content": "a"}], "n": "x"}', "n"),
        ('{"messages": [{"content": "a"}]}', "messages.0.role"),
        ("[]", None),
    ],
)
def test_the_field_is_named_by_its_path_in_the_json(body: str, param: str | None) -> None:
    assert from_validation(validation_error(body)).param == param


@given(st.lists(st.one_of(st.integers(), st.text())))
def test_paths_are_bounded_whatever_keys_were_sent(location: list[int | str]) -> None:
    assert len(field_path(location)) <= 65 * len(location)


def test_ops_08_thousands_of_mistakes_make_a_short_answer(http: httpx.Client) -> None:
    for messages in ([5] * 500_000, [{"role": "x" * 1000, "content": "y" * 1000}] * 1000):
        response = http.post("/v1/chat/completions", json={"messages": messages})
        assert response.status_code == 400
        assert len(response.content) < 1000
        assert "xxx" not in response.text
    key = "k" * 100_000
    response = http.post("/v1/completions", json={"prompt": "a", "logit_bias": {key: "x"}})
    assert response.status_code == 400
    assert len(response.content) < 1000


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/embeddings", 404),
        ("POST", "/v1/audio/speech", 404),
        ("POST", "/v1/nope", 404),
        ("GET", "/" + "x" * 5000, 404),
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/models", 405),
        ("POST", "//v1/completions", 404),
        ("POST", "/V1/completions", 404),
    ],
)
def test_ops_22_what_is_not_served_is_a_json_error_at_once(
    http: httpx.Client, method: str, path: str, status: int
) -> None:
    response = http.request(method, path, json={})

    assert response.status_code == status
    ErrorBody.model_validate_json(response.content)
    assert len(response.content) < 1000
    if status == 405:
        assert response.headers["allow"]
