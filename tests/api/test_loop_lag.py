"""The event loop goes on turning while requests do what takes long."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import Future

import pytest

from tests.api.conftest import Server, running_server

LONG_TEXT = " Hello world one two three" * 38_000  # about 1 MB


class Pulse:
    """Turns of the loop while it is watched."""

    def __init__(self) -> None:
        self.gaps: list[float] = []

    async def beat(self, stop: threading.Event) -> None:
        last = time.monotonic()
        while not stop.is_set():
            await asyncio.sleep(0.005)
            now = time.monotonic()
            self.gaps.append(now - last)
            last = now


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/v1/chat/completions"])
def test_the_loop_turns_while_a_megabyte_is_tokenized(path: str) -> None:
    body: dict[str, object] = {"prompt": LONG_TEXT, "truncate_prompt_tokens": 8, "max_tokens": 2}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": LONG_TEXT}]
        del body["prompt"]
    with running_server(max_model_len=2**15) as server:
        pulse, took = watched(server, path, json.dumps(body).encode())

    # Tokenizing at once on the loop would be one gap of nearly the whole time.
    assert max(pulse.gaps) < max(0.5 * took, 0.3), (max(pulse.gaps), took)


def watched(server: Server, path: str, content: bytes) -> tuple[Pulse, float]:
    pulse, stop = Pulse(), threading.Event()
    task: Future[None] = asyncio.run_coroutine_threadsafe(pulse.beat(stop), server.loop)
    began = time.monotonic()
    with server.http() as http:
        response = http.post(path, content=content, headers={"content-type": "application/json"})
    took = time.monotonic() - began
    stop.set()
    task.result(30)
    assert response.status_code == 200, response.text[:300]
    return pulse, took
