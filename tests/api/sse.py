"""Reading server-sent events strictly."""

from __future__ import annotations

import json
from typing import Any

import httpx


def events(response: httpx.Response) -> list[Any]:
    """The JSON of every event, and "[DONE]" as it is. Fails on anything that is not an event."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
    payloads = [block.removeprefix("data: ") for block in blocks]
    return [p if p == "[DONE]" else json.loads(p) for p in payloads]
