"""An OpenAI server of a few lines: it streams as many tokens as it is asked for."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

_END = b"0\r\n\r\n"


@dataclass
class FakeOpenAI:
    """Runs on a thread of its own while entered. `bodies` is what clients sent.

    `misbehaviour` makes it fail: "refuse" (status 429), "break off" (close in mid-stream),
    "error event", "no usage", "short" (one token fewer), or "silent" (never answers).
    """

    misbehaviour: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    most_open: int = 0
    _num_open: int = 0

    def __enter__(self) -> FakeOpenAI:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _stop(self) -> None:
        self._server.close()
        current = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not current]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        try:
            await self._answer(head, reader, writer)
        finally:
            self._num_open -= 1
            writer.close()

    async def _answer(
        self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if head.startswith("GET /v1/models"):
            _write_json(writer, 200, {"data": [{"id": "fake"}]})
            return
        length = int(next(line for line in head.split("\r\n") if "Content-Length" in line)[16:])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        if self.misbehaviour == "silent":
            await asyncio.Event().wait()
        elif self.misbehaviour == "refuse":
            _write_json(writer, 429, {"error": {"message": "too busy"}})
        elif body.get("stream"):
            await self._stream(body, "chat" in head.split("\r\n")[0], writer)
        else:
            choice = {"text": "word", "finish_reason": "length"}
            _write_json(writer, 200, {"choices": [choice], "usage": usage(body)})

    async def _stream(self, body: dict[str, Any], chat: bool, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        if chat:
            _write_event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        count = body["max_tokens"] - (self.misbehaviour == "short")
        for index in range(count):
            await asyncio.sleep(0)
            if index == 1 and self.misbehaviour == "break off":
                return
            if index == 1 and self.misbehaviour == "error event":
                _write_event(writer, {"error": {"message": "the engine died"}})
                return
            finish = "length" if index == count - 1 else None
            text = {"delta": {"content": " word"}} if chat else {"text": " word"}
            _write_event(writer, {"choices": [text | {"finish_reason": finish}]})
            await writer.drain()
        if self.misbehaviour != "no usage":
            _write_event(writer, {"choices": [], "usage": usage(body, count)})
        _write_chunk(writer, b"data: [DONE]\n\n")
        writer.write(_END)
        await writer.drain()


def usage(body: dict[str, Any], count: int | None = None) -> dict[str, Any]:
    return {
        "prompt_tokens": len(body.get("prompt") or body.get("messages")),
        "completion_tokens": body["max_tokens"] if count is None else count,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def _write_event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _write_chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _write_chunk(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(content), content))


def _write_json(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    writer.write(
        b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % (status, len(content))
        + content
    )
