"""`python -m benchmarks.front_load`: what the HTTP front costs per streamed token.

Many concurrent streams over loopback, once from our server over an engine that costs nothing, once
from a bare Starlette app that writes canned chunks of the same size: the floor. Servers run in a
process of their own; the client, in this one, only counts bytes. Ratios within one run count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from serve.api.app import create_app
from serve.api.metrics import Metrics
from serve.config import ServerConfig
from serve.engine.async_engine import AsyncEngine
from serve.server import HttpProtocol
from tests.api.scripted import Script, ScriptedClient, byte_level_tokenizer

CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"tiny","system_fingerprint":"fp_0123456789","choices":'
    b'[{"index":0,"delta":{"content":" Hello"},"logprobs":null,"finish_reason":null}]}\n\n'
)


def main() -> None:
    """Measure both, alternating, and print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(args.rounds):
        for name, measured in rates.items():
            measured.append(tokens_per_second(name, args.streams, args.tokens))
    ours, bare = (statistics.median(measured) for measured in rates.values())
    print(f"{args.streams} streams of {args.tokens} tokens, median of {args.rounds} rounds")
    print(f"ours: {ours:,.0f} tokens/s   bare Starlette: {bare:,.0f} tokens/s")
    print(f"ratio: {ours / bare:.2f}")


def tokens_per_second(name: str, streams: int, tokens: int) -> float:
    """Of one server's run. Raises RuntimeError unless every stream is whole."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(name, tokens, there)
    )
    process.start()
    try:
        port = here.recv()
        began = time.perf_counter()
        uvloop.run(_read_all(port, streams, tokens))
        return streams * tokens / (time.perf_counter() - began)
    finally:
        process.terminate()
        process.join()


def _serve(name: str, tokens: int, ready: Connection) -> None:
    uvloop.run(_serve_ours(tokens, ready) if name == "ours" else _serve_bare(tokens, ready))


async def _serve_ours(tokens: int, ready: Connection) -> None:
    tokenizer = byte_level_tokenizer()
    script = Script(tokenizer.encode_now(" Hello") * tokens)
    client = ScriptedClient(tokenizer, lambda request: script, max_model_len=tokens + 512)
    client.num_blocks = tokens + 512
    config = ServerConfig(disable_log_requests=True)
    metrics = Metrics(config.metrics_prefix)
    engine = AsyncEngine(client, tokenizer, metrics, names=("tiny",))
    await engine.start()
    await _run(create_app(engine, config, metrics), ready)


async def _serve_bare(tokens: int, ready: Connection) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(tokens):
            yield CHUNK
            await asyncio.sleep(0)  # as tokens come: one step after the other
        yield b"data: [DONE]\n\n"

    async def answer(request: Request) -> StreamingResponse:
        await request.body()
        return StreamingResponse(chunks(), media_type="text/event-stream")

    await _run(Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])]), ready)


async def _run(app: object, ready: Connection) -> None:
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
    ready.send(listener.getsockname()[1])
    await uvicorn.Server(settings).serve(sockets=[listener])


async def _read_all(port: int, streams: int, tokens: int) -> None:
    counts = await asyncio.gather(*(_read_one(port, tokens) for _ in range(streams)))
    if set(counts) != {tokens}:
        raise RuntimeError(f"streams of {sorted(set(counts))} tokens instead of {tokens}")


async def _read_one(port: int, tokens: int) -> int:
    """One stream's chunks that carry text."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": tokens}
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        b"content-type: application/json\r\n"
        + f"content-length: {len(body)}\r\n\r\n{body}".encode()
    )
    answer = await reader.read()
    writer.close()
    return answer.count(b'"content":" Hello"')


if __name__ == "__main__":
    main()
