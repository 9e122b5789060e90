"""The command line of `serve-llm simulate`: serve's own flags, some of which may have a list."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from cyclopts import Group, Parameter

from serve.config import CacheConfig, EngineConfig, SchedulerConfig
from serve.flags import flags
from serve.simulate.recorded import with_recorded_flags
from serve.simulate.settings import Candidate, MachineConfig, TargetConfig, WorkloadConfig
from serve.simulate.variants import expand

Parse = Callable[[Sequence[str]], "partial[int]"]
"""A command line → the call it asks for. Raises CycloptsError or ConfigError."""


def simulate(
    *,
    workload: Annotated[WorkloadConfig, flags("Requests", 1)] = WorkloadConfig(),  # noqa: B008 (frozen)
    machine: Annotated[MachineConfig, flags("Machine", 2)] = MachineConfig(),  # noqa: B008 (frozen)
    targets: Annotated[TargetConfig, flags("Targets", 3)] = TargetConfig(),  # noqa: B008 (frozen)
    scheduler: Annotated[SchedulerConfig, flags("Scheduler", 4)] = SchedulerConfig(),
    cache: Annotated[CacheConfig, flags("KV cache", 5)] = CacheConfig(),
    json: Annotated[bool, Parameter(group=Group("More", sort_key=6), negative=())] = False,
    candidates: Annotated[tuple[Candidate, ...], Parameter(parse=False)] = (),
) -> int:
    """Run the scheduler and the cache against a cost model, without a model or a device.

    Scheduler and cache flags are serve's. Give several values, separated by commas, to compare
    them: `--preemption-mode recompute,swap,auto --enable-chunked-prefill on,off`.

    Parameters
    ----------
    json
        Print one JSON object per variant instead of a table.
    """
    from serve.simulate.command import run_simulate  # late: --help need not wait for numpy

    engine = EngineConfig(scheduler=scheduler, cache=cache)
    return run_simulate(
        candidates or (Candidate(engine, {}),), workload, machine, targets, print_json=json
    )


def comparison(tokens: Sequence[str], parse: Parse) -> partial[int]:
    """The one call for a command line of `simulate` whose flags may have lists of values, and whose
    workload may bring the flags it was recorded with."""
    tokens, recorded = with_recorded_flags(tokens)
    if recorded:
        sys.stderr.write(f"as recorded, unless given: {' '.join(recorded)}\n")
    variants = expand(tokens)
    calls = [parse(variant.tokens) for variant in variants]
    first = calls[0]
    if first.func is not simulate:  # --help
        return first
    candidates = [
        Candidate(
            EngineConfig(
                scheduler=call.keywords.get("scheduler", SchedulerConfig()),
                cache=call.keywords.get("cache", CacheConfig()),
            ),
            variant.settings,
        )
        for call, variant in zip(calls, variants, strict=True)
    ]
    return partial(first, candidates=tuple(candidates))
