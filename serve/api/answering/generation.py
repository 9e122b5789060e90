"""One HTTP request's generation: n choices of one or more prompts, as one stream of outputs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from serve.answers.format import AnswerFormat
from serve.answers.reader import AnswerReader
from serve.api.answering.field_names import fields_named
from serve.api.answering.parts import Piece, parts_of, read_parts
from serve.api.answering.request_size import RequestSize, check_size
from serve.api.answering.timing import request_metrics
from serve.api.clients.client import Client
from serve.api.errors import error_kind
from serve.api.protocol.common import PromptTokensDetails, RequestMetrics, Usage
from serve.api.service import Service
from serve.engine.async_engine import AsyncEngine
from serve.engine.outputs import RequestOutput
from serve.engine.public_ids import answer_ids, choice_label
from serve.errors import (
    DeadlinePassed,
    InvalidRequest,
    QueuedTooLong,
    QueueFull,
    ServeError,
    ShuttingDown,
    StepFailed,
)
from serve.messages import FinishReason, RequestTimes
from serve.sampling_params import SamplingParams

Stream = AsyncGenerator[RequestOutput, None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate. Choice i belongs to prompt i // n."""

    label: str
    prompts: list[list[int]]
    sampling: SamplingParams
    n: int = 1
    priority: int = 0
    cache_salt: str | None = None
    timeout_s: float | None = None  # for beginning
    client: Client = Client()  # noqa: RUF009 (frozen)
    relaxed: tuple[str, ...] = ()  # keywords of its schema that the answer is not held to
    form: AnswerFormat | None = None  # how the model writes reasoning and calls, to tell apart
    in_reasoning: bool = False  # the prompt has opened it
    tools: tuple[str, ...] = ()  # that may be called
    gathers: bool = True  # the answer is put together before it is sent
    prompt_field: str = "prompt"  # what the API calls the prompt; a chat's answer is a new text
    limit_field: str = "max_tokens"  # what it calls the most tokens of the answer

    @property
    def continues_prompt(self) -> bool:
        """Whether the text goes on from the prompt's."""
        return self.prompt_field == "prompt"

    def field_names(self) -> dict[str, str]:
        """What the engine's words are called in the request."""
        return {"prompt": self.prompt_field, "max_tokens": self.limit_field}

    @property
    def num_choices(self) -> int:
        """How many completions there will be."""
        return len(self.prompts) * self.n

    def size(self) -> RequestSize:
        """What is counted of it before it begins."""
        lens = [len(ids) for ids in self.prompts]
        return RequestSize(lens, self.sampling, self.n, self.gathers, self.prompt_field)


@dataclass(slots=True)
class Tally:
    """Token counts so far; changed only by the `Outputs` that owns it."""

    generated: list[int]
    cached: list[int]
    num_prompt_tokens: int
    n: int
    times: list[RequestTimes] = field(default_factory=list)  # of the choices that have ended

    def usage(self) -> Usage:
        """In the API's form: each prompt counts once however many choices it has."""
        generated = sum(self.generated)
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=generated,
            total_tokens=self.num_prompt_tokens + generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self.cached[:: self.n])),
        )

    def metrics(self) -> RequestMetrics:
        """Of the whole request, which has ended."""
        return request_metrics(self.times, self.generated)


