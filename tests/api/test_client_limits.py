"""`--limits-file`: what it may say, and that clients are held to it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.api.client_limits import MAX_IDLE_CLIENTS, ClientLimits
from serve.api.clients import Client
from serve.api.limits_file import ClientEntry, LimitsFile, read_limits
from serve.config import ServerConfig
from serve.errors import ConfigError, InvalidRequest, RateLimited
from tests.api.conftest import Server, running_server
from tests.api.scripted import Script
from tests.api.test_scheduling_fields import last_added
from tests.api.test_streaming import wait_until
from tests.fakes import FakeClock


def written(folder: Path, text: str, **settings: object) -> ServerConfig:
    path = folder / "limits.yaml"
    path.write_text(text)
    return ServerConfig(limits_file=str(path), **settings)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------- the file


def test_a_named_client_takes_from_the_default_what_it_leaves_out(tmp_path: Path) -> None:
    text = "default: {max_concurrent: 3, weight: 2}\nclients: {a: {max_concurrent: 5}, 7: {}}"
    with pytest.raises(ConfigError, match=r"clients\.7"):  # YAML's 7 is no key that a client sends
        read_limits(written(tmp_path, text))
    limits = read_limits(written(tmp_path, text.replace("7", "'7'")))
    assert limits.entry_of("a") == ClientEntry(max_concurrent=5, weight=2)
    assert limits.entry_of("7") == limits.entry_of("b") == limits.default


def test_without_a_file_or_in_an_empty_one_there_are_no_limits(tmp_path: Path) -> None:
    assert read_limits(ServerConfig()) == LimitsFile()
    assert read_limits(written(tmp_path, "# nothing\n")) == LimitsFile()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("default: {max_concurrent: 0}", r"default\.max_concurrent: .*greater than or equal to 1"),
        ("default: {max_concurrent: two}", r"default\.max_concurrent"),
        ("clients: {a: {tokens_per_minute: -1}}", r"clients\.a\.tokens_per_minute"),
        ("clients: {a: {tokens_per_minute: .inf}}", r"clients\.a\.tokens_per_minute"),
        ("clients: {a: {weight: 0}}", r"clients\.a\.weight"),
        ("clients: {a: {tokens_per_hour: 5}}", r"clients\.a\.tokens_per_hour: Extra"),
        ("keys: {}", r"keys: Extra"),
        ("clients: [a]", r"clients"),
        ("- a", r"the file"),
        ("a: [", r"not YAML"),
    ],
)
def test_a_mistake_is_named_with_file_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"limits\.yaml.*{complaint}"):
        read_limits(written(tmp_path, text))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="/no/such"):
        read_limits(ServerConfig(limits_file="/no/such"))


def test_a_weight_is_said_in_one_place(tmp_path: Path) -> None:
    config = written(tmp_path, "clients: {a: {weight: 2}}", client_weight=("a=3",))
    with pytest.raises(ConfigError, match=r"clients\.a\.weight is also given by --client-weight"):
        read_limits(config)


# ---------------------------------------------------------------------------- counting


class Door:
    """ClientLimits with a clock, and what it refused."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.refused: list[tuple[str, str]] = []
        self.limits = ClientLimits(lambda *refusal: self.refused.append(refusal), self.clock)


def client(name: str = "a", **limits: float) -> Client:
    return Client(name, label=name.upper(), limits=ClientEntry(**limits))  # type: ignore[arg-type]


def test_generations_beyond_the_limit_are_refused_until_one_ends() -> None:
    door, one = Door(), client(max_concurrent=2)
    first = door.limits.enter(one, 1, 10)
    door.limits.enter(one, 1, 10)
    with pytest.raises(RateLimited, match="limit of A is reached: max_concurrent is 2"):
        door.limits.enter(one, 1, 10)
    door.limits.enter(client("b", max_concurrent=2), 2, 10)  # another's are another's
    door.limits.leave(first, 5)
    door.limits.leave(first, 5)  # twice is once
    door.limits.enter(one, 1, 10)
    with pytest.raises(RateLimited):
        door.limits.enter(one, 1, 10)
    assert door.refused == [("A", "max_concurrent")] * 2


def test_what_could_never_be_let_in_is_no_matter_of_waiting() -> None:
    with pytest.raises(InvalidRequest, match="3 completions at once") as refusal:
        Door().limits.enter(client(max_concurrent=2), 3, 10)
    assert refusal.value.param == "n"


def test_tokens_are_owed_and_the_refusal_says_until_when() -> None:
    door, one = Door(), client(tokens_per_minute=60)
    door.limits.leave(door.limits.enter(one, 1, 50), 40)  # 30 more than there were
    with pytest.raises(RateLimited, match="tokens_per_minute is 60") as refusal:
        door.limits.enter(one, 1, 1)
    assert refusal.value.retry_after_s == 31
    door.clock.advance(refusal.value.retry_after_s - 2)
    with pytest.raises(RateLimited):
        door.limits.enter(one, 1, 1)
    door.clock.advance(2)
    door.limits.enter(one, 1, 1)


