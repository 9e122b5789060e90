"""`POST /v1/responses`: OpenAI's Responses API over the chat path."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.api.body import read_body
from serve.api.chat import ChatTask, begin, prepare
from serve.api.chunks import new_envelope, text_json
from serve.api.clients import Client
from serve.api.errors import NotStored, Unsupported, error_info, misfits_refused
from serve.api.generation import Choice, Outputs, collect
from serve.api.logprobs import ChatLogprobsWriter
from serve.api.openapi import ERROR_RESPONSES, request_body
from serve.api.protocol.chat import ChatCompletionRequest, FunctionCall, Message, ToolCall
from serve.api.protocol.common import Usage
from serve.api.protocol.responses import (
    CachedTokens,
    DeletedResponse,
    InputItem,
    OutputMessage,
    OutputText,
    ReasoningTokens,
    ResponsesAnswer,
    ResponsesRequest,
    ResponsesUsage,
    Status,
)
from serve.api.response_store import ResponseStore, StoredResponse
from serve.api.service import Service
from serve.api.streaming import EventStream, named_event, unless_gone
from serve.errors import InvalidRequest, RequestError
from serve.messages import FinishReason

# Fields of the chat path under the names they have here.
_PARAMS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
_DELTA = "response.output_text.delta"
_UNSUPPORTED = ("conversation", "prompt", "background")


def responses_routes(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter(tags=["responses"], responses=dict(ERROR_RESPONSES))
    store = ResponseStore()
    max_bytes = service.config.max_request_bytes

    @router.post(
        "/v1/responses",
        response_model=ResponsesAnswer,
        openapi_extra=request_body(ResponsesRequest),
    )
    async def create_response(request: Request) -> Response:
        body = await read_body(request, ResponsesRequest, max_bytes)
        try:
            with misfits_refused():
                client = service.client_of(request, body.user)
                task = await _prepare(body, service, store, client)
            outputs = begin(task.chat, service)
        except RequestError as error:
            error.param = _PARAMS.get((error.param or "").partition(".")[0], error.param)
            raise
        if body.stream:
            writer = _EventWriter(task, outputs, store)
            return EventStream(writer.events(), outputs, error_event=writer.failed)
        (choice,), usage = await unless_gone(request, collect(outputs))
        return _json(_finish(task, choice, usage, store))

    @router.get("/v1/responses/{response_id}", response_model=ResponsesAnswer)
    async def get_response(request: Request) -> Response:
        return _json(_stored(store, request.path_params["response_id"]).answer)

    @router.delete("/v1/responses/{response_id}", response_model=DeletedResponse)
    async def delete_response(request: Request) -> DeletedResponse:
        response_id = request.path_params["response_id"]
        if not store.delete(response_id):
            raise _not_stored(response_id)
        return DeletedResponse(id=response_id)

    return router


@dataclass(frozen=True, slots=True)
class _Task:
    """A request, ready to run and to be answered."""

    body: ResponsesRequest
    chat: ChatTask
    messages: list[Message]  # the conversation so far, without instructions
    item_id: str

    @property
    def stores(self) -> bool:
        """Whether the answer is to be kept."""
        return self.body.store is not False


async def _prepare(
    body: ResponsesRequest, service: Service, store: ResponseStore, client: Client
) -> _Task:
    """The same wishes in the chat API's words, prepared by it. Raises RequestError."""
    for name in _UNSUPPORTED:
        if getattr(body, name, None):
            raise Unsupported(f"{name} is not supported.", param=name)
    envelope = new_envelope(service, body.model, "response", f"resp_{uuid.uuid4().hex}")
    messages = _messages(body, store)
    instructions = [Message(role="system", content=body.instructions)] if body.instructions else []
    wants_logprobs = "message.output_text.logprobs" in (body.include or ())
    chat = ChatCompletionRequest(
        messages=[*instructions, *messages],
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=body.tools,
        tool_choice=body.tool_choice,
        response_format=(body.text or {}).get("format"),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        stream=body.stream,
    )
    task = await prepare(chat, service, envelope, client)
    return _Task(body, task, messages, f"msg_{uuid.uuid4().hex}")


def _messages(body: ResponsesRequest, store: ResponseStore) -> list[Message]:
    earlier: list[Message] = []
    if body.previous_response_id is not None:
        earlier = _stored(store, body.previous_response_id).messages
    if isinstance(body.input, str):
        return [*earlier, Message(role="user", content=body.input)]
    return [*earlier, *(_turn(item, f"input.{i}") for i, item in enumerate(body.input))]


def _turn(item: InputItem, path: str) -> Message:
    match item.type or "message":
        case "message" if item.role is not None:
            return Message(role=item.role, content=item.content)
        case "function_call":
            function = FunctionCall(name=item.name or "", arguments=item.arguments)
            call = ToolCall(id=item.call_id, type="function", function=function)
            return Message(role="assistant", tool_calls=[call])
        case "function_call_output":
            return Message(role="tool", tool_call_id=item.call_id, content=item.output)
        case "message":
            raise InvalidRequest(f"{path}.role is required.", param=f"{path}.role")
    raise Unsupported(f"Items of this type are not supported: {path}.", param=f"{path}.type")


