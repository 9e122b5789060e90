"""Whose share a request counts to."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from serve.api.clients.client import ClientEntry, Clients
from serve.config import ServerConfig
from serve.errors import ConfigError
from tests.api.conftest import running_server
from tests.api.test_scheduling_fields import EVERY_API, last_added


@pytest.mark.parametrize("path", EVERY_API)
def test_with_several_keys_the_key_is_the_client_whatever_user_says(path: str) -> None:
    config = ServerConfig(api_key=("k1", "k2"), client_weight=("k2=4",))
    with running_server(config) as server, server.http() as http:
        seen = []
        for key, user in (("k1", "x"), ("k1", "y"), ("k2", "x")):
            headers = {"authorization": f"Bearer {key}"}
            http.post(path, json={**EVERY_API[path], "user": user}, headers=headers)
            seen.append((last_added(server).client, last_added(server).weight))
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[2][0]
    assert [weight for _, weight in seen] == [1.0, 1.0, 4.0]
    assert "k1" not in seen[0][0]


def test_without_keys_the_user_is_the_client() -> None:
    config = ServerConfig(client_weight=("team=a=2.5",))
    with running_server(config) as server, server.http() as http:
        for path, body in EVERY_API.items():
            named = (
                {"metadata": {"user_id": "team=a"}} if "messages" in path else {"user": "team=a"}
            )
            assert http.post(path, json={**body, **named}).status_code == 200
            added = last_added(server)
            assert (added.client, added.weight) == ("team=a", 2.5)


@pytest.mark.parametrize("pair", ["a", "a=0", "a=-1", "=2", "a=x", "a=inf", "a=nan"])
def test_a_weight_that_is_none_is_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match="--client-weight"):
        ServerConfig(client_weight=(pair,))


@pytest.mark.parametrize(
    ("keys", "user", "is_known"),
    [
        ((), None, False),
        ((), "a", False),
        ((), "b", True),
        (("k",), "a", True),
        (("k",), None, True),
    ],
)
def test_only_who_the_operator_named_is_no_stranger(
    keys: tuple[str, ...], user: str | None, is_known: bool
) -> None:
    clients = Clients(ServerConfig(api_key=keys), ClientEntry(), {"b": ClientEntry(weight=2)})
    headers = Headers({"authorization": "Bearer k"} if keys else {})
    assert clients.of(headers, user).is_known is is_known
