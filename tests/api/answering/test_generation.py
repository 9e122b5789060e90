"""Several engine streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from serve.api.answering.choices import collect
from serve.api.answering.generation import Job, Outputs
from serve.api.clients.client_limits import ClientLimits
from serve.api.service import OpenRequests
from serve.config import ServerConfig
from serve.engine.outputs import RequestOutput
from serve.errors import EngineDead, PromptTooLong, StepFailed
from serve.messages import EngineReady, FinishReason
from serve.sampling_params import SamplingParams
from tests.engine.fake_front import READY


def output(text: str, num: int, reason: FinishReason | None = None, **more: Any) -> RequestOutput:
    return RequestOutput(
        "r", text, [ord(c) for c in text], num_generated_tokens=num, finish_reason=reason, **more
    )


def spelled(text: str) -> list[RequestOutput]:
    """One output per letter; the last one ends it."""
    outputs = [output(letter, i) for i, letter in enumerate(text, 1)]
    return [*outputs, output("", len(text), FinishReason.STOP)]


@dataclass
class FakeEngine:
    """Yields prepared outputs; a None among them stands for waiting for ever."""

    scripts: list[list[RequestOutput | Exception | None]]
    requests: list[tuple[list[int], SamplingParams, str | None]] = field(default_factory=list)
    num_open: int = 0
    ready: EngineReady = READY
    refuses: Exception | None = None

    def prepare(
        self, prompt_token_ids: list[int], sampling: SamplingParams, *, continues_prompt: bool
    ) -> tuple[list[int], SamplingParams]:
        if self.refuses is not None:
            raise self.refuses
        return prompt_token_ids, sampling

    def begin(
        self,
        prepared: tuple[list[int], SamplingParams],
        *,
        seed: int | None = None,
        request_id: str | None = None,
        **_: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        prompt_token_ids, sampling = prepared
        own = sampling if seed is None else replace(sampling, seed=seed)
        script = self.scripts[len(self.requests)]
        self.requests.append((prompt_token_ids, own, request_id))
        return self._run(script)

    async def _run(
        self, script: list[RequestOutput | Exception | None]
    ) -> AsyncGenerator[RequestOutput, None]:
        self.num_open += 1
        try:
            for item in script:
                await asyncio.sleep(0)
                if item is None:
                    await asyncio.Event().wait()
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            self.num_open -= 1


@dataclass
class FakeService:
    engine: FakeEngine
    config: ServerConfig = field(default_factory=ServerConfig)
    open_requests: OpenRequests = field(default_factory=OpenRequests)
    limits: ClientLimits = field(default_factory=lambda: ClientLimits(lambda *refusal: None))


def service_of(*scripts: list[Any]) -> Any:
    return FakeService(FakeEngine(list(scripts)))


def job(num_prompts: int = 1, n: int = 1, seed: int | None = None) -> Job:
    return Job("job", [[i, i] for i in range(num_prompts)], SamplingParams(seed=seed), n)


async def test_choices_are_put_together_each_from_its_own_stream() -> None:
    service = service_of(spelled("abc"), spelled("de"), spelled(""), spelled("fghi"))

    outputs = Outputs(service, service.engine, job(num_prompts=2, n=2))
    choices = await collect(outputs)

    usage = outputs.tally.usage()
    assert [choice.text for choice in choices] == ["abc", "de", "", "fghi"]
    assert [choice.token_ids for choice in choices][1] == [ord("d"), ord("e")]
    assert {choice.ended_by for choice in choices} == {"stop"}
    assert (usage.prompt_tokens, usage.completion_tokens) == (4, 9)
    assert [prompt for prompt, _, _ in service.engine.requests] == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert [label for _, _, label in service.engine.requests] == [f"job-{i}" for i in range(4)]
    assert service.open_requests.count == service.engine.num_open == 0


async def test_cached_tokens_count_once_per_prompt() -> None:
    ends = [output("", 0, FinishReason.STOP, num_cached_tokens=c) for c in (5, 7, 1, 2)]
    service = service_of(*[[end] for end in ends])

    outputs = Outputs(service, service.engine, job(num_prompts=2, n=2))
    await collect(outputs)

    assert outputs.tally.usage().prompt_tokens_details.cached_tokens == 5 + 1


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_a_failure_ends_everything(num_prompts: int) -> None:
    failed = output("", 1, FinishReason.ERROR, error="it broke")
    service = service_of([output("a", 1), failed], [None], [output("b", 1), None])

    with pytest.raises(StepFailed, match="it broke"):
        await collect(Outputs(service, service.engine, job(num_prompts)))

    assert service.open_requests.count == service.engine.num_open == 0


@pytest.mark.parametrize("num_prompts", [1, 2])
async def test_what_the_engine_raises_is_raised(num_prompts: int) -> None:
    service = service_of([EngineDead("gone")], [None])
    with pytest.raises(EngineDead, match="gone"):
        await collect(Outputs(service, service.engine, job(num_prompts)))
    assert service.engine.num_open == 0

    shutting_down = service_of([output("", 0, FinishReason.ABORT)])
    with pytest.raises(EngineDead, match="shutting down"):
        await collect(Outputs(shutting_down, shutting_down.engine, job()))


def test_a_refusal_comes_before_anything_is_started() -> None:
    service = service_of([None])
    service.engine.refuses = PromptTooLong("too long")

    with pytest.raises(PromptTooLong):
        Outputs(service, service.engine, job())

    assert service.open_requests.count == 0


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_cancelling_the_reader_ends_the_streams(num_prompts: int) -> None:
    service = service_of(*[[output("a", 1), None]] * num_prompts)
    task = asyncio.create_task(collect(Outputs(service, service.engine, job(num_prompts))))
    while service.engine.num_open < num_prompts:
        await asyncio.sleep(0)

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert service.open_requests.count == service.engine.num_open == 0


async def test_closing_twice_or_before_reading_is_fine() -> None:
    for num_prompts in (1, 2):
        service = service_of([None], [None])
        outputs = Outputs(service, service.engine, job(num_prompts))
        assert service.open_requests.count == 1
        await outputs.aclose()
        await outputs.aclose()
        assert service.open_requests.count == service.engine.num_open == 0


async def test_only_later_choices_have_their_seed_moved() -> None:
    service = service_of(*[spelled("")] * 4)

    await collect(Outputs(service, service.engine, job(num_prompts=2, n=2, seed=2**63 - 1)))

    assert [s.seed for _, s, _ in service.engine.requests] == [2**63 - 1, 0, 2**63 - 1, 0]


@dataclass
class Steered(FakeEngine):
    """Tells the order in which its requests begin."""

    begun: list[int] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def _run(
        self, script: list[RequestOutput | Exception | None]
    ) -> AsyncGenerator[RequestOutput, None]:
        self.begun.append(self.scripts.index(script))
        await self.go.wait()
        async for item in FakeEngine._run(self, script):
            yield item


@pytest.mark.parametrize(
    ("ready", "sampling", "prompt_len", "first"),
    [
        (replace(READY, prefix_caching=True), SamplingParams(), 17, [0, 2]),
        (replace(READY, prefix_caching=True), SamplingParams(), 16, [0, 1, 2, 3]),
        (replace(READY, prefix_caching=True), SamplingParams(prompt_logprobs=0), 17, [0, 1, 2, 3]),
        (READY, SamplingParams(), 17, [0, 1, 2, 3]),
    ],
)
async def test_choices_wait_until_the_first_of_their_prompt_has_computed_it(
    ready: EngineReady, sampling: SamplingParams, prompt_len: int, first: list[int]
) -> None:
    engine = Steered([spelled(text) for text in ("ab", "c", "de", "f")], ready=ready)
    service: Any = FakeService(engine)
    prompts = [[1] * prompt_len, [2] * prompt_len]
    task = asyncio.create_task(
        collect(Outputs(service, service.engine, Job("job", prompts, sampling, n=2)))
    )
    for _ in range(20):
        await asyncio.sleep(0)

    assert engine.begun == first

    engine.go.set()
    choices = await task
    assert [choice.text for choice in choices] == ["ab", "c", "de", "f"]
    assert sorted(engine.begun) == [0, 1, 2, 3]


async def test_the_failure_of_a_first_choice_does_not_leave_others_waiting() -> None:
    ready = replace(READY, prefix_caching=True)
    service: Any = FakeService(FakeEngine([[EngineDead("gone")], [None]], ready=ready))

    with pytest.raises(EngineDead, match="gone"):
        await collect(
            Outputs(service, service.engine, Job("job", [[1] * 20], SamplingParams(), n=2))
        )

    assert service.open_requests.count == service.engine.num_open == 0
