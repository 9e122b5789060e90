"""The step log beside the real core: everything is noted once, and noting costs next to nothing."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings

from serve.engine.core import EngineCore
from serve.engine.inspect.chrome_trace import chrome_trace
from serve.engine.inspect.step_log import StepLog
from serve.engine.inspect.trace import TraceFile, trace_lines
from serve.errors import ConfigError
from serve.kv_cache.manager import KVCacheManager
from serve.scheduler.output import StepResult
from serve.scheduler.scheduler import Scheduler
from tests.fakes import FakeClock, FakeExecutor, FakeInbox, FakeOutbox
from tests.strategies import Workload, add_request, build, drive, limits, random_workload, workloads


def lines_of(core: EngineCore) -> tuple[list[dict], list[dict]]:
    """Steps and requests of a core's trace."""
    lines = trace_lines(core.log, core.scheduler.view())
    return tuple([x for x in lines if x["type"] == kind] for kind in ("step", "request"))


@settings(deadline=None, max_examples=60)
@given(workloads())
def test_the_log_agrees_with_what_happened(workload: Workload) -> None:
    run = drive(build(workload), workload.arrivals)
    steps, requests = lines_of(run.core)
    stats = run.scheduler.stats()

    assert run.core.log.live == {}
    for step in steps:
        chunk_tokens = sum(chunk[2] for chunk in step["chunks"])
        assert step["num_tokens"] == step["num_decodes"] + chunk_tokens
        assert step["num_recomputed_tokens"] <= chunk_tokens
        assert step["num_blocks_used"] <= workload.num_blocks
    hows = [how for step in steps for _, how in step["preempted"]]
    assert hows.count("recompute") == stats.total_preemptions_recompute
    assert hows.count("swap_out") == stats.total_preemptions_swap
    # Whoever lost its blocks got them back the way it lost them, or was aborted before.
    back = [how for step in steps for _, how in step["admitted"]]
    assert back.count("resume") <= hows.count("recompute")
    assert back.count("swap_in") <= hows.count("swap_out")
    assert {r["id"]: r["reason"] for r in requests} == {
        **{name: reason.value for name, reason in run.reasons.items()},
        **dict.fromkeys(run.aborted - run.reasons.keys(), "abort"),
    }
    for request in requests:
        if request["reason"] == "length":
            assert request["output_len"] == len(run.completions.get(request["id"], []))


def test_recomputed_tokens_are_those_that_were_computed_before() -> None:
    kv = KVCacheManager(6, 4, 0)
    core = EngineCore(
        Scheduler(kv, limits(), FakeClock()), FakeExecutor(6, 4), FakeInbox(), FakeOutbox()
    )
    for name in ("old", "young"):
        core.handle(add_request(name, 8, 12))
    while core.has_work():
        core.step()
    steps, _ = lines_of(core)
    lost = core.scheduler.stats().total_preemption_tokens_recomputed
    assert lost > 0
    assert sum(step["num_recomputed_tokens"] for step in steps) == lost


def test_a_trace_file_is_whole_after_every_step(tmp_path: Path) -> None:
    workload = random_workload(Random(3))
    path = tmp_path / "trace.jsonl"
    run = build(workload)
    trace = TraceFile(path, run.scheduler.view())
    core = EngineCore(run.scheduler, run.executor, FakeInbox(), FakeOutbox(), workload.depth, trace)
    run.core = core

    def check(_: object) -> None:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines[0]["type"] == "engine"
        assert sum(line["type"] == "step" for line in lines) == len(core.log.steps)

    drive(run, workload.arrivals, after_turn=check)
    core.close()
    written = [json.loads(line) for line in path.read_text().splitlines()]
    requests = [line for line in written if line["type"] == "request"]
    assert len(requests) == len(workload.arrivals)
    for step in written:
        if step["type"] == "step" and step["num_decodes"]:
            assert step["num_context_tokens"] > 0


def test_sec_51_a_trace_file_is_for_us_alone_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    run, path = build(random_workload(Random(0))), tmp_path / "trace.jsonl"
    for _ in range(2):
        TraceFile(path, run.scheduler.view()).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open("a") as file:
        file.write('{"type": "st')  # the disk was full
    TraceFile(path, run.scheduler.view()).close()
    lines = path.read_text().splitlines()
    assert [line[:12] for line in lines] == ['{"type":"eng'] * 2 + ['{"type": "st', '{"type":"eng']


def test_a_trace_file_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    run = build(random_workload(Random(0)))
    with pytest.raises(ConfigError, match="--trace-file"):
        TraceFile(tmp_path / "no" / "folder", run.scheduler.view())


def test_a_full_disk_ends_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    workload = random_workload(Random(3))
    run = build(workload)
    trace = TraceFile(Path("/dev/full"), run.scheduler.view())
    run.core = EngineCore(run.scheduler, run.executor, FakeInbox(), FakeOutbox(), 1, trace)
    drive(run, workload.arrivals)
    run.core.close()
    assert [record.message for record in caplog.records if "trace ends" in record.message]
    assert run.reasons.keys() | run.aborted == {a.message.request_id for a in workload.arrivals}


@settings(deadline=None, max_examples=30)
@given(workloads())
def test_tracks_never_overlap_and_end_with_their_request(workload: Workload) -> None:
    run = drive(build(workload), workload.arrivals)
    events = chrome_trace(trace_lines(run.core.log, run.scheduler.view()))["traceEvents"]
    _, requests = lines_of(run.core)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) == {r["id"] for r in requests if r["first_scheduled"] is not None}
    for track in names:
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == 2 and e["tid"] == track]
        spans.sort(key=lambda e: (e["ts"], e["dur"]))
        for before, after in pairwise(spans):
            if workload.depth == 1:
                assert before["ts"] + before["dur"] <= after["ts"] + 0.01, (before, after)
        assert all(span["dur"] >= 0 for span in spans)


def test_a_step_of_decodes_costs_next_to_nothing_however_many_there_are() -> None:
    def log_s(num_requests: int) -> tuple[float, float]:
        """Least seconds to log a step of so many decodes, and to schedule and update it."""
        kv = KVCacheManager(4 * num_requests, 256, 0)
        limit = limits(max_num_seqs=num_requests, max_num_batched_tokens=4096, max_model_len=1024)
        scheduler = Scheduler(kv, limit, time.perf_counter)
        log = StepLog(scheduler.view())
        for i in range(num_requests):
            message = add_request(f"r{i}", 2, 900)
            scheduler.add(message)
            log.added(message)
        logging, scheduling = [], []
        for number in range(60):
            times = [time.perf_counter()]
            mark: Callable[[], None] = lambda: times.append(time.perf_counter())  # noqa: B023, E731
            plan = scheduler.schedule()
            mark()
            step = log.launched(plan, times[0])
            mark()
            deltas = scheduler.update(
                plan, StepResult({e.request_id: [1] for e in plan.scheduled if e.num_samples})
            )
            mark()
            log.retired(step, times[2], deltas)
            mark()
            if number > 2:
                logging.append(times[2] - times[1] + times[4] - times[3])
                scheduling.append(times[1] - times[0] + times[3] - times[2])
        return min(logging), min(scheduling)

    few, _ = log_s(8)
    many, scheduling = log_s(256)
    assert many < 4 * few  # not 32 times
    assert many < 0.1 * scheduling
