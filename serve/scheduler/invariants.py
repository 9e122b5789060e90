"""What must hold between any two calls of a scheduler; for tests."""

from __future__ import annotations

from collections.abc import Iterable

from serve.scheduler.request import Request, RequestStatus
from serve.scheduler.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Every live request is in exactly one place, with the blocks that place calls for."""
    roster = scheduler.roster
    places: list[tuple[RequestStatus, Iterable[Request]]] = [
        (RequestStatus.RUNNING, roster.running),
        (RequestStatus.WAITING, roster.waiting),
        (RequestStatus.SWAPPED, roster.swapped),
    ]
    num_placed = 0
    for status, place in places:
        for request in place:
            num_placed += 1
            assert request.status is status, (request.request_id, request.status, status)
            assert roster.requests.get(request.request_id) is request, request.request_id
            _check_request(request)
    assert num_placed == len(roster.requests), (
        num_placed,
        roster.requests.keys(),
    )
    _check_running(scheduler)
    scheduler.kv.check_invariants()
    scheduler.kv.check_holders(
        device={r.request_id for r in roster.running},
        host={r.request_id for r in roster.swapped},
    )


def _check_running(scheduler: Scheduler) -> None:
    roster = scheduler.roster
    assert len(roster.running) <= scheduler.num_rows
    orders = [r.order for r in roster.running]
    assert orders == sorted(set(orders)), f"running is out of order: {orders}"
    for request in roster.running:
        num_slots = len(scheduler.kv.block_ids(request.request_id)) * scheduler.kv.block_size
        assert 0 < request.num_computed_tokens <= num_slots == request.num_slots, request


def _check_request(request: Request) -> None:
    assert request.num_in_flight >= 0, request
    assert request.num_computed_tokens <= request.max_kv_tokens, request
    assert request.num_computed_tokens <= request.num_tokens <= request.max_num_tokens, request
    if request.status is RequestStatus.WAITING:
        assert request.num_computed_tokens == 0, request
