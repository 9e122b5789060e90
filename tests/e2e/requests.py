"""Requests that the end-to-end tests send, over plain HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from tests.e2e.server_process import ServerProcess

WAIT_S = 120


def completion(prompt: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy completion that only its length ends."""
    fixed = {"model": "tiny", "temperature": 0, "ignore_eos": True}
    return {**fixed, "prompt": prompt, "max_tokens": max_tokens, **fields}


def client(server: ServerProcess, **settings: Any) -> httpx.AsyncClient:
    """A client without a limit on connections."""
    return httpx.AsyncClient(
        base_url=server.url, timeout=WAIT_S, limits=httpx.Limits(max_connections=None), **settings
    )


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of every `data:` line up to the end mark."""
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


async def streamed_text(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """The whole text of a streamed completion."""
    request = http.stream("POST", "/v1/completions", json={**body, "stream": True})
    async with request as response:
        assert response.status_code == 200, await response.aread()
        parts = []
        async for event in events(response):
            assert "error" not in event, event
            parts += [choice["text"] for choice in event["choices"]]
        return "".join(parts)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that happens in another process."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what}"
        await asyncio.sleep(0.05)


def is_idle(server: ServerProcess) -> bool:
    """Whether the engine holds no request and every KV block is free."""
    names = ("num_requests_running", "num_requests_waiting", "num_requests_swapped")
    names += ("kv_cache_usage_perc", "host_kv_cache_usage_perc")
    return all(server.metric(f"serve_llm_{name}") == 0 for name in names)
