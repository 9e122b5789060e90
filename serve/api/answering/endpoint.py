"""The path that OpenAI's two generating routes share: read, prepare, generate, answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Generic, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from serve.api.answering.body import read_body
from serve.api.answering.choices import Choice, collect
from serve.api.answering.chunks import Envelope, new_envelope
from serve.api.answering.convert import timeout_header
from serve.api.answering.field_names import fields_named
from serve.api.answering.generation import Job, Outputs, Tally
from serve.api.answering.json_pieces import JsonPieces, with_scores
from serve.api.answering.scores import Scores
from serve.api.answering.streaming import EventStream, unless_gone
from serve.api.clients.client import Client
from serve.api.protocol.common import GenerationRequest
from serve.api.protocol.control import RenderedRequest
from serve.api.request_id import request_id_of
from serve.api.service import Service
from serve.engine.request_limits import resolve_sampling

B = TypeVar("B", bound=GenerationRequest)


class Answer(Protocol):
    """A request, validated and tokenized, that knows how its answer is written."""

    @property
    def job(self) -> Job:
        """What to generate."""

    def scores(self) -> list[Scores]:
        """What writes the choices' log-probabilities; empty if none are asked for."""

    def whole(self, choices: Sequence[Choice], tally: Tally) -> BaseModel:
        """The answer in one piece; log-probabilities stand as null in it."""

    def events(self, outputs: Outputs) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[B]):
    """What tells one route from the other. `prepare` raises RequestError."""

    body_type: type[B]
    id_prefix: str
    kind: str  # `object` of an answer in one piece, and of a chunk:
    chunk_kind: str
    prepare: Callable[[B, Service, Envelope, Client], Awaitable[Answer]]

    async def answered(self, request: Request, service: Service) -> Response:
        """The whole route. Raises RequestError and EngineError."""
        body = await read_body(request, self.body_type, service.config.max_request_bytes)
        kind = self.chunk_kind if body.stream else self.kind
        envelope = self._envelope(request, service, body, kind)
        body.timeout = body.timeout or timeout_header(request)
        client = service.client_of(request, body.user)
        answer = await self.prepare(body, service, envelope, client)
        outputs = Outputs(service, answer.job)
        if body.stream:
            return EventStream(answer.events(outputs), outputs)
        scores = answer.scores()
        choices = await unless_gone(request, collect(outputs, scores))
        return JsonPieces(with_scores(answer.whole(choices, outputs.tally), scores))

    async def rendered(self, request: Request, service: Service) -> list[RenderedRequest]:
        """What the engine would be given, per prompt. Raises what `answered` would raise."""
        body = await read_body(request, self.body_type, service.config.max_request_bytes)
        envelope = self._envelope(request, service, body, "rendered")
        job = (await self.prepare(body, service, envelope, Client())).job
        engine, answers = service.engine, []
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

    def _envelope(self, request: Request, service: Service, body: B, kind: str) -> Envelope:
        label = body.request_id or request_id_of(request)
        return new_envelope(service, body.model, kind, self.id_prefix + label)


def json_response(answer: BaseModel) -> Response:
    """Fields that were never set are left out."""
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")
