"""Measured steps out of a trace that `serve --trace-file` recorded."""

from __future__ import annotations

from pathlib import Path

from serve.errors import ConfigError
from serve.simulate.cost import StepLoad
from serve.simulate.fit import MeasuredStep
from serve.simulate.workload import read_lines


def read_steps(path: Path) -> list[MeasuredStep]:
    """The steps of a trace that ran anything, in order; without those that had drafts, which no
    cost here stands for. Raises ConfigError."""
    steps = []
    for number, line in read_lines(path):
        if line.get("type") != "step" or line.get("num_drafts"):
            continue
        try:
            load = StepLoad(**{name: int(line[name]) for name in StepLoad._fields})
            seconds = float(line["schedule_s"] + line["execute_s"] + line["update_s"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: not a step of a trace ({error}).") from error
        steps.append(MeasuredStep(load, seconds))
    return [step for step in steps if any(step.load)]
