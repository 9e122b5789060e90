"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API over the chat path."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.api.body import read_body
from serve.api.cache_control import marked_prefix, pin_common
from serve.api.chat import ChatTask, begin, prepare
from serve.api.chunks import new_envelope, text_json
from serve.api.conversation import conversation_ids
from serve.api.errors import (
    MissingField,
    Unsupported,
    error_headers,
    error_info,
    error_kind,
    misfits_refused,
)
from serve.api.generation import Choice, Outputs, collect
from serve.api.openapi import request_body
from serve.api.protocol.anthropic import (
    AnthropicError,
    AnthropicErrorInfo,
    AnthropicMessage,
    AnthropicUsage,
    CountTokensRequest,
    InputBlock,
    InputMessage,
    MessagesRequest,
    StopReason,
    TextBlock,
    TokenCount,
)
from serve.api.protocol.chat import (
    ChatCompletionRequest,
    ContentPart,
    FunctionCall,
    Message,
    TemplateFields,
    ToolCall,
)
from serve.api.protocol.common import Usage
from serve.api.request_id import request_id_of
from serve.api.service import Service
from serve.api.streaming import EventStream, named_event, unless_gone
from serve.errors import EngineError, RequestError
from serve.messages import FinishReason

ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def anthropic_routes(service: Service) -> APIRouter:
    """The routes of this file."""
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": AnthropicError, "description": kind}
        for status, kind in {400: "invalid_request_error", **ERROR_TYPES}.items()
    }
    router = APIRouter(tags=["anthropic"], responses=responses)
    max_bytes = service.config.max_request_bytes

    @router.post(
        "/v1/messages",
        response_model=AnthropicMessage,
        openapi_extra=request_body(MessagesRequest),
    )
    async def create_message(request: Request) -> Response:
        try:
            body = await read_body(request, MessagesRequest, max_bytes)
            envelope = new_envelope(service, body.model, "message", f"msg_{request_id_of(request)}")
            with misfits_refused():
                chat = _chat_request(body)
            client = service.client_of(request, _user(body))
            task = await prepare(chat, service, envelope, client)
            await _pin_marked(body, task, service)
            outputs = begin(task, service)
            if body.stream:
                return EventStream(
                    events(task, outputs),
                    outputs,
                    error_event=_error_event,
                    refusal=_error_response,
                )
            (choice,), usage = await unless_gone(request, collect(outputs))
        except (RequestError, EngineError) as error:
            return _error_response(error)
        return _json(_answer(task, choice, usage))

    @router.post(
        "/v1/messages/count_tokens",
        response_model=TokenCount,
        openapi_extra=request_body(CountTokensRequest),
    )
    async def count_tokens(request: Request) -> Response:
        try:
            body = await read_body(request, CountTokensRequest, max_bytes)
            service.served_name(body.model)
            with misfits_refused():
                chat = ChatCompletionRequest(messages=_messages(body), **_template_fields(body))
            tokenizer = service.engine.tokenizer
            ids = await conversation_ids(chat.messages, chat, tokenizer, service.config)
        except (RequestError, EngineError) as error:
            return _error_response(error)
        return _json(TokenCount(input_tokens=len(ids)))

    return router


async def _pin_marked(body: MessagesRequest, task: ChatTask, service: Service) -> None:
    """Keep what `cache_control` marks."""
    marked = marked_prefix(body)
    if marked is not None:
        fields = TemplateFields(add_generation_prompt=False)
        engine = service.engine
        ids = await conversation_ids(
            _messages(marked.body), fields, engine.tokenizer, service.config
        )
        await pin_common(engine, task.prompt_ids, ids, marked.ttl_s)


def _user(body: MessagesRequest) -> str | None:
    user = (body.metadata or {}).get("user_id")
    return user if isinstance(user, str) else None


def _chat_request(body: MessagesRequest) -> ChatCompletionRequest:
    """The same wishes in OpenAI's words."""
    return ChatCompletionRequest(
        messages=_messages(body),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stream=body.stream,
        **_template_fields(body),
    )


def _template_fields(body: CountTokensRequest) -> dict[str, Any]:
    if body.tools and (body.tool_choice or {}).get("type") != "none":
        raise Unsupported("Tool use is not supported; leave tools out.", param="tools")
    if (body.thinking or {}).get("type") == "enabled":
        raise Unsupported("A budget for thinking is not supported.", param="thinking")
    # A conversation that ends with the assistant's words is to be continued from there.
    return {"continue_final_message": body.messages[-1].role == "assistant"}


def _messages(body: CountTokensRequest) -> list[Message]:
    result = []
    if body.system:
        result.append(Message(role="system", content=_text_parts(body.system, "system")))
    for i, message in enumerate(body.messages):
        result += _turn(message, f"messages.{i}.content")
    return result


def _turn(message: InputMessage, path: str) -> list[Message]:
    """One message; tools' results, which Anthropic puts into the user's, become turns of theirs."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    results = [
        Message(role="tool", tool_call_id=block.tool_use_id, content=_result_text(block, path))
        for block in message.content
        if block.type == "tool_result"
    ]
    calls = [
        ToolCall(
            id=block.id,
            type="function",
            function=FunctionCall(name=block.name or "", arguments=json.dumps(block.input or {})),
        )
        for block in message.content
        if block.type == "tool_use"
    ]
    texts = [b for b in message.content if b.type not in ("tool_result", "tool_use", "thinking")]
    if not texts and not calls:
        return results
    parts = _text_parts(texts, path)
    return [*results, Message(role=message.role, content=parts, tool_calls=calls or None)]


def _text_parts(content: str | Sequence[InputBlock], path: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text":
            raise Unsupported(
                f"This model reads text only; {block.type[:40]} blocks are not supported.",
                param=path,
            )
        if block.text is None:
            raise MissingField("A text block needs its text.", param=path)
    return [ContentPart(type="text", text=block.text) for block in content]


def _result_text(block: InputBlock, path: str) -> str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    texts = [part.get("text") for part in block.content if part.get("type") == "text"]
    if len(texts) < len(block.content) or not all(isinstance(text, str) for text in texts):
        raise Unsupported("A tool's result must be text.", param=path)
    return "".join(str(text) for text in texts)


def _answer(task: ChatTask, choice: Choice, usage: Usage) -> AnthropicMessage:
    assert choice.finish_reason is not None
    reason, sequence = _stop(choice.finish_reason, choice.stop_reason)
    return AnthropicMessage(
        id=task.envelope.id,
        model=task.envelope.model,
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


async def events(task: ChatTask, outputs: Outputs) -> AsyncIterator[bytes]:
    """The answer as Anthropic's events: one message with one block of text."""
    message = AnthropicMessage(
        id=task.envelope.id,
        model=task.envelope.model,
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


def _error_response(error: Exception) -> Response:
    return Response(
        _error(error).model_dump_json(),
        status_code=error_kind(error).status,
        headers=error_headers(error),
        media_type="application/json",
    )


def _error_event(error: Exception) -> bytes:
    return named_event("error", **_error(error).model_dump(exclude={"type"}))


def _json(answer: AnthropicMessage | TokenCount) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")
