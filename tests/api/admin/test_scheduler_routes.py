"""Looking into a real scheduler over HTTP, step by step, and changing it while it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from serve.api.protocol.scheduler import ChoiceState, SchedulerSettings
from serve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tests.api.answering.test_streaming import wait_until
from tests.api.conftest import Server
from tests.api.stepped import SteppedClient, stepped_server
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
    assert running["reason"] is None
    # 18 tokens take 5 blocks and one stays free at admission; the first request has 4 of 8.
    assert (second["num_blocks_needed"], second["num_blocks_kept_free"]) == (5, 1)
    assert second["num_blocks_free"] == 4
    assert second["reason"] == "waiting: needs 5 blocks and 1 kept free for those that run, 4 free"
    assert (third["num_ahead"], third["num_blocks_needed"]) == (1, 1)
    assert third["reason"] == "waiting: 1 request ahead"
    assert third["estimated_start_s"] is None  # nobody has left a queue yet


@pytest.mark.parametrize(
    ("places", "taken"), [(1, "the only place of {} is taken"), (2, "all 2 places of {} are taken")]
)
def test_taken_places_are_named(stage: Stage, places: int, taken: str) -> None:
    assert stage.configure(max_num_seqs=places).status_code == 200
    for name in "abc"[:places]:
        stage.send(name, name)
    stage.step()
    stage.send("late", "d")
    (late,) = stage.choices("late")
    assert late["reason"] == "waiting: " + taken.format("--max-num-seqs")


def test_the_start_is_estimated_at_the_rate_of_the_queue(stage: Stage) -> None:
    stage.configure(max_num_seqs=1)
    stage.send("a", "a", max_tokens=2)
    stage.step()
    stage.send("b", "b")
    stage.step(3)
    stage.send("c", "c")
    (waiting,) = stage.choices("c")
    assert waiting["estimated_start_s"] is not None
    assert waiting["reason"].endswith(f"estimated start in {waiting['estimated_start_s']:.1f} s")


def test_nothing_in_the_way_means_one_of_the_next_steps(stage: Stage) -> None:
    for name in ("a", "b"):  # each starts at once, so that no queue has a rate
        stage.send(name, name)
        stage.step()
    stage.send("c", "ccc")
    (waiting,) = stage.choices("c")
    assert (waiting["num_blocks_needed"], waiting["num_ahead"]) == (1, 0)
    assert "starts in one of the next steps" in waiting["reason"]
    opened = stage.engine.core.log.steps
    assert waiting["estimated_start_s"] <= max(s.execute_s + s.update_s for s in opened) + 1e-3


def test_a_preempted_request_keeps_its_progress(stage: Stage) -> None:
    stage.configure(preemption_mode="recompute")
    stage.send("old", "a" * 12, max_tokens=20)
    stage.send("young", "b" * 12, max_tokens=12)
    while not (young := stage.choices("young")[0])["num_preemptions"]:
        stage.step()
    assert young["status"] == "preempted"
    assert young["num_computed_tokens"] == 0
    assert young["num_generated_tokens"] > 1
    assert young["reason"].startswith("preempted: ")


def test_a_request_has_one_shape_and_the_walls_clock_in_every_state(stage: Stage) -> None:
    stage.configure(max_num_seqs=1)
    before = datetime.now(UTC)
    first = stage.send("first", "a" * 5, max_tokens=3)
    stage.step()
    stage.send("second", "b" * 5)
    (running,), (waiting,) = stage.choices("first"), stage.choices("second")
    stage.finish(first)
    (ended,) = stage.choices("first")

    assert running.keys() == waiting.keys() == ended.keys() == ChoiceState.model_fields.keys()
    for choice in (running, waiting, ended):
        ChoiceState.model_validate(choice)
    assert (waiting["started_at"], waiting["finished_at"]) == (None, None)
    assert (waiting["finish_reason"], running["finish_reason"]) == (None, None)
    assert (ended["reason"], ended["finish_reason"]) == (None, "length")
    assert (ended["num_generated_tokens"], ended["max_tokens"]) == (3, 3)
    moments = [ended[f"{what}_at"] for what in ("arrived", "started", "first_token", "finished")]
    times = [datetime.fromisoformat(moment) for moment in moments]
    assert times == sorted(times)
    margin = timedelta(seconds=1)  # of two clocks that are read apart
    assert before - margin <= times[0] <= times[-1] <= datetime.now(UTC) + margin
    assert ended["age_s"] == pytest.approx((times[-1] - times[0]).total_seconds(), abs=0.01)


def test_both_ids_that_a_client_has_are_known_also_afterwards(stage: Stage) -> None:
    answer = stage.send("mine/1", "a" * 5, max_tokens=3, n=2)
    response_id = stage.finish(answer).json()["id"]
    assert response_id == "cmpl-mine/1"
    for request_id in ("mine/1", response_id):
        choices = stage.choices(request_id)
        assert [choice["id"] for choice in choices] == ["cmpl-mine/1-0", "cmpl-mine/1-1"]
        assert [choice["status"] for choice in choices] == ["finished"] * 2
        assert [choice["num_generated_tokens"] for choice in choices] == [3, 3]
    assert [choice["id"] for choice in stage.choices("cmpl-mine/1-1")] == ["cmpl-mine/1-1"]


def test_an_id_that_ends_like_a_choices_is_not_its_neighbours(stage: Stage) -> None:
    for name in ("job", "job-1"):
        stage.send(name, "a")
    assert [choice["id"] for choice in stage.choices("job")] == ["cmpl-job"]
    assert [choice["id"] for choice in stage.choices("job-1")] == ["cmpl-job-1"]


def test_a_stop_string_is_a_stop_and_no_abort(stage: Stage) -> None:
    text = stage.finish(stage.send("whole", "a" * 5, max_tokens=8)).json()["choices"][0]["text"]
    stage.http.post(
        "/v1/completions",
        json={"prompt": "a" * 5, "max_tokens": 8, "ignore_eos": True, "stop": text[:2]},
        headers={"x-request-id": "cut"},
    )
    wait_until(lambda: stage.choices("cut")[0]["status"] == "finished")
    assert stage.choices("cut")[0]["finish_reason"] == "stop"


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
    assert state["settings"]["max_num_seqs"] == 3
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
    assert answer.json()["max_num_batched_tokens"] == 5
    assert answer.json()["max_num_seqs"] == 3

    stage.send("first", "a" * 9, priority=-1)  # refused as long as the policy was fcfs
    stage.step(2)

    steps = stage.engine.core.log.steps
    assert [record.opened.num_tokens for record in steps] == [5, 4]


def test_settings_have_their_flags_names_and_units_wherever_they_are_told(stage: Stage) -> None:
    settings = stage.configure(target_itl_ms=29, step_order="prefill-first").json()
    assert (settings["target_itl_ms"], settings["step_order"]) == (29, "prefill-first")
    assert stage.get("/v1/scheduler/config") == settings
    assert settings.keys() == SchedulerSettings.model_fields.keys()
    told = stage.get("/v1/scheduler/state")["settings"]
    assert told == {
        **settings,
        "max_model_len": stage.server.engine.ready.max_model_len,
        "enable_chunked_prefill": True,
        "max_queue_time": None,
    }
    flags = {field.name for part in (SchedulerConfig, ModelConfig) for field in fields(part)}
    assert told.keys() <= flags
    assert stage.configure(target_itl_ms=None).json()["target_itl_ms"] is None


def test_what_the_config_answers_can_be_sent_back(stage: Stage) -> None:
    before = stage.get("/v1/scheduler/config")
    stage.configure(max_num_seqs=1, scheduling_policy="fair", max_num_queued_reqs=7)
    assert stage.configure(**before).json() == before == stage.get("/v1/scheduler/config")


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
        ({"max_num_queued_reqs": 10**30}, "max_num_queued_reqs"),
        ({"target_itl_ms": 0}, "target_itl_ms"),
        ({"target_itl_ms": "fast"}, "target_itl_ms"),
        ({"max_num_seqs": 2, "block_size": 8}, "block_size"),
        ({"name": "x"}, "name"),
    ],
)
def test_an_impossible_change_changes_nothing(
    stage: Stage, changes: dict[str, Any], param: str
) -> None:
    before = stage.get("/v1/scheduler/config")
    answer = stage.configure(**changes)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert stage.get("/v1/scheduler/config") == before


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
    for path in ("scheduler/state", "scheduler/config", "requests/x", "scheduler/trace"):
        assert stage.http.get(f"/v1/{path}").status_code == 503
