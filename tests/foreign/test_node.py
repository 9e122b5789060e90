"""JavaScript clients work unchanged, over a scripted engine and over a real one."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import ANSWER, MODEL, running_server
from tests.e2e.server_process import ServerProcess

SCRIPT = Path(__file__).parent / "node" / "clients.mjs"
INSTALLED = Path(__file__).parents[2] / ".node"  # by `make test-foreign`

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (INSTALLED / "node_modules").is_dir(),
    reason="without node or its packages; make test-foreign installs the latter",
)


def told(url: str) -> Any:
    """What the clients make of the server's answers."""
    script = shutil.copy(SCRIPT, INSTALLED)  # packages are looked for where a script lies
    done = subprocess.run(
        ["node", script, url, MODEL], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=["scripted", "real"])
def answers(request: pytest.FixtureRequest) -> Iterator[tuple[Any, str | None]]:
    """What the clients told, and what every text must be if that is known."""
    if request.param == "real":
        server: ServerProcess = request.getfixturevalue("tiny_server")
        yield told(server.url), None
    else:
        with running_server() as scripted:
            yield told(scripted.url), ANSWER


def test_the_ai_sdk_answers_streams_and_refers_to_earlier_items(
    answers: tuple[Any, str | None],
) -> None:
    clients, known = answers
    responses, chat = clients["aiSdk"]["responses"], clients["aiSdk"]["chat"]

    assert (responses.pop("references"), chat.pop("references")) == (1, 0)
    assert responses == chat
    assert responses["first"] == (known or responses["first"]) != ""
    assert responses["second"] == responses["streamed"]
    assert len(set(responses["inputTokens"])) == 1
    assert clients["aiSdk"]["unknownItem"] == 404


def test_openais_client_understands_chats_and_responses(answers: tuple[Any, str | None]) -> None:
    clients, known = answers
    said = clients["openai"]

    names = ("chat", "chatStreamed", "response", "streamed", "final")
    assert {said[name] for name in names} == {known or said["chat"]}
    assert said["items"] == ["Hello"]
    assert len(set(said["inputTokens"])) == 1
    assert said["replayed"][0] == "response.created"
    assert said["replayed"][1] in ("response.completed", "response.incomplete")
    assert said["missing"] == 404


def test_anthropics_client_understands_messages_and_errors(
    answers: tuple[Any, str | None],
) -> None:
    clients, known = answers
    said = clients["anthropic"]

    assert {said["text"], said["streamed"], said["final"]} == {known or said["text"]}
    assert len(set(said["inputTokens"])) == 1
    assert said["refused"] == [404, "not_found_error", True]