def _stored(store: ResponseStore, response_id: str) -> StoredResponse:
    response = store.get(response_id)
    if response is None:
        raise _not_stored(response_id)
    return response


def _not_stored(response_id: str) -> NotStored:
    return NotStored(
        f"No response {response_id[:100]!r} is stored here.", param="previous_response_id"
    )


def _finish(task: _Task, choice: Choice, usage: Usage, store: ResponseStore) -> bytes:
    """The whole answer as JSON, which is also what is stored."""
    assert choice.finish_reason is not None
    logprobs: list[dict[str, Any]] = []
    if task.chat.num_top is not None:
        writer = ChatLogprobsWriter(task.chat.num_top, task.chat.names)
        logprobs = writer.generated(choice.logprobs, hides_last=choice.hides_last)["content"]
    status = _status(choice.finish_reason)
    item = _item(task, status, [OutputText(text=choice.text, logprobs=logprobs)])
    answer = _answer(task, status, [item], usage).model_dump_json().encode()
    if task.stores:
        said = Message(role="assistant", content=choice.text)
        store.put(task.chat.envelope.id, StoredResponse([*task.messages, said], answer))
    return answer


def _status(reason: FinishReason) -> Status:
    return "incomplete" if reason is FinishReason.LENGTH else "completed"


def _item(task: _Task, status: Status, content: list[OutputText]) -> OutputMessage:
    assert status != "failed"
    return OutputMessage(id=task.item_id, status=status, content=content)


def _answer(
    task: _Task, status: Status, output: list[OutputMessage], usage: Usage | None = None
) -> ResponsesAnswer:
    body, envelope, sampling = task.body, task.chat.envelope, task.chat.job.sampling
    return ResponsesAnswer(
        id=envelope.id,
        created_at=envelope.created,
        status=status,
        incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=envelope.model,
        output=output,
        previous_response_id=body.previous_response_id,
        store=task.stores,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        truncation=body.truncation or "disabled",
        usage=None if usage is None else _usage(usage),
        user=body.user,
    )


def _usage(usage: Usage) -> ResponsesUsage:
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=CachedTokens(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ReasoningTokens(),
        total_tokens=usage.total_tokens,
    )


class _EventWriter:
    """The events of one streamed answer, numbered in OpenAI's order."""

    def __init__(self, task: _Task, outputs: Outputs, store: ResponseStore) -> None:
        self._task = task
        self._outputs = outputs
        self._store = store
        self._next_number = 0
        self._place = {"item_id": task.item_id, "output_index": 0, "content_index": 0}

    async def events(self) -> AsyncIterator[bytes]:
        """From `response.created` to `response.completed` or `response.incomplete`."""
        task = self._task
        begun = _answer(task, "in_progress", []).model_dump()
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        item = _item(task, "in_progress", []).model_dump()
        yield self._event("response.output_item.added", output_index=0, item=item)
        part = OutputText(text="").model_dump()
        yield self._event("response.content_part.added", **self._place, part=part)
        choice = Choice()
        writer = None
        if task.chat.num_top is not None:
            writer = ChatLogprobsWriter(task.chat.num_top, task.chat.names)
        async for _, output in self._outputs:
            choice.add(output)
            if writer is not None and output.logprobs:
                scored = writer.generated(output.logprobs, hides_last=output.hides_last)
                entries = scored["content"]
                yield self._event(_DELTA, **self._place, delta=output.text, logprobs=entries)
            elif output.text:
                yield self._delta(output.text)
        for event in self._ending(choice):
            yield event

    def failed(self, error: Exception) -> bytes:
        """The event that ends a stream in which something went wrong."""
        info = error_info(error)
        answer = _answer(self._task, "failed", [])
        answer.error = {"code": "server_error", "message": info.message}
        return self._event("response.failed", response=answer.model_dump())

    def _ending(self, choice: Choice) -> list[bytes]:
        whole = _finish(self._task, choice, self._outputs.tally.usage(), self._store)
        answer = ResponsesAnswer.model_validate_json(whole).model_dump()
        (item,) = answer["output"]
        (part,) = item["content"]
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            self._event("response.output_text.done", **self._place, **text),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{answer['status']}", response=answer),
        ]

    def _event(self, name: str, **fields: Any) -> bytes:
        return named_event(name, sequence_number=self._number(), **fields)

    def _delta(self, text: str) -> bytes:
        """`_event` for the one kind that comes once per token."""
        return (
            f'event: {_DELTA}\ndata: {{"type":"{_DELTA}","sequence_number":{self._number()},'
            f'"item_id":"{self._task.item_id}","output_index":0,"content_index":0,'
            f'"delta":{text_json(text)},"logprobs":[]}}\n\n'
        ).encode("ascii")

    def _number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number


def _json(answer: bytes) -> Response:
    return Response(answer, media_type="application/json")