def test_requests_are_counted_even_if_they_are_small() -> None:
    door, one = Door(), client(requests_per_minute=2)
    for _ in range(2):
        door.limits.leave(door.limits.enter(one, 1, 1), 0)
    with pytest.raises(RateLimited, match="requests_per_minute is 2") as refusal:
        door.limits.enter(one, 1, 1)
    assert refusal.value.retry_after_s == 30
    assert door.refused == [("A", "requests_per_minute")]


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 90), st.integers(0, 90)), max_size=60))
def test_nobody_uses_more_than_the_rate_and_one_request(
    requests: list[tuple[float, int, int]],
) -> None:
    door, one, used, largest = Door(), client(tokens_per_minute=120), 0, 0
    began = door.clock.now
    for pause, num_prompt, num_generated in requests:
        door.clock.advance(pause)
        try:
            lease = door.limits.enter(one, 1, num_prompt)
        except RateLimited as refusal:
            door.clock.advance(refusal.retry_after_s)  # what it says is enough
            lease = door.limits.enter(one, 1, num_prompt)
        door.limits.leave(lease, num_generated)
        used += num_prompt + num_generated
        largest = max(largest, num_prompt + num_generated)
        assert used <= 120 + 2 * (door.clock.now - began) + largest + 1e-6


def test_settled_clients_are_forgotten_when_there_are_many() -> None:
    door = Door()
    owing = client("owing", tokens_per_minute=60)
    door.limits.leave(door.limits.enter(owing, 1, 10_000), 0)
    for number in range(3 * MAX_IDLE_CLIENTS):
        door.limits.leave(door.limits.enter(client(f"c{number}"), 1, 1), 1)
    assert len(door.limits._usage) <= MAX_IDLE_CLIENTS
    with pytest.raises(RateLimited):
        door.limits.enter(owing, 1, 1)


# ---------------------------------------------------------------------------- over HTTP

PATHS = {
    "/v1/completions": {"prompt": "one two", "max_tokens": 9},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one"}], "max_tokens": 9},
    "/v1/responses": {"input": "one two", "max_output_tokens": 9},
    "/v1/messages": {"messages": [{"role": "user", "content": "one"}], "max_tokens": 9},
}


@contextmanager
def limited(folder: Path, text: str) -> Iterator[tuple[Server, httpx.Client, ThreadPoolExecutor]]:
    config = written(folder, text, api_key=("k1", "k2"))
    with (
        running_server(config) as server,
        server.http() as http,
        ThreadPoolExecutor(4) as senders,
    ):
        yield server, http, senders


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


@pytest.mark.parametrize("path", PATHS)
def test_a_client_at_its_limit_is_told_which_and_when_to_come_back(
    tmp_path: Path, path: str
) -> None:
    text = "clients: {k1: {name: team-a, max_concurrent: 1}}"
    with limited(tmp_path, text) as (server, http, senders):
        server.script = Script(server.ids(" one two"), hold_after=1)
        body = {**PATHS[path], "stream": True}
        with http.stream("POST", path, json=body, headers=key("k1")) as first:
            assert first.status_code == 200
            refused = http.post(path, json=PATHS[path], headers=key("k1"))
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "team-a is reached: max_concurrent is 1" in refused.json()["error"]["message"]
            other = senders.submit(http.post, path, json=PATHS[path], headers=key("k2"))
            wait_until(lambda: len(server.client.running) == 2)
            server.script = Script(server.ids(" one"))
            metrics = http.get("/metrics", headers=key("k2")).text
        wait_until(lambda: len(server.client.running) == 1)  # the first was left, and is over
        again = http.post(path, json=PATHS[path], headers=key("k1"))
        assert again.status_code == 200
        server.on_loop(lambda: server.engine.abort({s.label for s in _streams(server)}))
        assert other.result(20).status_code == 499
    (line,) = [m for m in metrics.splitlines() if m.startswith("serve_llm_client_limit_refusals")]
    assert 'client="team-a"' in line
    assert 'limit="max_concurrent"' in line
    assert line.endswith(" 1.0")
    assert "k1" not in metrics


def _streams(server: Server) -> list[object]:
    return list(server.engine._expecting.values())


def test_used_up_tokens_are_a_429_in_the_words_of_the_api(tmp_path: Path) -> None:
    text = "default: {tokens_per_minute: 12}"
    with limited(tmp_path, text) as (server, http, _):
        server.script = server.ids(" one two three four" * 10)
        body = {"prompt": "one two", "max_tokens": 30, "ignore_eos": True}
        assert http.post("/v1/completions", json=body, headers=key("k1")).status_code == 200
        refused = http.post("/v1/completions", json=body, headers=key("k1"))
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 60  # it owes more than a minute's worth
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "tokens_per_minute is 12" in refused.json()["error"]["message"]
        assert http.post("/v1/completions", json=body, headers=key("k2")).status_code == 200


def test_a_weight_in_the_file_is_the_share_of_the_fair_policy(tmp_path: Path) -> None:
    with limited(tmp_path, "default: {weight: 0.5}\nclients: {k1: {weight: 4}}") as opened:
        server, http, _ = opened
        weights = []
        for name in ("k1", "k2"):
            http.post("/v1/completions", json={"prompt": "one"}, headers=key(name))
            weights.append(last_added(server).weight)
    assert weights == [4.0, 0.5]


def test_a_refused_request_uses_nothing(tmp_path: Path) -> None:
    with limited(tmp_path, "default: {requests_per_minute: 1, max_concurrent: 1}") as opened:
        _, http, _ = opened
        long = {"prompt": "one " * 2000}
        for _ in range(3):
            assert http.post("/v1/completions", json=long, headers=key("k1")).status_code == 400
        assert (
            http.post("/v1/completions", json={"prompt": "one"}, headers=key("k1")).status_code
            == 200
        )
