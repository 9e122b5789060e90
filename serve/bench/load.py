"""Running a load: every request sent when it is due, every answer timed."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from serve.bench.answers import BadAnswer, read_answer
from serve.bench.client import RawAnswer, Target, encode_request, exchange
from serve.bench.options import TargetOptions
from serve.bench.workload import PlannedRequest
from serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What became of one request; times in seconds after the run's begin.

    A failed one has an `error` and no tokens.
    """

    due_s: float
    sent_s: float
    asked_tokens: int
    token_times_s: list[float] = field(default_factory=list)  # of each event that held tokens
    num_tokens: int = 0
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    counted_by: str = ""
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """From sending to the first token, the connection included."""
        return self.token_times_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """From sending to the last token."""
        return self.token_times_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """(e2e - TTFT) / (n - 1); None when all tokens came at once."""
        if self.num_tokens < 2 or len(self.token_times_s) < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies: the gaps between events that held tokens, divided by the tokens
        that an event held, in the mean; drafts and forced tokens bring several at once."""
        num_later = len(self.token_times_s) - 1
        share = max(1.0, (self.num_tokens - 1) / num_later) if num_later else 1.0
        return [(later - earlier) / share for earlier, later in pairwise(self.token_times_s)]


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All requests of a run, in the order they were due."""

    records: list[RequestRecord]
    duration_s: float  # from the begin to the last answer's end
    client_cpu_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """A load ready to run: bytes to send, when, and how many at once."""

    target: Target
    messages: list[bytes]
    asked_tokens: list[int]
    due_s: list[float]
    max_concurrency: int | None
    timeout_s: float


def prepare_load(
    options: TargetOptions,
    model: str,
    requests: Sequence[PlannedRequest],
    due_s: Sequence[float],
    max_concurrency: int | None = None,
) -> Load:
    """Encode all requests. Raises ConfigError for an --extra-body that is no JSON object."""
    target = Target.parse(options.base_url, options.api_key)
    try:
        extra = json.loads(options.extra_body)
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body {options.extra_body}: is not a JSON object.")
    path = "/v1/chat/completions" if options.endpoint == "chat" else "/v1/completions"
    return Load(
        target=target,
        messages=[
            encode_request(target, path, _body(options, model, request) | extra)
            for request in requests
        ],
        asked_tokens=[request.output_len for request in requests],
        due_s=list(due_s),
        max_concurrency=max_concurrency,
        timeout_s=options.timeout,
    )


def _body(options: TargetOptions, model: str, request: PlannedRequest) -> dict[str, Any]:
    prompt = "messages" if options.endpoint == "chat" else "prompt"
    body: dict[str, Any] = {
        "model": model,
        prompt: request.prompt,
        "max_tokens": request.output_len,
        "temperature": options.temperature,
    }
    if options.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if options.ignore_eos:
        body["ignore_eos"] = True
    return body


async def run_load(
    load: Load, on_done: Callable[[RequestRecord], None] = lambda record: None
) -> LoadRun:
    """Send everything and wait for all answers; `on_done` hears of each."""
    gate = asyncio.Semaphore(load.max_concurrency or len(load.messages))
    cpu_before = _cpu_s()
    begin = time.perf_counter()

    async def one(index: int) -> RequestRecord:
        async with gate:
            record = await _send(load, index, begin)
        on_done(record)
        return record

    tasks = []
    for index, due in enumerate(load.due_s):
        if (wait := begin + due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(index)))
    records = await asyncio.gather(*tasks)
    return LoadRun(records, time.perf_counter() - begin, _cpu_s() - cpu_before)


async def _send(load: Load, index: int, begin: float) -> RequestRecord:
    sent = time.perf_counter()
    times = (load.due_s[index], sent - begin, load.asked_tokens[index])
    try:
        async with asyncio.timeout(load.timeout_s):
            raw = await exchange(load.target, load.messages[index])
        return _record(raw, begin, *times)
    except TimeoutError:
        return RequestRecord(*times, error=f"no answer within {load.timeout_s:g} s")
    except OSError as error:
        return RequestRecord(*times, error=f"{type(error).__name__}: {error}")
    except BadAnswer as error:
        return RequestRecord(*times, error=str(error))


def _record(
    raw: RawAnswer, begin: float, due_s: float, sent_s: float, asked_tokens: int
) -> RequestRecord:
    answer = read_answer(raw)
    return RequestRecord(
        due_s,
        sent_s,
        asked_tokens,
        token_times_s=[when - begin for when in answer.token_times],
        num_tokens=answer.num_tokens,
        num_prompt_tokens=answer.num_prompt_tokens,
        num_cached_tokens=answer.num_cached_tokens,
        counted_by=answer.counted_by,
    )


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
