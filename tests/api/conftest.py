"""A real server (uvicorn on loopback) over a scripted engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from serve.api.app import create_app
from serve.api.figures.metrics import Metrics
from serve.config import ServerConfig
from serve.engine.async_engine import AsyncEngine
from serve.messages import AddRequest
from tests.api.scripted import TEMPLATE, Script, ScriptedClient, byte_level_tokenizer

MODEL = "tiny"
ANSWER = " Hello world. Grüße, 世界 👋!"


class Server:
    """A running server; `script` says what the next requests get (a text, ids or a Script)."""

    def __init__(self, config: ServerConfig, chat_template: str | None, **engine: Any) -> None:
        self.config = config
        tokenizer = byte_level_tokenizer(chat_template)
        self.tokenizer = tokenizer
        self.script: str | list[int] | Script | Callable[[AddRequest], Script] = ANSWER
        self.client = ScriptedClient(tokenizer, self._script_for, **engine)
        self.metrics = Metrics(config.metrics_prefix)
        self.engine = AsyncEngine(self.client, tokenizer, self.metrics, names=(MODEL, "alias"))
        self._socket = _listening_socket()
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._uvicorn: uvicorn.Server | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(30)

    def stop(self) -> None:
        assert self._uvicorn is not None
        self._uvicorn.should_exit = True
        self._uvicorn.force_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def on_loop(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the server's event loop and wait for its result."""
        assert self._loop is not None
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result(30)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The server's event loop, in its thread."""
        assert self._loop is not None
        return self._loop

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0)

    def http(self, **settings: Any) -> httpx.Client:
        """Without certificates, which take a quarter of a second to load."""
        return httpx.Client(base_url=self.url, verify=False, timeout=30, **settings)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode_now(text)

    def _script_for(self, request: AddRequest) -> Script:
        if isinstance(self.script, str):
            return Script(self.ids(self.script))
        if isinstance(self.script, list):
            return Script(self.script)
        return self.script if isinstance(self.script, Script) else self.script(request)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.engine.start()
        app = create_app(self.engine, self.config, self.metrics)
        settings = uvicorn.Config(app, log_level="warning", lifespan="off", ws="none")
        self._uvicorn = uvicorn.Server(settings)
        self._loop.call_soon(self._started.set)
        await self._uvicorn.serve(sockets=[self._socket])
        await self.engine.close()


@contextmanager
def running_server(
    config: ServerConfig | None = None, *, chat_template: str | None = TEMPLATE, **engine: Any
) -> Iterator[Server]:
    """A server for the block."""
    server = Server(config or ServerConfig(), chat_template, **engine)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    """The module's server with its usual script."""
    shared_server.script = ANSWER
    return shared_server


@pytest.fixture(scope="module")
def shared_http(shared_server: Server) -> Iterator[httpx.Client]:
    with shared_server.http() as client:
        yield client


@pytest.fixture(scope="module")
def shared_client(shared_server: Server) -> Iterator[openai.OpenAI]:
    with shared_server.openai() as client:
        yield client


@pytest.fixture
def http(server: Server, shared_http: httpx.Client) -> httpx.Client:
    return shared_http


@pytest.fixture
def client(server: Server, shared_client: openai.OpenAI) -> openai.OpenAI:
    return shared_client


def _listening_socket() -> socket.socket:
    # With the protocol named, asyncio turns Nagle's delays off on accepted connections.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen(2048)
    return listening
