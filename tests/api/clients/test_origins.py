"""What web pages can do to a server through their visitors' browsers: what they are allowed."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from starlette.datastructures import Headers

from serve.api.clients.origins import CONTROL_PATHS, allowed_hosts, comes_from_elsewhere
from serve.config import ServerConfig
from tests.api.conftest import Server, running_server

PAGE = "https://page.example"
FRIEND = "https://friend.example"


@pytest.fixture(scope="module")
def open_http() -> Iterator[httpx.Client]:
    """A server open to all pages, and by name to one."""
    config = ServerConfig(allowed_origins=("*", FRIEND + "/"), allowed_hosts=("*",))
    with running_server(config) as server, server.http() as http:
        yield http


def simple_post(http: httpx.Client, path: str, **headers: str) -> httpx.Response:
    """What any page can send without asking: `fetch(url, {method: "POST", body: "…"})`."""
    text = b'{"prompt": "one", "max_tokens": 1, "request_ids": ["a"]}'
    return http.post(path, content=text, headers={"content-type": "text/plain", **headers})


def routes(http: httpx.Client) -> list[tuple[str, str]]:
    paths = http.get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


@pytest.mark.parametrize("origin", [PAGE, "null", "http://localhost:1", "http://127.0.0.1", "x"])
def test_a_page_of_another_origin_can_change_nothing_and_look_at_nothing(
    http: httpx.Client, server: Server, origin: str
) -> None:
    received = len(server.client.received)
    tried = [
        (method, path)
        for method, path in routes(http)
        if method not in ("GET", "HEAD") or path.startswith(CONTROL_PATHS)
    ]
    some = {"/v1/chat/completions", "/abort_requests", "/v1/scheduler/trace"}
    assert some <= {path for _, path in tried}
    for method, path in tried:
        headers = {"origin": origin, "content-type": "text/plain"}
        answer = http.request(method, path, content=b'{"prompt": "one"}', headers=headers)
        assert answer.status_code == 403, path
        error = answer.json()["error"]
        wanted = "permission_error" if path.startswith("/v1/messages") else "origin_not_allowed"
        assert wanted in (error.get("code"), error["type"])
        assert "--allowed-origins" in error["message"]
        assert "access-control-allow-origin" not in answer.headers
    assert len(server.client.received) == received


def test_a_preflight_of_another_origin_is_refused_and_reading_gets_no_permission(
    http: httpx.Client,
) -> None:
    asks = {"origin": PAGE, "access-control-request-method": "POST"}
    assert http.options("/v1/completions", headers=asks).status_code == 403
    read = http.get("/v1/models", headers={"origin": PAGE})
    assert read.status_code == 200
    assert not [name for name in read.headers if name.startswith("access-control")]


def test_programs_and_pages_of_the_servers_own_may_do_all(
    http: httpx.Client, server: Server
) -> None:
    own = f"http://127.0.0.1:{server.port}"
    body = {"prompt": "one", "max_tokens": 1}
    for headers in (
        {},
        {"origin": own},
        {"origin": own.upper()},
        # Behind a proxy that sends its own name for the server's.
        {"origin": "https://llm.example", "sec-fetch-site": "same-origin"},
        {"origin": "null", "sec-fetch-site": "none"},
    ):
        answer = http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, headers


@pytest.mark.parametrize(
    ("headers", "is_foreign"),
    [
        ({"host": "a:1"}, False),
        ({"host": "a:1", "origin": "http://a:1"}, False),
        ({"host": "a:1", "origin": "http://a:2"}, True),
        ({"host": "a", "origin": "http://a.b"}, True),
        ({"host": "", "origin": "null"}, True),
        ({"origin": "null"}, True),
        ({"host": "a", "origin": "http://["}, True),
        ({"host": "a", "sec-fetch-site": "cross-site"}, True),
        ({"host": "a", "sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}, True),
        ({"host": "a", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, False),
        ({"host": "a", "origin": "http://b", "sec-fetch-mode": "navigate"}, True),
    ],
)
def test_whose_page_it_is(headers: dict[str, str], is_foreign: bool) -> None:
    assert comes_from_elsewhere(Headers(headers)) is is_foreign


def test_a_star_opens_the_api_and_a_name_the_controls_too(open_http: httpx.Client) -> None:
    answer = simple_post(open_http, "/tokenize", origin=PAGE)
    assert answer.status_code == 415  # let in, and refused for what it is
    assert answer.headers["access-control-allow-origin"] == "*"
    refused = simple_post(open_http, "/abort_requests", origin=PAGE)
    assert refused.status_code == 403
    assert "by name" in refused.json()["error"]["message"]
    assert refused.headers["access-control-allow-origin"] == "*"  # so that the page can read why
    assert simple_post(open_http, "/abort_requests", origin=FRIEND).status_code == 415
    preflight = {"origin": PAGE, "access-control-request-method": "POST"}
    assert open_http.options("/v1/completions", headers=preflight).status_code == 200


def test_an_unforeseen_error_can_be_read_by_the_page_that_met_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise KeyError("a secret")

    with running_server(ServerConfig(allowed_origins=(PAGE,))) as server, server.http() as http:
        monkeypatch.setattr(server.engine, "begin", fails)
        answer = http.post("/v1/completions", json={"prompt": "a"}, headers={"origin": PAGE})
        bad = http.get("/v1/models", headers={"origin": FRIEND})
    assert answer.status_code == 500
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "access-control-allow-origin" not in bad.headers


@pytest.mark.parametrize(
    "host", ["page.example", "page.example:80", "localhost.page.example", "[::2]:8", "0.0.0.0"]
)
def test_a_name_that_points_here_opens_nothing(http: httpx.Client, host: str) -> None:
    for path in ("/v1/models", "/health", "/v1/scheduler/state"):
        answer = http.get(path, headers={"host": host, "sec-fetch-site": "same-origin"})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert "--allowed-hosts" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9", "127.0.0.1:9", "[::1]", "[::1]:9"])
def test_the_names_of_this_machine_open_it(
    http: httpx.Client, open_http: httpx.Client, host: str
) -> None:
    assert http.get("/health", headers={"host": host}).status_code == 200
    assert open_http.get("/health", headers={"host": "any.example"}).status_code == 200


def test_which_names_are_answered() -> None:
    assert allowed_hosts(ServerConfig(host="::1")) is not None
    assert "127.0.0.9" in (allowed_hosts(ServerConfig(host="127.0.0.9")) or ())
    assert allowed_hosts(ServerConfig(host="localhost")) is not None
    assert allowed_hosts(ServerConfig(host="0.0.0.0")) is None
    assert allowed_hosts(ServerConfig(host="llm.example")) is None
    assert allowed_hosts(ServerConfig(api_key=("k",))) is None
    assert allowed_hosts(ServerConfig(api_key=("k",), allowed_hosts=("a",))) == ("a",)
    assert allowed_hosts(ServerConfig(allowed_hosts=("*",))) is None
