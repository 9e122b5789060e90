"""The routes about the server itself."""

from __future__ import annotations

from dataclasses import replace

import httpx
import openai
import pytest

from serve import __version__
from serve.messages import AddRequest
from tests.api.answering.test_streaming import open_request, wait_until
from tests.api.conftest import MODEL, Server, running_server
from tests.api.scripted import Script


def test_health_and_ping_tell_that_the_engine_lives(http: httpx.Client) -> None:
    for asked in ("GET /health", "GET /ready", "GET /ping", "POST /ping"):
        response = http.request(*asked.split())
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_who_is_leaving_is_not_ready_but_still_answers() -> None:
    with running_server() as server, server.http() as http:
        server.engine.is_leaving = True
        ready, health = http.get("/ready"), http.get("/health")
        answer = http.post("/v1/completions", json={"prompt": "a"})
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "shutting_down")
    assert (health.status_code, answer.status_code) == (200, 200)


def test_ops_01_health_and_every_request_say_503_once_the_engine_is_dead() -> None:
    with running_server() as server, server.http() as http:
        server.on_loop(lambda: server.client.die("out of memory"))
        wait_until(lambda: server.engine.dead_reason is not None)
        hi = [{"role": "user", "content": "a"}]
        answers = [
            http.get("/health"),
            http.get("/ping"),
            http.post("/v1/completions", json={"prompt": "a"}),
            http.post("/v1/completions", json={"prompt": "a", "stream": True}),
            http.post("/v1/chat/completions", json={"messages": hi}),
        ]
        models = http.get("/v1/models")

    assert [answer.status_code for answer in answers] == [503] * 5
    assert all("out of memory" in answer.json()["error"]["message"] for answer in answers)
    assert models.status_code == 200


def test_sec_51_head_is_answered_wherever_get_is(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    paths = [path for path, methods in document["paths"].items() if "get" in methods]
    assert len(paths) > 8
    for path in [*paths, "/openapi.json", "/docs", "/nope", "/v1/completions"]:
        path = path.replace("{name}", MODEL)
        if "scheduler" in path or "{" in path or "pin" in path:  # the scripted engine has none
            continue
        get, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        assert head.headers["content-type" if get.content else "x-request-id"], path
    assert http.head("/v1/completions").headers["allow"] == "POST"


def test_sec_48_an_engine_that_shows_no_life_is_not_healthy(
    http: httpx.Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.client, "silent_s", 100.0)
    hi = [{"role": "user", "content": "a"}]
    answers = [
        http.get("/health"),
        http.get("/ping"),
        http.post("/v1/completions", json={"prompt": "a"}),
        http.post("/v1/messages", json={"messages": hi, "max_tokens": 1}),
    ]
    assert [answer.status_code for answer in answers] == [503] * 4
    assert answers[0].json()["error"]["code"] == "engine_not_responding"
    assert "--engine-timeout" in answers[0].json()["error"]["message"]
    monkeypatch.undo()
    assert http.get("/health").status_code == 200
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_server_that_shuts_down_says_so_and_when_to_come_back() -> None:
    with running_server() as server, server.http() as http:
        server.on_loop(lambda: setattr(server.engine, "_draining", True))
        for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}):
            refused = http.post("/v1/completions", json=body)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert int(refused.headers["retry-after"]) > 0
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_is_logged_as_failed(
    http: httpx.Client, server: Server, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    for script, word in (
        (Script([1, 2], fail_after=1), "failed (step_failed)"),
        (Script([], refuse_for_s=3), "failed (queue_full)"),
        (Script([1]), "done"),
    ):
        server.script = script
        caplog.clear()
        with caplog.at_level("INFO", "serve"):
            http.post("/v1/completions", json={"prompt": "a", "stream": stream})
            wait_until(lambda: any("generated tokens" in line for line in caplog.messages))
        (line,) = [line for line in caplog.messages if "generated tokens" in line]
        assert f", {word}, " in line


def test_the_version_is_told(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": __version__}


def test_models_are_listed_under_each_name(client: openai.OpenAI) -> None:
    models = client.models.list().data

    assert [model.id for model in models] == [MODEL, "alias"]
    assert client.models.retrieve("alias").id == "alias"
    assert models[0].model_extra["max_model_len"] == 512


def test_a_model_name_may_hold_slashes() -> None:
    with running_server() as server, server.http() as http:
        names = ("org/model", "/a/path/to it")
        object.__setattr__(server.engine.model, "names", names)
        assert http.get("/v1/models/org/model").json()["id"] == "org/model"
        assert http.get("/v1/models//a/path/to%20it").json()["id"] == "/a/path/to it"


@pytest.mark.parametrize("model", ["nope", "", "x" * 10_000])
def test_ops_05_an_unknown_model_is_a_404(http: httpx.Client, model: str) -> None:
    for path, fields in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        response = http.post(path, json={"model": model, **fields})
        assert response.status_code == 404
        assert response.json()["error"]["param"] == "model"
        assert response.json()["error"]["code"] == "model_not_found"
        assert len(response.content) < 1000


def test_ops_05_openais_client_raises_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nope", prompt="a")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_ops_05_no_model_means_the_first_name(http: httpx.Client) -> None:
    for fields in ({}, {"model": None}):
        answer = http.post("/v1/completions", json={"prompt": "a", **fields})
        assert answer.json()["model"] == MODEL
    assert (
        http.post("/v1/completions", json={"prompt": "a", "model": "alias"}).json()["model"]
        == "alias"
    )


def test_load_counts_the_open_requests(http: httpx.Client, server: Server) -> None:
    assert http.get("/load").json() == {"server_load": 0}
    server.script = Script([1], hold_after=1)
    connections = [open_request(server, "/v1/completions", {"prompt": "a"}) for _ in range(3)]
    wait_until(lambda: http.get("/load").json() == {"server_load": 3})
    for connection in connections:
        connection.close()
    wait_until(lambda: http.get("/load").json() == {"server_load": 0})


def test_an_unforeseen_error_is_answered_with_the_headers_of_any_answer(
    http: httpx.Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise KeyError("a secret")

    monkeypatch.setattr(server.engine, "begin", fails)
    response = http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine"})

    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "mine"


def test_every_answer_carries_a_request_id(http: httpx.Client, server: Server) -> None:
    own = [http.get(path).headers["x-request-id"] for path in ("/health", "/nope", "/health")]
    assert len(set(own)) == 3
    given = http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    assert given.json()["id"] == "cmpl-mine-1"
    label = next(m for m in reversed(server.client.received) if isinstance(m, AddRequest))
    assert label.request_id != "mine-1"  # the engine's own id is its own
    for unusable in ("x" * 129, "a b", ""):
        response = http.get("/health", headers={"x-request-id": unusable})
        assert response.headers["x-request-id"] != unusable


def test_the_fingerprint_is_of_the_engine_and_of_what_sampling_begins_with(
    http: httpx.Client, server: Server
) -> None:
    def fingerprint() -> str:
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()
        return str(answer["system_fingerprint"])

    engine = server.engine
    ready, model, plain = engine.ready, engine.model, fingerprint()
    assert fingerprint() == plain
    try:
        engine.ready = replace(ready, identity="other weights")
        other_engine = fingerprint()
        engine.ready, engine.model = ready, replace(model, generation_defaults={"top_k": 3})
        assert len({plain, other_engine, fingerprint()}) == 3
    finally:
        engine.ready, engine.model = ready, model
