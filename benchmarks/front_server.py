"""`python -m benchmarks.front_server NAME`: the two servers that `benchmarks.front_load` compares.

`ours` is the product's HTTP front over an engine that costs nothing; `bare` a Starlette app that
streams canned chunks of the same size: the floor. Both print their port, and then serve.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from serve.api.app import create_app
from serve.api.figures.metrics import Metrics
from serve.config import ServerConfig
from serve.engine.async_engine import AsyncEngine
from serve.http_protocol import HttpProtocol
from serve.link.ipc import Codec
from serve.messages import (
    AbortRequests,
    AddRequest,
    EngineReady,
    EngineStats,
    FinishReason,
    FromEngine,
    RequestTimes,
    StepOutputs,
    ToEngine,
    TokenDelta,
)
from serve.serving import spare_the_collector
from tests.api.scripted import byte_level_tokenizer

WORD = " Hello"
CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"tiny","system_fingerprint":"fp_0123456789","choices":'
    b'[{"index":0,"delta":{"content":" Hello"},"logprobs":null,"finish_reason":null}]}\n\n'
)


class CannedEngine:
    """EngineClient: each step gives every request the same token until it has all it asked for.

    Steps arrive as the bytes that a real engine's process sends, so that decoding them counts.
    """

    def __init__(self, token_id: int, vocab_size: int) -> None:
        self._token_id = token_id
        self._vocab_size = vocab_size
        self._codec = Codec()
        self._left: dict[str, int] = {}  # tokens still to come, by request
        self._news = asyncio.Event()
        self._step: bytes | None = None  # while it is the same as the last one

    async def start(self) -> EngineReady:
        return EngineReady(
            max_model_len=1 << 20,
            num_blocks=1 << 16,
            block_size=16,
            num_host_blocks=0,
            vocab_size=self._vocab_size,
            max_num_seqs=1 << 16,
            max_num_batched_tokens=1 << 16,
            device="none",
            dtype="float32",
            attention_backend="none",
        )

    def send(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                assert message.sampling.max_tokens is not None
                self._left[message.request_id] = message.sampling.max_tokens
            case AbortRequests(ids):
                for request_id in ids:
                    self._left.pop(request_id, None)
        self._step = None
        self._news.set()

    async def receive(self) -> FromEngine:
        await asyncio.sleep(0)  # whoever got a token in the last step writes it now
        while not self._left:
            self._news.clear()
            await self._news.wait()
        if self._step is None or min(self._left.values()) == 1:
            self._step = self._encoded_step()
        self._left = {request_id: left - 1 for request_id, left in self._left.items() if left > 1}
        message = self._codec.decode(self._step)
        assert isinstance(message, StepOutputs)
        return message

    def seen_at(self) -> float:
        return time.monotonic()

    async def close(self) -> None:
        self._left.clear()

    def _encoded_step(self) -> bytes:
        now = time.monotonic()
        deltas = [
            TokenDelta(
                request_id,
                [self._token_id],
                finish_reason=FinishReason.LENGTH if left == 1 else None,
                times=RequestTimes(now, now, now, now, 0) if left == 1 else None,
            )
            for request_id, left in self._left.items()
        ]
        return self._codec.encode(StepOutputs(deltas, EngineStats(), now))


async def serve_ours() -> None:
    """The product's front."""
    tokenizer = byte_level_tokenizer()
    (token_id,) = tokenizer.encode_now(WORD)
    config = ServerConfig(disable_log_requests=True)
    metrics = Metrics(config.metrics_prefix)
    client = CannedEngine(token_id, tokenizer.max_token_id + 1)
    engine = AsyncEngine(client, tokenizer, metrics, names=("tiny",))
    await engine.start()
    await run(create_app(engine, config, metrics))


async def serve_bare() -> None:
    """Nothing but Starlette."""

    async def chunks(num_tokens: int) -> AsyncIterator[bytes]:
        for _ in range(num_tokens):
            yield CHUNK
            await asyncio.sleep(0)  # as tokens come: one step after the other
        yield b"data: [DONE]\n\n"

    async def answer(request: Request) -> StreamingResponse:
        body = await request.json()
        return StreamingResponse(chunks(body["max_tokens"]), media_type="text/event-stream")

    await run(Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])]))


async def run(app: object) -> None:
    """Serve an app as the product is served, until the process is ended."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(4096)
    settings = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=HttpProtocol,
        lifespan="off",
        log_config=None,
        access_log=False,
    )
    spare_the_collector()
    print(listener.getsockname()[1], flush=True)
    await uvicorn.Server(settings).serve(sockets=[listener])


if __name__ == "__main__":
    uvloop.run({"ours": serve_ours, "bare": serve_bare}[sys.argv[1]]())
