"""The engine's process as its parent holds it, from before there is an event loop.

So early because the process has most to import: it does so while the front imports its own part and
finds the model.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from serve.config import engine_environment
from serve.link.ipc import FrontSocket

# -P: modules lying in the working directory must not pass for installed ones.
ENGINE_COMMAND: Final = (sys.executable, "-P", "-m", "serve.engine")


class EngineChild:
    """A started process that waits for its Launch; it ends with us, even if we are killed."""

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self.socket = FrontSocket()
        self.lifeline, child_end = socket.socketpair()
        self.lifeline.setblocking(False)
        with child_end:
            self._process = subprocess.Popen(
                [*command, self.socket.address, str(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(child_end.fileno(), self.socket.address_fd),
                env=engine_environment(),
            )
        self._ended: asyncio.Future[int] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        """Its exit code, once it has ended. Any number of tasks may wait."""
        if self._ended is None:
            loop = asyncio.get_running_loop()
            self._ended = loop.create_future()
            watched = os.pidfd_open(self.pid)
            loop.add_reader(watched, self._note_end, watched, self._ended)
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """End it by force, if it has not ended."""
        self._process.kill()

    def close(self) -> None:
        """End it and free what it is reached by, before or after there was a loop."""
        if self._is_closed:
            return
        self._is_closed = True
        self.kill()
        self._process.wait()
        self.socket.close()
        self.lifeline.close()

    def _note_end(self, watched: int, ended: asyncio.Future[int]) -> None:
        asyncio.get_running_loop().remove_reader(watched)
        os.close(watched)
        if not ended.done():
            ended.set_result(self._process.wait())