class Outputs:
    """The outputs of all choices as they come: an async iterator of pieces.

    Making one raises what the engine refuses at the door (RequestError, EngineDead); iterating
    starts the generation and raises what goes wrong later (StepFailed, EngineDead). `aclose`, which
    the reader must call, aborts whatever still runs.
    """

    def __init__(self, service: Service, engine: AsyncEngine, job: Job) -> None:
        self._service = service
        self._engine = engine
        self._job = job
        with fields_named(job.field_names):
            self._prepared = [
                engine.prepare(ids, job.sampling, continues_prompt=job.continues_prompt)
                for ids in job.prompts
            ]
            check_size(job.size(), service.config, engine.ready.max_model_len)
            streams = [self._generate(index) for index in range(job.num_choices)]
        self._alone = streams[0]  # read directly: this is the path of nearly every request
        self._merged = _merged(streams, self._leader_of) if len(streams) > 1 else None
        self._readers: list[AnswerReader] = []
        if (form := job.form) is not None:
            self._readers = [
                AnswerReader(form, job.tools, in_reasoning=job.in_reasoning) for _ in streams
            ]
        self._unfinished = len(streams)
        self._started_at = time.monotonic()
        self._closed = False
        self._failure: ServeError | None = None
        self.tally = Tally(
            generated=[0] * len(streams),
            cached=[0] * len(streams),
            num_prompt_tokens=sum(len(ids) for ids in job.prompts),
            n=job.n,
        )
        self._lease = service.limits.enter(
            job.client, job.num_choices, self.tally.num_prompt_tokens, job.sampling.max_tokens
        )
        service.open_requests.members.add(self)

    def __aiter__(self) -> AsyncIterator[Piece]:
        """Itself: there is one reader."""
        return self

    async def __anext__(self) -> Piece:
        """The next piece of whichever choice has one."""
        if self._unfinished == 0:
            raise StopAsyncIteration
        try:
            if self._merged is None:
                index, output = 0, await anext(self._alone)
            else:
                index, output = await anext(self._merged)
            self.tally.generated[index] = output.num_generated_tokens
            self.tally.cached[index] = output.num_cached_tokens
            if output.finish_reason is not None:
                self._unfinished -= 1
                if output.times is not None:
                    self.tally.times.append(output.times)
                _raise_failure(output)
        except ServeError as error:
            self._failure = error
            raise
        if self._readers:
            return index, read_parts(self._readers[index], output), output
        return index, parts_of(output), output

    def goes_by(self, request_id: str) -> bool:
        """Whether this is the answer's id, or the request's from which it was made."""
        return self._job.label in answer_ids(request_id)

    def abort(self) -> None:
        """End it from outside: the reader gets RequestAborted."""
        self._engine.abort({self._label(i) for i in range(self._job.num_choices)})

    async def aclose(self) -> None:
        """Abort what is unfinished. Does nothing the second time."""
        if self._closed:
            return
        self._closed = True
        self._service.open_requests.members.discard(self)
        self._service.limits.leave(self._lease, sum(self.tally.generated))
        await (self._merged or self._alone).aclose()
        if not self._service.config.disable_log_requests:
            logger.info(
                "%s: %d prompt + %d generated tokens, %s, %.2f s",
                self._job.label,
                self.tally.num_prompt_tokens,
                sum(self.tally.generated),
                self._ending(),
                time.monotonic() - self._started_at,
            )

    def _ending(self) -> str:
        """How it ended, for the log."""
        if self._failure is not None:
            return f"failed ({error_kind(self._failure).code})"
        return "cut short" if self._unfinished else "done"

    def _leader_of(self, index: int) -> int:
        """The choice whose first output this one waits for; itself if it need not wait.

        Choices of one prompt share its KV through the prefix cache, where the first of them must
        have put it. A prompt within one block is not shared, nor one that is scored.
        """
        first = index - index % self._job.n
        ready, sampling = self._engine.ready, self._job.sampling
        shares = (
            ready.prefix_caching
            and sampling.prompt_logprobs is None
            and len(self._job.prompts[index // self._job.n]) > ready.block_size
        )
        return first if shares else index

    def _generate(self, index: int) -> Stream:
        prompt, choice = divmod(index, self._job.n)
        seed = self._job.sampling.seed
        return self._engine.begin(
            self._prepared[prompt],
            # Choices differ, and yet each is reproducible.
            seed=(seed + choice) % 2**63 if choice and seed is not None else None,
            priority=self._job.priority,
            cache_salt=self._job.cache_salt,
            timeout_s=self._job.timeout_s,
            client=self._job.client.name,
            weight=self._job.client.weight,
            request_id=self._label(index),
        )

    def _label(self, index: int) -> str:
        label = self._job.label
        return label if self._job.num_choices == 1 else choice_label(label, index)


async def _merged(
    streams: list[Stream], leader_of: Callable[[int], int]
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """All streams at once, each begun when its leader has had an output.

    The queue is short: what a slow reader leaves, the engine merges.
    """
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(len(streams))
    begun = [asyncio.Event() for _ in streams]

    async def follow(index: int, stream: Stream) -> None:
        try:
            async with aclosing(stream):
                if (leader := leader_of(index)) != index:
                    await begun[leader].wait()
                async for output in stream:
                    begun[index].set()
                    await queue.put((index, output))
        except Exception as error:
            await queue.put((index, error))  # raised where the queue is read

    tasks = [asyncio.create_task(follow(i, stream)) for i, stream in enumerate(streams)]
    try:
        while True:
            index, output = await queue.get()
            if isinstance(output, Exception):
                raise output
            yield index, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _raise_failure(output: RequestOutput) -> None:
    retry_after_s, why = output.retry_after_s, output.error or "Too much waits."
    if retry_after_s is not None:
        expired = output.finish_reason is FinishReason.TIMEOUT
        refusal = QueuedTooLong if expired else QueueFull
        raise refusal(why, retry_after_s=retry_after_s)
    if output.finish_reason is FinishReason.TIMEOUT:
        raise DeadlinePassed(why, param="timeout")
    if output.is_invalid:
        raise InvalidRequest(why)
    if output.finish_reason is FinishReason.ERROR:
        raise StepFailed(output.error or "The engine failed while working on this request.")
    if output.finish_reason is FinishReason.ABORT:
        raise ShuttingDown("The server ended this request because it is shutting down.")
