"""A server from its engine's start to its end: what runs, what stops it, and its exit code."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop

from serve.api.app import create_app
from serve.api.clients.keys import with_all_keys
from serve.api.clients.limits_file import read_limits
from serve.api.figures.metrics import Metrics
from serve.checkpoint.hub import DEFAULT_MODEL, find_model
from serve.config import EngineConfig, ServerConfig
from serve.engine.async_engine import AsyncEngine
from serve.engine.process.child import EngineChild
from serve.engine.process.process_client import ProcessClient
from serve.engine.succession import Succession
from serve.engine.vigil import Patience
from serve.http_protocol import HttpLimits, HttpProtocol
from serve.text.generation_config import read_generation_config
from serve.text.placeholder_tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

_BACKLOG = 4096  # connections that may wait to be accepted; the kernel may cap it
# After the engine's death /health answers 503 this long, so that probes see it and clients get
# their errors before connections are refused.
_DEATH_NOTICE_S = 3.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGE_BYTES = 2**19
_CLOSE_CONNECTIONS_S = 5  # for answers already written to leave through slow connections


def serve(
    config: EngineConfig,
    server: ServerConfig,
    listener: socket.socket,
    child: EngineChild,
) -> int:
    """Serve at a bound address with the engine in `child`; returns the exit code.

    Raises ConfigError when it cannot start.
    """
    server = with_all_keys(server)
    read_limits(server)  # a mistake in it must not wait for the model to be fetched
    path = find_model(config.model.model, config.model.revision)
    return uvloop.run(_Server(config, server, path, listener, child).run())


class _Server:
    """One run of the server; owns the engine, the HTTP server and the stop signals."""

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        model_path: Path,
        listener: socket.socket,
        child: EngineChild,
    ) -> None:
        children = [child]  # later engines start their own
        self._config = server
        self._listener = listener
        self._metrics = Metrics(server.metrics_prefix)
        self._engine = AsyncEngine(
            Succession(
                lambda: ProcessClient(
                    config, model_path, child=children.pop() if children else None
                ),
                server.engine_restarts,
            ),
            load_tokenizer(model_path, config.model.load_format, server.chat_template),
            self._metrics,
            names=server.served_model_name or (config.model.model or DEFAULT_MODEL.name,),
            generation=read_generation_config(model_path, server.generation_config),
            seed=config.model.seed,
            patience=Patience(server.engine_timeout, server.step_timeout),
        )
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Start, serve, and leave nothing running."""
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signal_number, self._stop.set)
        serving = None
        try:
            if not await self._before_stop(asyncio.create_task(self._engine.start())):
                return 0
            http = self._http_server()
            spare_the_collector()
            give_back_large_memory()
            self._listener.listen(_BACKLOG)  # from here on clients may connect: the log can say so
            self._announce()
            serving = asyncio.create_task(http.serve(sockets=[self._listener]))
            return await self._until_the_end()
        finally:
            await self._engine.close()  # requests that still run get their error now
            if serving is not None:
                http.should_exit = True
                await serving

    def _http_server(self) -> _HttpServer:
        return _HttpServer(
            uvicorn.Config(
                create_app(self._engine, self._config, self._metrics),
                http=self._protocol(),
                ws="none",
                log_config=None,
                access_log=False,
                backlog=_BACKLOG,
                timeout_keep_alive=self._config.timeout_keep_alive,
                timeout_graceful_shutdown=2 * _CLOSE_CONNECTIONS_S,
            )
        )

    def _protocol(self) -> type[asyncio.Protocol]:
        config = self._config
        limits = HttpLimits(
            max_head_bytes=config.max_header_bytes,
            receive_timeout_s=config.receive_timeout_s(),
            max_connections=config.max_connections,
        )
        return cast("type[asyncio.Protocol]", partial(HttpProtocol, limits=limits))

    async def _until_the_end(self) -> int:
        died = asyncio.create_task(self._engine.wait_dead())
        if await self._before_stop(died):
            logger.error("the engine died: %s", died.result())
            await self._before_stop(asyncio.create_task(asyncio.sleep(_DEATH_NOTICE_S)))
            return 1
        self._stop.clear()
        if self._config.drain_delay and not await self._let_others_turn_away():
            return 1 if self._engine.dead_reason else 0
        logger.info(
            "stopping: running requests have %g s to finish; a second signal ends them now",
            self._config.shutdown_timeout,
        )
        drained = asyncio.create_task(self._engine.drain(self._config.shutdown_timeout))
        await self._before_stop(drained)
        return 1 if self._engine.dead_reason else 0

    async def _let_others_turn_away(self) -> bool:
        """Serve on for a while and say on /ready that it is not for long; False when the engine
        died or another stop signal came meanwhile."""
        delay_s = self._config.drain_delay
        logger.info(
            "stopping in %g s: /ready answers 503, requests are still taken; a second signal ends "
            "them now",
            delay_s,
        )
        self._engine.is_leaving = True
        died = asyncio.create_task(self._engine.wait_dead())
        waited = asyncio.create_task(asyncio.wait([died], timeout=delay_s))
        try:
            return await self._before_stop(waited) and not died.done()
        finally:
            died.cancel()

    async def _before_stop(self, work: asyncio.Task[Any]) -> bool:
        """Wait for `work`; False when a stop signal came first (`work` is then cancelled)."""
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return False
            work.result()  # raises what `work` raised
            return True
        finally:
            work.cancel()
            stopped.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)

    def _announce(self) -> None:
        host, port = self._listener.getsockname()[:2]
        name = self._engine.model.names[0]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        logger.info("serving %s at %s", name, url)
        messages = [{"role": "user", "content": "Hello!"}]
        body = {"model": name, "messages": messages, "max_tokens": 60}
        logger.info(
            "try: curl %s/v1/chat/completions -H 'content-type: application/json' -d '%s'",
            url,
            json.dumps(body),
        )


def spare_the_collector() -> None:
    """What exists now lives as long as the process: the garbage collector need not visit it again.
    What a token leaves behind is freed by its reference count, so fresh objects are visited less
    often too: with hundreds of streams that is a fifth of the front's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def give_back_large_memory() -> None:
    """What a large body took goes back to the system when it is freed. glibc would raise its limits
    after the first one, and keep as much for good: 14 to 32 MB after forty bodies of 3.5 MB."""
    with suppress(OSError, AttributeError):  # another C library: its own ways are as good
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)


class _HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own: ours let running requests finish first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Give what is written a while to leave, then cut the connections: that ends the tasks
        behind them in peace (uvicorn would cancel those, and log each one as an error)."""
        loop = asyncio.get_running_loop()
        cut = loop.call_later(_CLOSE_CONNECTIONS_S, self._cut_connections)
        await super().shutdown(sockets)
        cut.cancel()

    def _cut_connections(self) -> None:
        for connection in list(self.server_state.connections):
            assert isinstance(connection, HttpProtocol)
            connection.abort()
