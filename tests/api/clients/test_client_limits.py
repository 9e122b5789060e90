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

from serve.api.clients import client_limits
from serve.api.clients.client import Client, ClientEntry
from serve.api.clients.client_limits import MAX_STRANGERS, SWEEP_INTERVAL_S, ClientLimits
from serve.api.clients.limits_file import LimitsFile, read_limits
from serve.config import ServerConfig
from serve.errors import ConfigError, InvalidRequest, RateLimited
from tests.api.answering.test_streaming import wait_until
from tests.api.conftest import Server, running_server
from tests.api.scripted import Script
from tests.api.test_scheduling_fields import last_added
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
        ("a: [", r"not valid YAML"),
    ],
)
def test_a_mistake_is_named_with_file_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"limits\.yaml.*{complaint}"):
        read_limits(written(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    ["[" * 20_000, "{a: " * 20_000, "default: 2024-99-99", "a: !!int ''", "? {a: b}\n: c",
     "a: !!bool x", "a: !!timestamp x", "a: \x00", "1" * 10_000, "a: *b"],
)  # fmt: skip
def test_sec_51_a_file_that_is_no_yaml_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"limits\.yaml") as refusal:
        read_limits(written(tmp_path, text))
    assert len(str(refusal.value)) < 500
    assert "\n" not in str(refusal.value)


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
    entry = ClientEntry(**limits)  # type: ignore[arg-type]
    return Client(name, label=name.upper(), limits=entry, account=name, is_known=False)


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


def test_what_a_request_may_generate_is_charged_when_it_comes() -> None:
    """Or any number could be let in at once, before the first of them has ended."""
    door, one = Door(), client(tokens_per_minute=100)
    leases = [door.limits.enter(one, 2, 10, max_tokens=20) for _ in range(2)]  # all there is
    with pytest.raises(RateLimited, match="used up if what runs generates all it may") as refusal:
        door.limits.enter(one, 1, 1, max_tokens=1)
    assert refusal.value.retry_after_s == 1
    door.limits.leave(leases[0], 1)  # 39 tokens come back
    for _ in range(2):  # 20 of them each
        door.limits.leave(door.limits.enter(one, 1, 10, max_tokens=100), 10)
    door.limits.leave(leases[1], 40)
    with pytest.raises(RateLimited, match=r"it is used up\. Try again in 2 s"):
        door.limits.enter(one, 1, 1, max_tokens=1)
    door.clock.advance(60)
    door.limits.enter(one, 1, 100_000, max_tokens=100_000)  # nothing is too large for ever


def test_without_max_tokens_the_charge_is_what_it_generated_of_late() -> None:
    door, one = Door(), client(tokens_per_minute=100)
    door.limits.leave(door.limits.enter(one, 1, 10), 30)
    door.clock.advance(60)
    for _ in range(3):  # 40 each
        door.limits.enter(one, 1, 10)
    with pytest.raises(RateLimited):
        door.limits.enter(one, 1, 10)


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
        may_generate = None if num_generated % 3 else num_generated + 5
        try:
            lease = door.limits.enter(one, 1, num_prompt, may_generate)
        except RateLimited as refusal:
            door.clock.advance(refusal.retry_after_s)  # what it says is enough
            lease = door.limits.enter(one, 1, num_prompt, may_generate)
        door.limits.leave(lease, num_generated)
        used += num_prompt + num_generated
        largest = max(largest, num_prompt + num_generated)
        assert used <= 120 + 2 * (door.clock.now - began) + largest + 1e-6


def test_sec_50_strangers_who_owe_nothing_are_forgotten_and_no_more_are_kept_than_so_many() -> None:
    door, sweeps = Door(), 0
    owing = client("owing", tokens_per_minute=60)
    door.limits.leave(door.limits.enter(owing, 1, 1_000_000), 0)
    for number in range(3 * MAX_STRANGERS):
        at_once = client(f"c{number}", requests_per_minute=2)
        door.limits.leave(door.limits.enter(at_once, 1, 1), 1)
        door.clock.advance(100 * (number % 100 == 0))
        sweeps += len(door.limits._strangers) < number
    assert len(door.limits._strangers) <= MAX_STRANGERS
    with pytest.raises(RateLimited):
        door.limits.enter(owing, 1, 1)
    assert sweeps


def test_sec_50_strangers_beyond_those_share_one_account_and_are_not_looked_through_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    door, looks = Door(), 0
    is_settled = client_limits._Usage.is_settled

    def counted(usage: client_limits._Usage, now: float) -> bool:
        nonlocal looks
        looks += 1
        return is_settled(usage, now)

    monkeypatch.setattr(client_limits._Usage, "is_settled", counted)
    for number in range(MAX_STRANGERS):
        door.limits.enter(client(f"c{number}", max_concurrent=1), 1, 1)
    late = door.limits.enter(client("late", max_concurrent=1), 1, 1)
    for number in range(1000):
        with pytest.raises(RateLimited):
            door.limits.enter(client(f"later{number}", max_concurrent=1), 1, 1)
    assert looks == MAX_STRANGERS
    known = Client("k", limits=ClientEntry(max_concurrent=1), account="k", is_known=True)
    door.limits.enter(known, 1, 1)  # who is known always has its own
    door.limits.leave(late, 1)
    door.clock.advance(SWEEP_INTERVAL_S)
    door.limits.enter(client("latest", max_concurrent=1), 1, 1)
    assert len(door.limits._strangers) <= MAX_STRANGERS + 1


def test_whom_nothing_limits_is_not_counted() -> None:
    door = Door()
    for number in range(10):
        door.limits.leave(door.limits.enter(client(f"c{number}"), 1, 1), 1)
    assert not door.limits._strangers


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
    return list(server.engine._streams._owed.values())


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


@pytest.mark.parametrize(
    ("text", "keys", "asked", "statuses"),
    [
        # One key, and users by the dozen: the key's limit holds.
        ("default: {requests_per_minute: 2}", ("k1",), "abc", [200, 200, 429]),
        ("clients: {k1: {requests_per_minute: 2}, a: {}}", ("k1",), "abac", [200, 200, 429, 429]),
        # A user that is named has its own, beside the key's others.
        (
            "default: {requests_per_minute: 1}\nclients: {a: {requests_per_minute: 2}}",
            ("k1",),
            "aabca",
            [200, 200, 200, 429, 429],
        ),
        # Two keys: the user says nothing.
        ("default: {requests_per_minute: 1}\nclients: {a: {}}", ("k1", "k2"), "ab", [200, 429]),
        # None: each user is taken at its word.
        ("default: {requests_per_minute: 1}", (), "abab", [200, 200, 429, 429]),
    ],
)  # fmt: skip
def test_sec_50_a_keys_limits_hold_whoever_user_says_it_is(
    tmp_path: Path, text: str, keys: tuple[str, ...], asked: str, statuses: list[int]
) -> None:
    with running_server(written(tmp_path, text, api_key=keys)) as server, server.http() as http:
        for user, status in zip(asked, statuses, strict=True):
            body = {"prompt": "one", "max_tokens": 1, "user": user}
            answer = http.post("/v1/completions", json=body, headers=key("k1"))
            assert answer.status_code == status, answer.text
        long = {"prompt": "one", "max_tokens": 1, "user": "u" * 100_000}
        http.post("/v1/completions", json=long, headers=key("k1"))
        assert len(last_added(server).client) <= 64
