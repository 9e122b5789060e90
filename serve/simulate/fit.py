"""Costs fitted to measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from serve.errors import ConfigError
from serve.simulate.cost import LinearCost, StepLoad


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that really ran."""

    load: StepLoad
    seconds: float


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A fit, and the mean of |fitted - measured| / measured over the steps it was made from."""

    cost: LinearCost
    mean_error: float
    num_steps: int


def fit_cost(steps: Sequence[MeasuredStep]) -> FittedCost:
    """The non-negative linear cost nearest to the measured steps.

    Least squares; a coefficient that comes out negative is taken as 0, the most negative one first,
    and the others are fitted again. Outliers (a first step that compiles, a pause of the machine)
    would bend every coefficient, so steps far off a first fit are left out of the second.
    Raises ConfigError when there are too few steps to tell the coefficients apart.
    """
    if len(steps) < len(fields(LinearCost)):
        raise ConfigError(f"{len(steps)} measured steps are too few to fit a cost model to.")
    loads = np.array([(1.0, *step.load) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    first = _least_squares(loads, seconds)
    off = np.abs(loads @ first - seconds)
    kept = off <= np.quantile(off, _KEPT_SHARE)
    coefficients = _least_squares(loads[kept], seconds[kept])
    errors = np.abs(loads[kept] @ coefficients - seconds[kept]) / np.maximum(seconds[kept], 1e-9)
    names = [field.name for field in fields(LinearCost)]
    cost = LinearCost(**dict(zip(names, map(float, coefficients), strict=True)))
    return FittedCost(cost, float(errors.mean()), len(steps))


_KEPT_SHARE = 0.98

_Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def _least_squares(loads: _Array, seconds: _Array) -> _Array:
    """Non-negative coefficients, one per column of `loads`; 0 for columns that never vary from 0.

    Columns differ by many orders of magnitude, so each is scaled to 1 first.
    """
    scale = np.abs(loads).max(axis=0)
    active = [int(i) for i in np.flatnonzero(scale)]
    while True:
        solved = np.linalg.lstsq(loads[:, active] / scale[active], seconds, rcond=None)[0]
        if solved.min() >= 0:
            break
        del active[int(solved.argmin())]
    coefficients: _Array = np.zeros(loads.shape[1])
    coefficients[active] = solved / scale[active]
    return coefficients
