"""`serve-llm bench serve`: a load against a running server."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import uvloop
from rich.console import Console

from serve.bench.client import Target, encode_request, exchange
from serve.bench.load import Load, LoadRun, prepare_load, run_load
from serve.bench.options import ArrivalOptions, ReportOptions, TargetOptions, WorkloadOptions
from serve.bench.plot import new_figure, plot_run
from serve.bench.report import show, write_json
from serve.bench.summary import Summary, summarize
from serve.bench.workload import PlannedRequest, arrival_times, plan_requests
from serve.errors import ConfigError
from serve.progress import BatchBar


@dataclass(frozen=True, slots=True)
class Measured:
    """A run and its figures."""

    run: LoadRun
    summary: Summary


def bench_serve(
    target: TargetOptions,
    workload: WorkloadOptions,
    arrivals: ArrivalOptions,
    report: ReportOptions,
) -> int:
    """Measure, print, write; exit code 1 when a request failed. Raises ConfigError."""
    if report.plot is not None:
        new_figure(1, 1, (1, 1))  # a missing library must not show after the run
    console = Console()
    measured = measure(target, workload, arrivals, report)
    show(measured.summary, console)
    settings = {
        "target": asdict(target) | {"api_key": None},
        "workload": asdict(workload),
        "arrivals": asdict(arrivals),
    }
    if report.output_json is not None:
        write_json(report.output_json, settings, measured.summary, measured.run)
    if report.plot is not None:
        title = f"{target.base_url}, {workload.dataset} {workload.input_len}/{workload.output_len}"
        plot_run(report.plot, measured.run, title)
    return 1 if measured.summary.failed else 0


def measure(
    target: TargetOptions,
    workload: WorkloadOptions,
    arrivals: ArrivalOptions,
    report: ReportOptions,
) -> Measured:
    """Run one load and summarize it. Raises ConfigError, also when the server does not answer."""
    requests = plan_requests(workload, chat=target.endpoint == "chat")
    due = arrival_times(requests, arrivals, workload.seed)
    return uvloop.run(_measure(target, requests, due, arrivals, report))


async def _measure(
    target: TargetOptions,
    requests: list[PlannedRequest],
    due: list[float],
    arrivals: ArrivalOptions,
    report: ReportOptions,
) -> Measured:
    model = target.model or await _first_model(target)
    load = prepare_load(target, model, requests, due, arrivals.max_concurrency)
    await _warm_up(target, model, requests[: arrivals.num_warmups])
    with BatchBar("requests", len(requests), shown=report.progress) as bar:
        run = await run_load(
            load, lambda r: bar.advance(r.num_tokens, done=1, failed=int(r.error is not None))
        )
    return Measured(run, summarize(run, report.limits_ms()))


async def _first_model(target: TargetOptions) -> str:
    """The first name that the server lists."""
    address = Target.parse(target.base_url, target.api_key)
    try:
        answer = await exchange(address, encode_request(address, "/v1/models", method="GET"))
        return str(json.loads(answer.body)["data"][0]["id"])
    except OSError as error:
        raise ConfigError(f"nothing answers at {target.base_url} ({error}).") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{target.base_url}/v1/models lists no model; give --model.") from error


async def _warm_up(target: TargetOptions, model: str, requests: list[PlannedRequest]) -> None:
    """Send a few requests at once. Raises ConfigError when one fails: the run would be useless."""
    if not requests:
        return
    short = [PlannedRequest(r.prompt, min(r.output_len, 8)) for r in requests]
    load: Load = prepare_load(target, model, short, [0.0] * len(short))
    for record in (await run_load(load)).records:
        if record.error is not None:
            raise ConfigError(f"{target.base_url} answers: {record.error}.")
