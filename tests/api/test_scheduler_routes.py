"""Looking into a real scheduler over HTTP, step by step, and changing it while it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from serve.config import CacheConfig, EngineConfig, SchedulerConfig
from tests.api.conftest import Server
from tests.api.stepped import SteppedClient, stepped_server
from tests.api.test_streaming import wait_until
from tests.fakes import FakeExecutor


@dataclass
class Stage:
    """A server whose engine stands still between the test's steps."""

    server: Server
    engine: SteppedClient
    http: httpx.Client
    senders: ThreadPoolExecutor

    def send(self, request_id: str, prompt: str, max_tokens: int = 12, **fields: Any) -> Future:
        """Send a request in the background and wait until the engine has it."""
        live = self.engine.core.log.live
        before = len(live)
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}
        headers = {"x-request-id": request_id}
        sent = self.senders.submit(self.http.post, "/v1/completions", json=body, headers=headers)
        wait_until(lambda: len(live) > before or sent.done())
        assert not sent.done(), sent.result().text
        return sent

    def step(self, num_steps: int = 1) -> None:
        """Let the engine make so many steps, and wait until it has."""
        log = self.engine.core.log
        last = (log.steps[-1].opened.number if log.steps else 0) + num_steps
        self.server.on_loop(lambda: self.engine.allow(num_steps))
        wait_until(lambda: bool(log.steps) and log.steps[-1].opened.number >= last)

    def finish(self, sent: Future) -> httpx.Response:
        """Let the engine run until a request has its answer."""
        self.server.on_loop(lambda: self.engine.allow(1000))
        return sent.result(20)

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def choices(self, request_id: str) -> list[dict[str, Any]]:
        return self.get(f"/v1/requests/{request_id}")["choices"]

    def configure(self, **changes: Any) -> httpx.Response:
        return self.http.post("/v1/scheduler/config", json=changes)


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A pool of 8 blocks of 4 tokens, rows for 3 requests."""
    executor = FakeExecutor(
        num_blocks=8, block_size=4, num_host_blocks=8, max_num_batched_tokens=32
    )
    config = EngineConfig(
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=3, preemption_mode="auto"),
    )
    with (
        stepped_server(executor, config) as (server, engine),
        server.http() as http,
        ThreadPoolExecutor() as senders,
    ):
        yield Stage(server, engine, http, senders)
        server.on_loop(lambda: engine.allow(10_000))  # let whoever still waits have his answer


def test_a_waiting_request_is_told_what_it_waits_for(stage: Stage) -> None:
    stage.send("first", "a" * 16)
    stage.step()
    stage.send("second", "b" * 18)
    stage.send("third", "c" * 3)

    (running,) = stage.choices("first")
    (second,) = stage.choices("second")
    (third,) = stage.choices("third")

    assert running["status"] == "running"
    assert (running["num_prompt_tokens"], running["num_generated_tokens"]) == (16, 1)
    assert running["reason"] == "running: 1 tokens generated, of at most 12"
    # 18 tokens take 5 blocks and one stays free at admission; the first request has 4 of 8.
    assert (second["num_blocks_needed"], second["num_blocks_free"]) == (6, 4)
    assert second["reason"] == "waiting: needs 6 blocks, 4 free"
    assert third["num_ahead"] == 1
    assert third["reason"] == "waiting: 1 request ahead"


def test_taken_places_are_named(stage: Stage) -> None:
    assert stage.configure(max_num_seqs=1).status_code == 200
    stage.send("first", "a")
    stage.step()
    stage.send("second", "b")
    (second,) = stage.choices("second")
    assert second["reason"] == "waiting: all 1 places of --max-num-seqs are taken"


def test_the_start_is_estimated_from_the_starts_of_late(stage: Stage) -> None:
    for name in ("a", "b", "c"):
        stage.send(name, name)
        stage.step()
    stage.send("d", "d")
    (waiting,) = stage.choices("d")
    assert waiting["estimated_start_s"] > 0
    assert waiting["reason"].endswith(f"estimated start in {waiting['estimated_start_s']:.1f} s")


def test_a_preempted_request_keeps_its_progress(stage: Stage) -> None:
    stage.configure(preemption_mode="recompute")
    stage.send("old", "a" * 12, max_tokens=20)
    stage.send("young", "b" * 12, max_tokens=12)
    while not (young := stage.choices("young")[0])["num_preemptions"]:
        stage.step()
    assert young["status"] == "preempted"
    assert young["num_computed_tokens"] == 0
    assert young["num_generated_tokens"] > 1
    assert young["reason"].startswith("preempted: needs ")


def test_both_ids_that_a_client_has_are_known_also_afterwards(stage: Stage) -> None:
    answer = stage.send("mine/1", "a" * 5, max_tokens=3, n=2)
    response_id = stage.finish(answer).json()["id"]
    assert response_id == "cmpl-mine/1"
    for request_id in ("mine/1", response_id):
        choices = stage.choices(request_id)
        assert [choice["status"] for choice in choices] == ["finished"] * 2
        assert [choice["output_len"] for choice in choices] == [3, 3]
        assert choices[0]["reason"] == "length"
        assert choices[0]["first_token"] <= choices[0]["finished"]


def test_an_unknown_id_is_a_404(stage: Stage) -> None:
    answer = stage.http.get("/v1/requests/nobody.*")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "request_not_found"


def test_the_state_counts_and_lists_who_is_where(stage: Stage) -> None:
    stage.send("first", "a" * 16)
    stage.step()
    stage.send("second", "b" * 18)

    state = stage.get("/v1/scheduler/state")

    assert [r["id"] for r in state["running"]] == ["cmpl-first"]
    assert [r["id"] for r in state["waiting"]] == ["cmpl-second"]
    assert (state["num_running"], state["num_waiting"], state["num_swapped"]) == (1, 1, 0)
    assert (state["num_blocks_used"], state["num_blocks"]) == (4, 8)
    assert state["limits"]["max_num_seqs"] == 3
    assert state["steps"]["num_steps"] == 1
    assert state["steps"]["mean_tokens"] == 16


def test_the_trace_tells_every_step_and_every_end(stage: Stage) -> None:
    done = stage.send("first", "a" * 9, max_tokens=3)
    stage.step(4)
    done.result(20)

    answer = stage.http.get("/v1/scheduler/trace")

    assert answer.headers["content-type"] == "application/jsonl"
    engine, *lines = [json.loads(line) for line in answer.text.splitlines()]
    steps = [line for line in lines if line["type"] == "step"]
    (request,) = [line for line in lines if line["type"] == "request"]
    assert (engine["type"], engine["num_blocks"]) == ("engine", 8)
    assert [step["num_chunk_tokens"] for step in steps] == [9, 0, 0, 0]
    assert [step["num_decodes"] for step in steps] == [0, 1, 1, 0]
    assert steps[0]["chunks"] == [["cmpl-first", 0, 9, 0]]
    assert steps[0]["admitted"] == [["cmpl-first", "start"]]
    assert (request["id"], request["prompt_len"], request["output_len"]) == ("cmpl-first", 9, 3)


def test_perfettos_form_has_a_track_per_request(stage: Stage) -> None:
    done = stage.send("first", "a" * 9, max_tokens=3)
    stage.step(4)
    done.result(20)
    events = stage.get("/v1/scheduler/trace?format=chrome")["traceEvents"]
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert tracks == ["cmpl-first"]
    spans = {e["name"] for e in events if e["ph"] == "X" and e["pid"] == 2}
    assert spans == {"queued", "prefill", "decode"}
    assert stage.http.get("/v1/scheduler/trace?format=x").status_code in (400, 422)


def test_limits_change_from_the_next_step_on(stage: Stage) -> None:
    answer = stage.configure(max_num_batched_tokens=5, scheduling_policy="priority")
    assert answer.json()["settings"]["max_num_batched_tokens"] == 5
    assert answer.json()["settings"]["max_num_seqs"] == 3

    stage.send("first", "a" * 9, priority=-1)  # refused as long as the policy was fcfs
    stage.step(2)

    steps = stage.engine.core.log.steps
    assert [record.opened.num_tokens for record in steps] == [5, 4]


def test_settings_keep_the_units_of_their_flags(stage: Stage) -> None:
    settings = stage.configure(target_itl_ms=25, step_order="prefill-first").json()["settings"]
    assert (settings["target_itl_ms"], settings["step_order"]) == (25.0, "prefill-first")
    assert stage.get("/v1/scheduler/state")["limits"]["target_itl_s"] == 0.025
    assert stage.configure(target_itl_ms=None).json()["settings"]["target_itl_ms"] is None


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_num_seqs": 4}, "max_num_seqs"),  # more rows than were made at the start
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": None}, "max_num_seqs"),
        ({"max_num_batched_tokens": 33}, "max_num_batched_tokens"),
        ({"max_num_seqs": "2"}, "max_num_seqs"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"max_num_seqs": 2.5}, "max_num_seqs"),
        ({"preemption_mode": "burn"}, "preemption_mode"),
        ({"preemption_victim": "me"}, "preemption_victim"),
        ({"scheduler_delay_factor": -1}, "scheduler_delay_factor"),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs"),
        ({"target_itl_ms": 0}, "target_itl_ms"),
        ({"target_itl_ms": "fast"}, "target_itl_ms"),
        ({"max_num_seqs": 2, "block_size": 8}, "block_size"),
        ({"name": "x"}, "name"),
    ],
)
def test_an_impossible_change_changes_nothing(
    stage: Stage, changes: dict[str, Any], param: str
) -> None:
    before = stage.get("/v1/scheduler/state")["limits"]
    answer = stage.configure(**changes)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert stage.get("/v1/scheduler/state")["limits"] == before


def test_swap_needs_swap_space() -> None:
    executor = FakeExecutor(num_blocks=8, block_size=4)
    config = EngineConfig(cache=CacheConfig(block_size=4))
    with stepped_server(executor, config) as (server, _), server.http() as http:
        answer = http.post("/v1/scheduler/config", json={"preemption_mode": "swap"})
    assert answer.status_code == 400
    assert "swap space" in answer.json()["error"]["message"]


def test_a_dead_engine_is_a_503_also_for_who_asks_while_it_dies(stage: Stage) -> None:
    stage.server.on_loop(lambda: stage.engine.die("gone"))
    wait_until(lambda: stage.server.engine.dead_reason is not None)
    for path in ("/v1/scheduler/state", "/v1/requests/x", "/v1/scheduler/trace"):
        assert stage.http.get(path).status_code == 503
