"""The engine core over a fake device: answers never depend on how they were scheduled."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from tests.strategies import (
    Workload,
    build,
    check_run,
    drive,
    workloads,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads())
def test_scheduling_never_changes_an_answer(workload: Workload) -> None:
    check_run(drive(build(workload), workload.arrivals), workload)
