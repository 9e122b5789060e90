"""A real `serve-llm serve` in its own processes, on a free port of the loopback interface."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx
import psutil

START_TIMEOUT_S = 240
END_TIMEOUT_S = 240
_READY = re.compile(r"serving (\S+) at (http://\S+)")


class ServerProcess:
    """Starts the command on entering, ends it on leaving, and leaves no process behind.

    `url` is set once it serves; a server that ends before that (see `wait`) has none.
    """

    def __init__(self, arguments: Sequence[str], **environment: str) -> None:
        self.lines: list[str] = []
        self.url = ""
        # The tests interpret Triton kernels; the server must choose its kernels as a user's does.
        inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self.process = psutil.Popen(
            [sys.executable, "-m", "serve.cli", "serve", *arguments],
            env={**inherited, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._family: list[psutil.Process] = []
        self._settled = threading.Event()  # it serves, or has ended
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> ServerProcess:
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._note_family()
        for process in [self.process, *self._family]:
            if process.is_running():
                process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stderr.close()

    def wait_ready(self) -> ServerProcess:
        """Wait until it serves."""
        assert self._settled.wait(START_TIMEOUT_S), self.log
        assert self.url, self.log
        self._note_family()
        return self

    def wait(self) -> int:
        """Wait for its end; the exit code. No process of its family may be left then."""
        exit_code = int(self.process.wait(END_TIMEOUT_S))
        self._reader.join(END_TIMEOUT_S)
        _, orphans = psutil.wait_procs(self._family, timeout=10)
        assert not orphans, f"{orphans} outlived the server\n{self.log}"
        return exit_code

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.signal(signal_number)
        return self.wait()

    def signal(self, signal_number: int) -> None:
        """Only the front: the engine must follow by itself."""
        self._note_family()
        self.process.send_signal(signal_number)

    @property
    def engine(self) -> psutil.Process:
        """The engine's process: of the front's children the one that uses most memory (the others
        are helpers of Python's multiprocessing)."""
        self._note_family()
        living = [process for process in self._family if process.is_running()]
        return max(living, key=lambda process: process.memory_info().rss)

    @property
    def log(self) -> str:
        """What it has written so far."""
        return "\n".join(self.lines)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        total, found = 0.0, False
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if line.startswith((f"{name}{{", f"{name} ")) and all(
                f'{key}="{value}"' in line for key, value in labels.items()
            ):
                total, found = total + float(line.rsplit(" ", 1)[1]), True
        assert found, f"no {name} {labels}"
        return total

    def _note_family(self) -> None:
        if self.process.is_running():
            known = {process.pid for process in self._family}
            children = self.process.children(recursive=True)
            self._family += [child for child in children if child.pid not in known]

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if match := _READY.search(line):
                self.url = match[2]
            elif self.url:  # the last line of the start, the example, is in the log
                self._settled.set()
        self._settled.set()


def serve(model: Path, *flags: str, **environment: str) -> ServerProcess:
    """A server of `model` on a free port."""
    return ServerProcess([str(model), "--port", "0", *flags], **environment)
