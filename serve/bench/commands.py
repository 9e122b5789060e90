"""The commands of `serve-llm bench`: flags made from dataclasses, as in `serve.commands`."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from cyclopts import App

from serve.bench.options import (
    ArrivalOptions,
    OfflineOptions,
    ReportOptions,
    TargetOptions,
    WorkloadOptions,
)
from serve.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig
from serve.flags import HELP_PAGE, flags


def serve(
    *,
    target: Annotated[TargetOptions, flags("Server", 1)] = TargetOptions(),
    workload: Annotated[WorkloadOptions, flags("Requests", 2)] = WorkloadOptions(),
    arrivals: Annotated[ArrivalOptions, flags("Arrivals", 3)] = ArrivalOptions(),
    report: Annotated[ReportOptions, flags("Report", 4)] = ReportOptions(),
) -> int:
    """Send a load to any OpenAI server and report its latencies and throughput."""
    from serve.bench.online import bench_serve  # late: --help need not wait for numpy

    return bench_serve(target, workload, arrivals, report)


def throughput(
    model: Annotated[ModelConfig, flags("Model", 1)] = ModelConfig(),
    *,
    options: Annotated[OfflineOptions, flags("Batch", 2)] = OfflineOptions(),
    scheduler: Annotated[SchedulerConfig, flags("Scheduler", 3)] = SchedulerConfig(),
    cache: Annotated[CacheConfig, flags("KV cache", 4)] = CacheConfig(),
    device: Annotated[DeviceConfig, flags("Device", 5)] = DeviceConfig(),
) -> int:
    """Tokens a second of the engine in this process, all prompts given at once."""
    from serve.bench.offline import bench_throughput

    return bench_throughput(options, _settings(model, scheduler, cache, device))


def latency(
    model: Annotated[ModelConfig, flags("Model", 1)] = ModelConfig(),
    *,
    options: Annotated[OfflineOptions, flags("Batch", 2)] = OfflineOptions(),
    scheduler: Annotated[SchedulerConfig, flags("Scheduler", 3)] = SchedulerConfig(),
    cache: Annotated[CacheConfig, flags("KV cache", 4)] = CacheConfig(),
    device: Annotated[DeviceConfig, flags("Device", 5)] = DeviceConfig(),
) -> int:
    """Time from giving a batch to having all of it."""
    from serve.bench.offline import bench_latency

    return bench_latency(options, _settings(model, scheduler, cache, device))


def _settings(*sections: Any) -> dict[str, Any]:
    """Config sections as keyword arguments of LLM."""
    return {f.name: getattr(section, f.name) for section in sections for f in fields(section)}


bench = App(name="bench", help="Measure a server, or the engine without one.")
for command in (serve, throughput, latency):
    bench.command(command, help_formatter=HELP_PAGE)
