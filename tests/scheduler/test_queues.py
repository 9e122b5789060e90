"""The order in which waiting requests are served."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve.scheduler.queues import RequestQueue
from serve.scheduler.request import Request, make_request
from tests.strategies import add_request


def request(number: int, *, priority: int = 0, preempted: bool = False) -> Request:
    made = make_request(
        add_request(f"r{number}", 2, 2, arrival_time=number), (priority, 0.0, number), 4
    )
    made.num_preemptions = int(preempted)
    made.first_scheduled_time = 0.0 if preempted else None
    return made


def drain(queue: RequestQueue) -> list[Request]:
    order = []
    while (head := queue.peek()) is not None:
        queue.remove(head)
        order.append(head)
    return order


def test_first_come_first_served() -> None:
    queue = RequestQueue()
    requests = [request(i) for i in range(5)]
    for r in reversed(requests):
        queue.push(r)
    assert drain(queue) == requests


def test_a_begun_request_goes_before_those_that_never_ran() -> None:
    queue = RequestQueue()
    new, begun, begun_later = request(1), request(7, preempted=True), request(9, preempted=True)
    for r in (new, begun_later, begun):
        queue.push(r)
    assert drain(queue) == [begun, begun_later, new]


def test_a_lower_priority_number_goes_first_even_before_begun_ones() -> None:
    queue = RequestQueue()
    urgent, begun = request(9, priority=-1), request(1, preempted=True)
    queue.push(begun)
    queue.push(urgent)
    assert drain(queue) == [urgent, begun]


def test_a_request_may_come_back_with_another_place() -> None:
    queue = RequestQueue()
    first, second = request(1), request(2)
    queue.push(first)
    queue.push(second)
    queue.remove(second)
    second.num_preemptions = 1
    second.first_scheduled_time = 0.0
    queue.push(second)
    assert drain(queue) == [second, first]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=300))
def test_the_queue_agrees_with_a_sorted_list(actions: list[tuple[bool, int]]) -> None:
    queue = RequestQueue()
    model: dict[int, Request] = {}
    for push, number in actions:
        if push and number not in model:
            model[number] = request(number)
            queue.push(model[number])
        elif not push and number in model:
            queue.remove(model.pop(number))
        head = min(model) if model else None
        assert queue.peek() is (None if head is None else model[head])
        assert queue.earliest_arrival() == head
        assert len(queue) == len(model)
        assert set(queue) == set(model.values())


def test_long_requests_can_be_passed_over() -> None:
    queue = RequestQueue(long_above=5)
    long = make_request(add_request("long", 6, 2), (0, 0.0, 0), 4)
    short, shorter = request(1), request(2)
    for r in (shorter, long, short):
        queue.push(r)
    assert (queue.peek(), queue.peek_short()) == (long, short)
    queue.remove(short)
    queue.remove(shorter)
    assert (queue.peek(), queue.peek_short()) == (long, None)


def test_removed_requests_do_not_pile_up() -> None:
    queue = RequestQueue()
    keep = request(0)
    queue.push(keep)
    for number in range(1, 2000):
        passing = request(number)
        queue.push(passing)
        queue.remove(passing)
    assert sum(map(len, queue._heaps.values())) < 100
    assert queue.peek() is keep
