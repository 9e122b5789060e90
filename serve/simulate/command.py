"""The command `serve-llm simulate`, after its flags have been read."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from rich.console import Console

from serve.errors import ConfigError
from serve.simulate.cost import LinearCost
from serve.simulate.figures import figures_of
from serve.simulate.fit import fit_cost
from serve.simulate.report import Result, as_json, make_table
from serve.simulate.settings import Candidate, MachineConfig, TargetConfig, WorkloadConfig
from serve.simulate.simulation import simulate
from serve.simulate.trace import read_steps
from serve.simulate.workload import SimRequest


def run_simulate(
    candidates: Sequence[Candidate],
    workload: WorkloadConfig,
    machine: MachineConfig,
    targets: TargetConfig,
    *,
    print_json: bool,
) -> int:
    """Simulate every candidate on the same workload and print the figures; returns 0.

    Raises ConfigError.
    """
    console = Console(stderr=print_json)
    requests = workload.requests()
    results = [_run(candidate, requests, machine, targets, console) for candidate in candidates]
    if print_json:
        for result in results:
            Console(soft_wrap=True).print_json(json.dumps(as_json(result)), indent=None)
    else:
        span = requests[-1].arrival_s
        tokens = sum(r.prompt_len for r in requests), sum(r.output_len for r in requests)
        title = (
            f"{len(requests):,} requests over {span:,.0f} s, {tokens[0]:,} + {tokens[1]:,} tokens"
        )
        console.print(title)
        console.print(make_table(results))
    return 0


def _run(
    candidate: Candidate,
    requests: Sequence[SimRequest],
    machine: MachineConfig,
    targets: TargetConfig,
    console: Console,
) -> Result:
    sizes = machine.sizes(candidate.engine)
    cost = _cost(machine, candidate.engine.cache.block_size, console)
    start = time.perf_counter()
    outcome = simulate(requests, candidate.engine, sizes, cost)
    wall_s = time.perf_counter() - start
    figures = figures_of(outcome, targets.targets())
    if figures.num_finished == 0:
        reason = outcome.histories[0].refusal
        raise ConfigError(f"no request could be served; the first was refused: {reason}")
    return Result(candidate.settings, figures, wall_s)


def _cost(machine: MachineConfig, block_size: int, console: Console) -> LinearCost:
    if machine.fit_trace is None:
        return machine.cost(block_size)
    fitted = fit_cost(read_steps(machine.fit_trace))
    terms = ", ".join(f"{k} {v:.3g}" for k, v in fitted.cost.as_dict().items())
    console.print(
        f"cost fitted to {fitted.num_steps} steps, mean error {fitted.mean_error:.1%}: {terms}"
    )
    return fitted.cost
