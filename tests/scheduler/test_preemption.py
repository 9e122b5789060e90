"""Who gives up its blocks, and how."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve.kv_cache.block_copy import BlockCopy
from serve.kv_cache.manager import KVCacheManager
from serve.scheduler.limits import SchedulerLimits
from serve.scheduler.output import ScheduledRequest, SchedulerOutput
from serve.scheduler.policy.headroom import Headroom
from serve.scheduler.policy.step_costs import StepCosts
from serve.scheduler.policy.victims import PreemptionMode, Victims
from serve.scheduler.request import Request, make_request
from tests.scheduler.driver import make_scheduler, run_until_done
from tests.strategies import add_request, limits


def victim(num_computed: int = 10, num_preemptions: int = 0) -> Request:
    made = make_request(add_request("a", 12, 5), (0, 0.0, 0), 4)
    made.num_computed_tokens = num_computed
    made.num_preemptions = num_preemptions
    return made


def victims(kv: KVCacheManager, costs: StepCosts | None = None) -> Victims:
    return Victims(kv, costs or StepCosts(), Headroom(kv.num_blocks))


def by(mode: str, victim: str = "last-admitted") -> SchedulerLimits:
    return limits(preemption_mode=mode, preemption_victim=victim)


@pytest.mark.parametrize(
    ("configured", "host_blocks", "wanted"),
    [
        ("recompute", 9, PreemptionMode.RECOMPUTE),
        ("swap", 9, PreemptionMode.SWAP),
        ("auto", 9, PreemptionMode.SWAP),
        ("swap", 2, PreemptionMode.RECOMPUTE),
        ("auto", 2, PreemptionMode.RECOMPUTE),
        ("swap", 3, PreemptionMode.SWAP),
    ],
)
def test_swap_needs_room_on_the_host(
    configured: str, host_blocks: int, wanted: PreemptionMode
) -> None:
    kv = KVCacheManager(9, 4, host_blocks)
    kv.grow("a", 10)
    assert victims(kv).mode(victim(), by(configured)) is wanted


def step_of(num_tokens: int, num_requests: int, num_copies: int = 0) -> SchedulerOutput:
    entries = [ScheduledRequest(f"r{i}", 0, 1, [1], [], 1) for i in range(num_requests)]
    copies = [BlockCopy(i, i) for i in range(num_copies)]
    return SchedulerOutput(entries, [], [], copies, [], [], num_tokens)


@pytest.mark.parametrize(
    ("prefill_s", "copies_s", "wanted"),
    [
        (0.8, 0.1, PreemptionMode.SWAP),  # a token costs 0.08 s, ten of them more than three blocks
        (0.1, 0.9, PreemptionMode.RECOMPUTE),
    ],
)
def test_auto_takes_what_costs_less_as_measured(
    prefill_s: float, copies_s: float, wanted: PreemptionMode
) -> None:
    kv, costs = KVCacheManager(9, 4, 9), StepCosts()
    costs.observe(step_of(3, 3), 0.05)
    costs.observe(step_of(13, 3), 0.05 + prefill_s)
    costs.observe(step_of(3, 3, num_copies=3), 0.05 + copies_s)
    kv.grow("a", 10)
    assert victims(kv, costs).mode(victim(num_computed=10), by("auto")) is wanted


def test_auto_counts_what_the_prefix_cache_gives_back() -> None:
    kv, costs = KVCacheManager(9, 4, 9, enable_prefix_caching=True), StepCosts()
    costs.observe(step_of(3, 3), 0.05)
    costs.observe(step_of(13, 3), 0.05 + 1.0)  # a token costs 0.1 s
    costs.observe(step_of(3, 3, num_copies=3), 0.05 + 0.3)  # out and in again: 0.6 s
    request = victim(num_computed=10)
    kv.grow("a", 10)
    assert victims(kv, costs).mode(request, by("auto")) is PreemptionMode.SWAP
    request.block_hashes.extend(request.token_ids)
    kv.commit("a", request.block_hashes, 10)  # two of three blocks can be found again
    assert victims(kv, costs).mode(request, by("auto")) is PreemptionMode.RECOMPUTE
    for _ in range(20):
        costs.observe_return(num_hoped=2, num_found=0)  # but they never are
    assert victims(kv, costs).mode(request, by("auto")) is PreemptionMode.SWAP
    kv.grow("b", 9, matched=kv.match_prefix(request.block_hashes, 8))  # somebody holds them
    assert victims(kv, costs).mode(request, by("auto")) is PreemptionMode.RECOMPUTE


def test_a_request_that_comes_back_tells_what_it_found() -> None:
    scheduler = make_scheduler(num_blocks=12, num_host_blocks=12, preemption_mode="recompute")
    scheduler.kv.enable_prefix_caching = True
    for name in ("a", "b", "c"):
        scheduler.add(add_request(name, [ord(name)] * 12, 20))
    run_until_done(scheduler)
    assert scheduler.stats().total_preemptions_recompute > 0
    assert 0 < scheduler._costs.num_found_again(100, 0) < 100  # some, not all


def test_steps_that_both_copy_and_prefill_say_nothing_about_either() -> None:
    costs = StepCosts()
    costs.observe(step_of(30, 3, num_copies=3), 9.0)
    assert (costs.recompute_s(10), costs.swap_s(3)) == (None, None)


def test_costs_follow_later_steps() -> None:
    costs = StepCosts()
    costs.observe(step_of(1, 1), 0.0)
    for _ in range(50):
        costs.observe(step_of(11, 1), 10.0)
    assert costs.recompute_s(1) == pytest.approx(1.0)
    for _ in range(50):
        costs.observe(step_of(11, 1), 20.0)
    assert costs.recompute_s(1) == pytest.approx(2.0, rel=0.01)


def running(kv: KVCacheManager, **computed: int) -> list[Request]:
    """Requests in order of service that have computed so many tokens."""
    requests = []
    for number, (name, num_tokens) in enumerate(computed.items()):
        made = make_request(add_request(name, 12, 5), (0, 0.0, number), 4)
        made.num_computed_tokens = num_tokens
        kv.grow(name, num_tokens)
        requests.append(made)
    return requests


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [("last-admitted", "e"), ("least-progress", "b"), ("most-blocks", "c"), ("cheapest", "d")],
)
def test_each_policy_chooses_its_victim(policy: str, wanted: str) -> None:
    kv = KVCacheManager(20, 4, 0)
    requests = running(kv, a=8, b=4, c=16, d=5, e=12)
    chosen = victims(kv).choose(requests, by("recompute", policy))
    assert chosen.request_id == wanted  # cheapest: 2.5 tokens lost for each block freed, not 4


@pytest.mark.parametrize("policy", ["last-admitted", "least-progress", "most-blocks", "cheapest"])
def test_only_the_least_urgent_are_victims(policy: str) -> None:
    kv = KVCacheManager(20, 4, 0)
    requests = running(kv, a=1, b=16, c=8)
    requests[2].order, requests[2].priority = (1, 0.0, 2), 1
    assert victims(kv).choose(requests, by("recompute", policy)).request_id == "c"


def test_the_log_names_a_victim_as_its_client_knows_it(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(num_blocks=6)
    for number, label in enumerate(["cmpl-old", "cmpl-young"]):
        scheduler.add(replace(add_request(f"{number}", 8, 12), label=label))
    with caplog.at_level("INFO"):
        run_until_done(scheduler)
    assert "preempted cmpl-young by recompute" in caplog.text
