"""API keys, and what is open without one."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from starlette.datastructures import Headers

from serve.api.clients.auth import OPEN_PATHS, controls_the_server
from serve.api.clients.client import presented_key
from serve.config import ServerConfig
from tests.api.conftest import Server, running_server

KEYS = ("first-key", "zweiter-schlüssel")


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with running_server(ServerConfig(api_key=KEYS, allowed_origins=("*",))) as server:
        yield server


@pytest.fixture(scope="module")
def visitor(guarded: Server) -> Iterator[httpx.Client]:
    with guarded.http() as http:
        yield http


def bearer(key: str) -> dict[str, bytes]:
    return {"authorization": f"Bearer {key}".encode()}


def test_ops_04_every_route_but_the_harmless_ones_needs_a_key(
    guarded: Server, visitor: httpx.Client
) -> None:
    document = visitor.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method in operations:
            response = visitor.request(method, path.replace("{name}", "x"), json={})
            if path in OPEN_PATHS:
                assert response.status_code == 200, path
            else:
                assert response.status_code == 401, path
                anthropic = path.startswith("/v1/messages")
                name, kind = (
                    ("type", "authentication_error") if anthropic else ("code", "invalid_api_key")
                )
                assert response.json()["error"][name] == kind
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.headers["x-request-id"]
    assert {"/v1/chat/completions", "/tokenize", "/metrics", "/load"} <= set(document["paths"])


@pytest.mark.parametrize(
    "path", ["//v1/completions", "/V1/completions", "/v1/completions/", "/health/", "/nope", "/"]
)
def test_ops_04_odd_spellings_of_a_path_are_closed_too(visitor: httpx.Client, path: str) -> None:
    assert visitor.post(path, json={"prompt": "a"}).status_code == 401


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_ops_04_each_key_opens(visitor: httpx.Client, key: str, scheme: str) -> None:
    headers = {"authorization": f"{scheme} {key}".encode()}

    assert visitor.get("/v1/models", headers=headers).status_code == 200
    assert visitor.get("/v1/models", headers={"x-api-key": key.encode()}).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    ["Bearer wrong", "Bearer", "first-key", "Basic first-key", "Bearer first-key x",
     "Bearer FIRST-KEY", "Bearer first-ke", "Bearer \xff"],
)  # fmt: skip
def test_ops_04_other_keys_do_not(visitor: httpx.Client, authorization: str) -> None:
    headers = {"authorization": authorization.encode("latin-1")}

    assert visitor.get("/v1/models", headers=headers).status_code == 401


def test_ops_04_spaces_around_the_key_are_not_part_of_it() -> None:
    for value in (b"Bearer key ", b"bearer   key", b"Bearer key\t"):
        assert presented_key(Headers(raw=[(b"authorization", value)])) == "key"


def test_ops_04_a_preflight_needs_no_key(visitor: httpx.Client) -> None:
    headers = {
        "origin": "https://example.org",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }

    preflight = visitor.options("/v1/chat/completions", headers=headers)
    refused = visitor.post("/v1/completions", json={}, headers={"origin": "https://example.org"})

    assert preflight.status_code in (200, 204)
    assert preflight.headers["access-control-allow-origin"] == "*"
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "*"  # so that the page can read why


def test_ops_04_the_key_is_never_logged(
    visitor: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG"):
        visitor.post("/v1/completions", json={"prompt": "a"}, headers=bearer("first-key"))
        visitor.get("/v1/models", headers=bearer("a-wrong-key"))

    assert "first-key" not in caplog.text
    assert "a-wrong-key" not in caplog.text


def test_metrics_can_be_opened() -> None:
    config = ServerConfig(api_key=KEYS, public_metrics=True)
    with running_server(config) as server, server.http() as http:
        assert http.get("/metrics").status_code == 200
        assert http.get("/load").status_code == 401


CONTROLS = (
    ("POST", "/abort_requests"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/v1/scheduler/config"),
    ("GET", "/v1/prefix_cache/pin"),
    ("POST", "/v1/prefix_cache/pin"),
    ("DELETE", "/v1/prefix_cache/pin/pin-1"),
)
ANSWERED = (CONTROLS[0], CONTROLS[2], CONTROLS[4])  # a bad body's 400 needs no engine
ORDINARY = (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/metrics"))


def statuses(http: httpx.Client, routes: tuple[tuple[str, str], ...], key: str) -> set[int]:
    return {http.request(m, path, json=[], headers=bearer(key)).status_code for m, path in routes}


def test_what_controls_the_server_needs_an_admin_key_where_there_is_one() -> None:
    config = ServerConfig(api_key=("planted",), admin_api_key=("planted-admin", "another"))
    with running_server(config) as server, server.http() as http:
        assert statuses(http, CONTROLS, "planted") == {403}
        refused = http.post("/abort_requests", json={}, headers=bearer("planted"))
        assert refused.json()["error"]["code"] == "admin_key_required"
        assert "planted" not in refused.text
        assert statuses(http, CONTROLS, "wrong") == statuses(http, ORDINARY, "wrong") == {401}
        assert statuses(http, ORDINARY, "planted") == {200, 400}
        for key in config.admin_api_key:
            assert statuses(http, ANSWERED, key) == {400}
            assert statuses(http, ORDINARY, key) == {200, 400}


def test_an_admin_key_alone_closes_the_controls_and_nothing_else() -> None:
    with running_server(ServerConfig(admin_api_key=("planted",))) as server, server.http() as http:
        assert statuses(http, CONTROLS, "any") == {401}
        assert statuses(http, ORDINARY, "any") == {200, 400}
        assert statuses(http, ANSWERED, "planted") == {400}
        odd = ("/abort_requests/", "/reset_prefix_cache?x=1", "/abort%5frequests")
        assert {http.post(path, json=[]).status_code for path in odd} == {401}
    for method, closed in (("GET", False), ("HEAD", False), ("POST", True), ("PUT", True)):
        scope = {"type": "http", "method": method, "path": "/v1/scheduler/config"}
        assert controls_the_server(scope) is closed


def test_every_route_that_is_tagged_as_control_is_closed_to_ordinary_keys(
    visitor: httpx.Client,
) -> None:
    document = visitor.get("/openapi.json").json()
    found = {
        (method.upper(), path.replace("{pin_id}", "pin-1"))
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if operation["tags"][0] in {"control", "prefix cache"}
        or (operation["tags"][0] == "scheduler" and method != "get")
    }
    assert found == set(CONTROLS)
