"""Priorities from outside: a running server whose rows or blocks are all taken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from typing import Any

import httpx
import pytest

from serve.config import CacheConfig, EngineConfig, SchedulerConfig
from serve.scheduler.invariants import check_scheduler
from tests.api.answering.test_streaming import wait_until
from tests.api.conftest import Server
from tests.api.stepped import SteppedClient, stepped_server
from tests.fakes import FakeExecutor


@contextmanager
def opened(
    *, num_blocks: int = 64, **scheduler: Any
) -> Iterator[tuple[Server, SteppedClient, httpx.Client, ThreadPoolExecutor]]:
    executor = FakeExecutor(
        num_blocks=num_blocks, block_size=4, num_host_blocks=32, max_num_batched_tokens=32
    )
    config = EngineConfig(
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(scheduling_policy="priority", **scheduler),
    )
    limits = httpx.Limits(max_connections=100)
    with (
        stepped_server(executor, config) as (server, engine),
        server.http(limits=limits) as http,
        ThreadPoolExecutor(64) as senders,
    ):
        yield server, engine, http, senders


def ask(http: httpx.Client, prompt: str, priority: int, max_tokens: int) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "priority": priority,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_metrics": True,
        "return_token_ids": True,
    }
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def send(stage: Any, prompt: str, priority: int, max_tokens: int) -> Future[dict[str, Any]]:
    """In the background; returns when the engine has it."""
    _, engine, http, senders = stage
    live = engine.core.log.live
    before = len(live)
    sent = senders.submit(ask, http, prompt, priority, max_tokens)
    wait_until(lambda: len(live) > before)
    return sent


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_sch_12_an_urgent_request_starts_at_once_though_all_rows_are_taken(mode: str) -> None:
    with opened(max_num_seqs=2, preemption_mode=mode) as stage:
        server, engine, _, _ = stage
        slow = [send(stage, "a long story", 5, 60) for _ in range(2)]
        server.on_loop(lambda: engine.allow(5))
        wait_until(lambda: engine.core.scheduler.stats().num_running == 2)
        urgent = send(stage, "quick", -3, 3)
        server.on_loop(lambda: engine.allow(8))  # far fewer than either of the others needs
        assert len(urgent.result(20)["choices"][0]["token_ids"]) == 3
        assert not any(sent.done() for sent in slow)
        server.on_loop(lambda: engine.allow(1000))
        answers = [sent.result(20) for sent in slow]
    assert answers[0]["choices"][0]["token_ids"] == answers[1]["choices"][0]["token_ids"]
    preemptions = sorted(answer["metrics"]["num_preemptions"] for answer in answers)
    assert preemptions == [0, 1]  # one gave way, once


def test_sch_12_an_equal_request_waits_and_displaces_nobody() -> None:
    with opened(max_num_seqs=2) as stage:
        server, engine, _, _ = stage
        first = [send(stage, "a long story", 0, 20) for _ in range(2)]
        server.on_loop(lambda: engine.allow(5))
        wait_until(lambda: engine.core.scheduler.stats().num_running == 2)
        equal = send(stage, "quick", 0, 1)
        server.on_loop(lambda: engine.allow(8))
        wait_until(lambda: engine.core.log.steps[-1].opened.number >= 13)
        assert not equal.done()
        server.on_loop(lambda: engine.allow(1000))
        answers = [sent.result(20) for sent in (*first, equal)]
    assert [answer["metrics"]["num_preemptions"] for answer in answers] == [0, 0, 0]


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_sch_11_fifty_requests_of_mixed_priorities_in_a_small_pool_are_all_answered_right(
    mode: str,
) -> None:
    rng = Random(3)
    wanted: dict[tuple[str, int], list[int]] = {}
    with opened(num_blocks=24, max_num_seqs=8, preemption_mode=mode) as stage:
        server, engine, http, senders = stage
        server.on_loop(lambda: engine.allow(1_000_000))
        asked = [
            (f"story {rng.randrange(9)}", rng.randint(-2, 2), rng.randint(5, 60)) for _ in range(50)
        ]
        sent = [senders.submit(ask, http, *each) for each in asked]
        answers = [each.result(60) for each in sent]
        for (prompt, _, max_tokens), answer in zip(asked, answers, strict=True):
            key = (prompt, max_tokens)
            if key not in wanted:  # alone, when nothing can displace it
                again = ask(http, prompt, 0, max_tokens)
                wanted[key] = again["choices"][0]["token_ids"]
            assert answer["choices"][0]["token_ids"] == wanted[key]
        stats = engine.core.scheduler.stats()
        metrics = http.get("/metrics").text
        check_scheduler(engine.core.scheduler)
    assert stats.total_preemptions_recompute + stats.total_preemptions_swap > 0
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0)
    assert stats.num_blocks_used == 0
    assert "num_requests_running" in metrics


def test_sch_22_an_idle_engine_does_nothing_and_answers_afterwards() -> None:
    with opened(num_blocks=60, max_num_seqs=16) as stage:
        server, engine, http, senders = stage
        server.on_loop(lambda: engine.allow(1_000_000))
        shared = "the same beginning for all of them, "
        sent = [senders.submit(ask, http, f"{shared}{number % 40}", 0, 3) for number in range(256)]
        answers = [each.result(60) for each in sent]
        cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
        assert sum(cached) > 0
        state = _state(http)
        for _ in range(20):  # whoever looks in wakes nothing up
            assert _state(http) == state
        assert state["num_blocks_used"] == 0
        assert not engine.core.has_work()
        again = ask(http, f"{shared}7", 0, 3)
        assert again["choices"][0]["token_ids"] == answers[7]["choices"][0]["token_ids"]
        check_scheduler(engine.core.scheduler)


def _state(http: httpx.Client) -> dict[str, Any]:
    answer = http.get("/v1/scheduler/state")
    assert answer.status_code == 200
    state: dict[str, Any] = json.loads(answer.text)
    return state
