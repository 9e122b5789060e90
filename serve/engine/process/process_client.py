"""The engine in a process of its own: the client that the server uses.

Tokenizing, detokenizing and JSON in front then never hold the interpreter lock of the step loop.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from serve import logs
from serve.config import EngineConfig
from serve.engine.process.child import ENGINE_COMMAND, EngineChild
from serve.engine.vigil import HEARTBEAT_S
from serve.errors import ConfigError, EngineDead
from serve.link.ipc import FrontSocket, Launch
from serve.messages import EngineDied, EngineReady, FromEngine, Shutdown, ToEngine

logger = logging.getLogger(__name__)

STOP_WITHIN_S = 5.0
"""After Shutdown, how long a step that runs may still take; then the process is killed."""
SAVE_WITHIN_S = 120.0
"""How much longer when the prefix cache is written to its file."""
LAST_WORDS_S = 0.2
"""How long after the process's end a message that it sent before may need to arrive."""


class ProcessClient:
    """An EngineClient whose engine is a child process.

    The child ends with us even if we are killed, and we notice at once when it ends.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        command: Sequence[str] = ENGINE_COMMAND,
        child: EngineChild | None = None,
    ) -> None:
        """`child` is a process that was started already, and is ours from now on."""
        self._launch = Launch(config, str(model_path), logs.level())
        self._command = command
        saves = config.cache.prefix_cache_file is not None
        self._stop_within_s = STOP_WITHIN_S + (SAVE_WITHIN_S if saves else 0)
        self._child = child
        self._seen_at = time.monotonic()
        self._is_open = False
        self._tasks: list[asyncio.Task[None]] = []
        self._messages: asyncio.Queue[FromEngine] = asyncio.Queue()
        self._is_ready = False
        self._death: EngineDied | None = None

    @property
    def pid(self) -> int | None:
        """The engine's process id, once started."""
        return self._child.pid if self._child else None

    async def start(self) -> EngineReady:
        """Start the process and wait until the model is loaded."""
        child = self._child = self._child or EngineChild(self._command)
        self._is_open = True
        child.socket.send(self._launch)
        asyncio.get_running_loop().add_reader(child.lifeline, self._note_life)
        self._tasks = [
            asyncio.create_task(self._read_messages(child.socket), name="engine-messages"),
            asyncio.create_task(self._watch_process(child), name="engine-watch"),
        ]
        match await self.receive():
            case EngineReady() as ready:
                self._is_ready = True
                child.socket.forget_address()
                self._note_life()
                return ready
            case EngineDied(reason, is_config_error=True):
                raise ConfigError(reason)
            case EngineDied(reason):
                raise EngineDead(reason)
            case message:
                raise EngineDead(f"the engine began with {type(message).__name__}.")

    def send(self, message: ToEngine) -> None:
        """Queue a message; to a dead engine it goes nowhere."""
        if self._death is None and self._child is not None and self._is_open:
            self._child.socket.send(message)

    async def receive(self) -> FromEngine:
        """The next message; EngineDied, at once and every time, after the last."""
        if self._death is None:
            message = await self._messages.get()
            if not isinstance(message, EngineDied):
                return message
            self._death = message
        return self._death

    def seen_at(self) -> float:
        """When the process last sent something; a look is taken, if the loop had no time to."""
        if self._is_open and time.monotonic() - self._seen_at > 2 * HEARTBEAT_S:
            self._note_life()
        return self._seen_at

    async def close(self) -> None:
        """End the process, by force if it takes too long, and free what it was reached by."""
        try:
            if self._child is not None and self._is_open:
                await self._stop(self._child)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._child is not None and self._is_open:
                self._is_open = False
                asyncio.get_running_loop().remove_reader(self._child.lifeline)
            if self._child is not None:
                self._child.close()
            if self._death is None:
                self._death = EngineDied("the engine was closed.")

    async def _stop(self, child: EngineChild) -> None:
        try:
            if self._is_ready and child.exit_code is None:
                self.send(Shutdown(drain=False))
                await asyncio.wait_for(child.wait(), self._stop_within_s)
        except TimeoutError:
            logger.warning("the engine did not stop within %g s and is killed", self._stop_within_s)
        finally:
            if child.exit_code is None:
                child.kill()
        await child.wait()

    def _note_life(self) -> None:
        """Take in what the process's heartbeat left."""
        assert self._child is not None
        lifeline = self._child.lifeline
        try:
            if lifeline.recv(4096):
                self._seen_at = time.monotonic()
                return
        except BlockingIOError:
            return
        except OSError:  # its end, which `_watch_process` tells
            pass
        asyncio.get_running_loop().remove_reader(lifeline)

    async def _read_messages(self, channel: FrontSocket) -> None:
        try:
            while True:
                self._messages.put_nowait(await channel.receive())
        except Exception:
            logger.exception("the engine's messages cannot be read")
            reason = "the engine's messages cannot be read; the server's log says why."
            self._messages.put_nowait(EngineDied(reason))

    async def _watch_process(self, child: EngineChild) -> None:
        exit_code = await child.wait()
        await asyncio.sleep(LAST_WORDS_S)
        self._messages.put_nowait(EngineDied(_describe_end(exit_code)))


def _describe_end(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return "the engine process was killed (SIGKILL), perhaps because memory ran out."
    if exit_code < 0:
        return f"the engine process was ended by {signal.Signals(-exit_code).name}."
    return f"the engine process ended with exit code {exit_code}; the log above says why."
