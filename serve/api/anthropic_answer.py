"""The answer of `/v1/messages`, in one piece or as Anthropic's events, and its errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType

from pydantic import BaseModel
from starlette.responses import Response

from serve.api.choices import Choice
from serve.api.chunks import Envelope, text_json
from serve.api.errors import error_headers, error_info, error_kind
from serve.api.generation import Outputs
from serve.api.protocol.anthropic import (
    AnthropicError,
    AnthropicErrorInfo,
    AnthropicMessage,
    AnthropicUsage,
    StopReason,
    TextBlock,
)
from serve.api.protocol.common import Usage
from serve.api.streaming import named_event
from serve.messages import FinishReason

ERROR_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)


def whole_message(envelope: Envelope, choice: Choice, usage: Usage) -> AnthropicMessage:
    """The answer without streaming."""
    assert choice.finish_reason is not None
    reason, sequence = _stop(choice.finish_reason, choice.stop_reason)
    return AnthropicMessage(
        id=envelope.id,
        model=envelope.model,
        content=[TextBlock(text=choice.text)],
        stop_reason=reason,
        stop_sequence=sequence,
        usage=_usage(usage),
    )


def _stop(reason: FinishReason, stop_reason: str | int | None) -> tuple[StopReason, str | None]:
    if reason is FinishReason.LENGTH:
        return "max_tokens", None
    if isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return "end_turn", None


def _usage(usage: Usage) -> AnthropicUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return AnthropicUsage(
        input_tokens=usage.prompt_tokens - cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=cached,
    )


async def message_events(envelope: Envelope, outputs: Outputs) -> AsyncIterator[bytes]:
    """The answer as Anthropic's events: one message with one block of text."""
    message = AnthropicMessage(
        id=envelope.id,
        model=envelope.model,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=_usage(outputs.tally.usage()),
    )
    yield named_event("message_start", message=message.model_dump())
    block = TextBlock(text="").model_dump()
    yield named_event("content_block_start", index=0, content_block=block)
    async for _, output in outputs:
        if output.text:
            yield (
                'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
                f'"delta":{{"type":"text_delta","text":{text_json(output.text)}}}}}\n\n'
            ).encode("ascii")
        if output.finish_reason is not None:
            reason, sequence = _stop(output.finish_reason, output.stop_reason)
            yield named_event("content_block_stop", index=0)
            yield named_event(
                "message_delta",
                delta={"stop_reason": reason, "stop_sequence": sequence},
                usage=_usage(outputs.tally.usage()).model_dump(),
            )
    yield named_event("message_stop")


def _error(error: Exception) -> AnthropicError:
    info = error_info(error)
    kind = ERROR_TYPES.get(error_kind(error).status, "invalid_request_error")
    path = f"{info.param}: " if info.param and info.param not in info.message else ""
    return AnthropicError(error=AnthropicErrorInfo(type=kind, message=path + info.message))


def error_response(error: Exception) -> Response:
    """The whole HTTP answer for an error raised before anything was sent."""
    return json_response(_error(error), error_kind(error).status, error_headers(error))


def error_event(error: Exception) -> bytes:
    """An error after the status line has gone."""
    return named_event("error", **_error(error).model_dump(exclude={"type"}))


def json_response(
    answer: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Every field is there, also those with defaults."""
    return Response(answer.model_dump_json(), status, headers, "application/json")
