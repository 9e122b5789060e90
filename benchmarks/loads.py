"""The loads that servers are compared on, and one run of one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.servers import RunningServer
from serve.bench.online import Measured, measure
from serve.bench.options import ArrivalOptions, ReportOptions, TargetOptions, WorkloadOptions


@dataclass(frozen=True, slots=True)
class NamedLoad:
    """A load with its short name and what it stands for.

    `rate_of`: the request rate as a share of what we reach on that other load in the same run.
    """

    name: str
    about: str
    workload: WorkloadOptions
    arrivals: ArrivalOptions = ArrivalOptions(num_warmups=0)
    rate_of: tuple[str, float] | None = None


def _random(num_prompts: int, input_len: int, output_len: int) -> WorkloadOptions:
    return WorkloadOptions(
        num_prompts=num_prompts, input_len=str(input_len), output_len=str(output_len)
    )


ALL_LOADS = (
    NamedLoad(
        "1",
        "one stream, 32 in, 128 out, three times",
        _random(3, 32, 128),
        ArrivalOptions(max_concurrency=1, num_warmups=0),
    ),
    NamedLoad("2", "8 streams, 32 in, 128 out", _random(8, 32, 128)),
    NamedLoad("3", "32 streams, 32 in, 128 out", _random(32, 32, 128)),
    NamedLoad("4", "48 requests at once, 256 in, 64 out", _random(48, 256, 64)),
    NamedLoad(
        "prefix",
        "32 requests at once, 512 shared + 16 own in, 16 out",
        WorkloadOptions(
            dataset="shared-prefix",
            num_prompts=32,
            prefix_len=512,
            input_len="16",
            output_len="16",
        ),
    ),
    NamedLoad("s", "60 requests at once, 64 in, 32 out (saturation)", _random(60, 64, 32)),
    NamedLoad(
        "poisson",
        "the same as Poisson arrivals at 80 % of our own saturation",
        _random(60, 64, 32),
        rate_of=("s", 0.8),
    ),
)


def find_loads(names: str) -> list[NamedLoad]:
    """By comma-separated names. Raises SystemExit for an unknown one."""
    by_name = {load.name: load for load in ALL_LOADS}
    unknown = [name for name in names.split(",") if name not in by_name]
    if unknown:
        raise SystemExit(f"there is no load {unknown[0]}; there are {', '.join(by_name)}")
    return [by_name[name] for name in names.split(",")]


def smaller(load: NamedLoad) -> NamedLoad:
    """A few tokens of the same kind, to see that everything runs."""
    tiny = replace(load.workload, num_prompts=2, input_len="8", output_len="4", prefix_len=16)
    return replace(load, workload=tiny)


def run(server: RunningServer, load: NamedLoad, seed: int, rate: float | None = None) -> Measured:
    """One run with fresh prompts (by `seed`), so that no cache helps but within the run."""
    command = server.command
    target = TargetOptions(
        base_url=server.url, model=command.model, ignore_eos=command.ignore_eos, timeout=300
    )
    workload = replace(
        load.workload, seed=seed, prompt_format="words" if command.text_prompts else "ids"
    )
    arrivals = load.arrivals if rate is None else replace(load.arrivals, request_rate=rate)
    return measure(target, workload, arrivals, ReportOptions(progress=False))


def warm_up(server: RunningServer, seed: int) -> None:
    """Let a server fill its pools and compile what it compiles: prefill, decode, and a batch."""
    load = NamedLoad("warm-up", "", _random(4, 40, 8))
    failed = run(server, load, seed).summary.errors
    if failed:
        raise SystemExit(f"{server.command.name} answers: {next(iter(failed))}")
