"""How many drafts a step should verify: as many as make the most tokens per second of it.

Source of the rule: Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models
Using Goodput" (arXiv 2406.14066). Under load a row more costs its full share of a step, so that
only drafts that are nearly sure pay, and in the end none: nothing has to switch speculation off.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from serve.scheduler.request import Request

NUM_KEPT = 9
"""Steps of one size whose median is that size's cost; an odd number."""
NUM_REMEMBERED = 256
"""Steps after which a size that was not seen again is forgotten, or at most twice as many."""
FIRST_RATE = 0.6
"""Share of drafts that is taken to be right before any was tried."""
WEIGHT_OF_NEWEST = 0.15
RECOVERY = 0.01
"""Of the way back to FIRST_RATE, for every time that nothing was drafted because it did not seem
worth it: who was wrong often is tried again now and then."""
FIRST_SLOPE = 0.1
"""What a row more adds to the cost of one row before it was measured; of n rows, n to the power of
0.4 less: on a CPU 32 rows cost four times as much as one."""
LEAST_GAIN = 1.05
"""Times as many tokens per second that a step with drafts must promise: what drafts cost beside
their rows, and what is uncertain."""
LONGEST_MATCH = 8
"""Longer matches count as this long."""


class RowCosts:
    """Seconds of a step by the number of tokens in it, measured where it was tried of late: a size
    that once seemed dear, on a machine that was busy then, must be tried again."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_KEPT))
        self._median: dict[int, float] = {}
        self._seen_at: dict[int, int] = {}  # the number of the last step of each size
        self._num_steps = 0

    def observe(self, num_rows: int, duration_s: float) -> None:
        """A step of decodes and drafts, so many tokens in all, took so long."""
        recent = self._recent[num_rows]
        recent.append(duration_s)
        self._median[num_rows] = median(recent)
        self._num_steps += 1
        self._seen_at[num_rows] = self._num_steps
        if self._num_steps % NUM_REMEMBERED == 0:
            self._forget()

    def curve(self, first: int, last: int) -> list[float] | None:
        """Cost of steps of `first` … `last` tokens, never falling; between measured sizes on a
        line, above them with a slope that falls with the size. None before any step was seen."""
        if first not in self._median:
            below = [size for size in self._median if size < first]
            if not below:
                return None
            known = {first: self._beyond(max(below), first)}
        else:
            known = {first: self._median[first]}
        known.update((s, c) for s, c in self._median.items() if first < s <= last)
        sizes, costs = sorted(known), [known[first]]
        for left, right in pairwise(sizes):
            step = (known[right] - known[left]) / (right - left)
            costs += [known[left] + step * i for i in range(1, right - left + 1)]
        costs += [self._beyond(sizes[-1], n, known) for n in range(sizes[-1] + 1, last + 1)]
        for i in range(1, len(costs)):
            costs[i] = max(costs[i], costs[i - 1])
        return costs

    def _forget(self) -> None:
        oldest = self._num_steps - NUM_REMEMBERED
        for size in [size for size, seen in self._seen_at.items() if seen <= oldest]:
            del self._recent[size], self._median[size], self._seen_at[size]

    def _beyond(self, size: int, wanted: int, known: Mapping[int, float] | None = None) -> float:
        cost = (known or self._median)[size]
        return float(cost * (1 + FIRST_SLOPE * (wanted - size) / size**0.4))


class Acceptance:
    """Shares of drafts that were right, given that all before them were, by length of the match:
    of each request, beginning with what is known of all."""

    def __init__(self) -> None:
        self._of_all = [FIRST_RATE] * (LONGEST_MATCH + 1)
        self._of_each: dict[Request, list[float]] = {}

    def rate(self, request: Request, num_matched: int) -> float:
        """Between 0 and 1."""
        return self._rates(request)[min(num_matched, LONGEST_MATCH)]

    def best(self, request: Request) -> float:
        """The best that any of its drafts can be expected to be."""
        return max(self._rates(request))

    def verified(
        self, request: Request, num_matched: int, num_drafts: int, num_accepted: int
    ) -> None:
        """So many first ones of its drafts were right."""
        place = min(num_matched, LONGEST_MATCH)
        for rates in (self._rates(request), self._of_all):
            for number in range(min(num_accepted + 1, num_drafts)):
                rates[place] += WEIGHT_OF_NEWEST * ((number < num_accepted) - rates[place])

    def passed_over(self, request: Request) -> None:
        """It was not worth while to draft for it."""
        rates = self._rates(request)
        rates[:] = [rate + RECOVERY * (FIRST_RATE - rate) for rate in rates]

    def forget(self, request: Request) -> None:
        """The request is over."""
        self._of_each.pop(request, None)

    def _rates(self, request: Request) -> list[float]:
        rates = self._of_each.get(request)
        if rates is None:
            rates = self._of_each[request] = list(self._of_all)
        return rates


def best_lengths(
    rates: Sequence[float], most: Sequence[int], num_sampled: int, costs: Sequence[float]
) -> list[int]:
    """Drafts for each request, of which each may have `most` with a share of `rates` right.

    `costs[k]` is what the step costs with k drafts; without any it makes `num_sampled` tokens.
    The sum of drafts is the k for which tokens per second are the most, and those most likely to be
    accepted are taken first. None when that promises less than LEAST_GAIN.
    """
    gains = [
        (rate**i, place) for place, rate in enumerate(rates) for i in range(1, most[place] + 1)
    ]
    gains.sort(key=lambda gain: -gain[0])
    best, tokens, speed = 0, float(num_sampled), LEAST_GAIN * num_sampled / costs[0]
    for count, (gain, _) in enumerate(gains[: len(costs) - 1], start=1):
        tokens += gain
        if tokens / costs[count] > speed:
            best, speed = count, tokens / costs[count]
    lengths = [0] * len(rates)
    for _, place in gains[:best]:
        lengths[place] += 1
    return lengths
