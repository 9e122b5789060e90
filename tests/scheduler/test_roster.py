"""Who is named next, and how many before whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve.scheduler.request import RequestStatus, make_request
from serve.scheduler.roster import Roster
from tests.strategies import add_request


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["new", "preempted", "swapped"]))))
def test_num_ahead_is_what_next_in_line_names_before(kinds: list[tuple[int, str]]) -> None:
    roster = Roster(long_above=100)
    for number, (level, kind) in enumerate(kinds):
        request = make_request(add_request(f"r{number}", 2, 2), (level, 0.0, number), 4)
        roster.join(request)
        if kind != "new":
            roster.admit(request)
            request.first_scheduled_time = 0.0
            is_swapped = kind == "swapped"
            roster.queue(request, RequestStatus.SWAPPED if is_swapped else RequestStatus.WAITING)
    ahead = {r.label: roster.num_ahead(r) for r in roster.requests.values()}
    named = []
    while (request := roster.next_in_line(may_start_long=True)) is not None:
        named.append(request.label)
        roster.admit(request)
    assert [ahead[label] for label in named] == list(range(len(kinds)))
