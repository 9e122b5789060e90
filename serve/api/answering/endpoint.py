"""The path that all generating routes share: read, prepare, generate, answer."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from serve.answers.schemas import header_value
from serve.api.answering.body import read_body
from serve.api.answering.choices import Choice, collect
from serve.api.answering.chunks import Envelope, new_envelope
from serve.api.answering.field_names import fields_named
from serve.api.answering.generation import Job, Outputs, Tally
from serve.api.answering.scores import Scores
from serve.api.answering.streaming import EventStream, unless_gone
from serve.api.clients.client import Client
from serve.api.middleware import request_id_of
from serve.api.protocol.common import GenerationRequest, RequestModel
from serve.api.protocol.control import RenderedRequest
from serve.api.service import Service
from serve.engine.async_engine import AsyncEngine
from serve.engine.request_limits import resolve_sampling
from serve.errors import InvalidRequest


class Caller(NamedTuple):
    """What a body says about the call itself, in whatever fields its API has for it."""

    model: str | None
    streams: bool
    user: str | None
    answer_id: str


class Answer(Protocol):
    """A request, validated and tokenized, that knows how its answer is written."""

    @property
    def job(self) -> Job:
        """What to generate."""

    @property
    def streams(self) -> bool:
        """Whether it is sent while it is made."""

    def field_names(self) -> Mapping[str, str]:
        """What the job's fields are called in the request; see `fields_named`."""

    def scores(self) -> list[Scores]:
        """What writes the choices' log-probabilities while they come; empty if nobody asked, or if
        the choices are to keep them."""

    async def whole(self, choices: Sequence[Choice], tally: Tally) -> Response:
        """The answer in one piece."""

    def events(self, outputs: Outputs) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""

    def error_event(self, error: Exception) -> bytes:
        """The end of a stream in which something went wrong."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a route: who asks which engine, and under what name it is answered. `timeout_s`:
    the header `timeout`, for clients that cannot add a field."""

    service: Service
    engine: AsyncEngine
    envelope: Envelope
    client: Client
    timeout_s: float | None = None


B = TypeVar("B", bound=RequestModel)
G = TypeVar("G", bound=GenerationRequest)
A = TypeVar("A", bound=Answer)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[B, A]):
    """What tells one route from the other. `prepare` raises RequestError."""

    body_type: type[B]
    kind: str  # `object` of an answer in one piece, and of a chunk:
    chunk_kind: str
    caller: Callable[[B, Request], Caller]
    prepare: Callable[[B, Call], Awaitable[A]]

    async def answered(self, request: Request, service: Service) -> Response:
        """The whole route. Raises RequestError and EngineError."""
        return await self.answer(request, service, await self.read(request, service))

    async def read(self, request: Request, service: Service) -> B:
        """The body. Raises RequestError."""
        return await read_body(request, self.body_type, service.config.max_request_bytes)

    async def answer(self, request: Request, service: Service, body: B) -> Response:
        """Answer a body that was read, in one piece or as a stream. Raises as `answered` does."""
        answer, outputs = await self.begin(request, service, body)
        response: Response
        if answer.streams:
            response = EventStream(answer.events(outputs), outputs, error_event=answer.error_event)
        else:
            response = await unless_gone(request, whole(answer, outputs))
        if answer.job.relaxed:
            response.headers["x-serve-relaxed"] = header_value(answer.job.relaxed)
        return response

    async def begin(self, request: Request, service: Service, body: B) -> tuple[A, Outputs]:
        """The answer to come, and what it is made of. Raises RequestError and EngineDead."""
        caller = self.caller(body, request)
        engine = service.engine_for(caller.model)
        kind = self.chunk_kind if caller.streams else self.kind
        envelope = new_envelope(engine, caller.model, kind, caller.answer_id)
        timeout_s = timeout_header(request)
        client = service.clients.of(request.headers, caller.user)
        answer = await self.prepare(body, Call(service, engine, envelope, client, timeout_s))
        with fields_named(answer.field_names):
            return answer, Outputs(service, engine, answer.job)


async def whole(answer: Answer, outputs: Outputs) -> Response:
    """Generate everything, and answer in one piece. Raises EngineError."""
    choices = await collect(outputs, answer.scores())
    return await answer.whole(choices, outputs.tally)


async def rendered(
    endpoint: Endpoint[G, A], request: Request, service: Service
) -> list[RenderedRequest]:
    """What the engine would be given, per prompt. Raises what `answered` would raise."""
    body = await endpoint.read(request, service)
    caller = endpoint.caller(body, request)
    engine = service.engine_for(caller.model)
    envelope = new_envelope(engine, caller.model, "rendered", caller.answer_id)
    job = (await endpoint.prepare(body, Call(service, engine, envelope, Client()))).job
    answers = []
    for prompt in job.prompts:
        with fields_named(job.field_names):
            sampling = resolve_sampling(prompt, job.sampling, engine.model, engine.ready)
        answer = RenderedRequest(
            request_id=envelope.id,
            model=envelope.model,
            token_ids=prompt,
            sampling_params=asdict(sampling),
            priority=job.priority,
            cache_salt=job.cache_salt,
        )
        if body.return_prompt_text:
            answer.prompt_text = await engine.tokenizer.decode(prompt, False)
        answers.append(answer)
    return answers


def openai_caller(id_prefix: str) -> Callable[[GenerationRequest, Request], Caller]:
    """How OpenAI's two generating routes tell who calls."""

    def caller(body: GenerationRequest, request: Request) -> Caller:
        label = body.request_id or request_id_of(request)
        return Caller(body.model, bool(body.stream), body.user, id_prefix + label)

    return caller


def timeout_header(request: Request) -> float | None:
    """Seconds in the header `timeout`."""
    text = request.headers.get("timeout")
    if text is None:
        return None
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII) is None or float(text) == 0:
        raise InvalidRequest("The header timeout must be a number of seconds above 0.")
    return float(text)


def json_response(answer: BaseModel) -> Response:
    """Fields that were never set are left out."""
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")
