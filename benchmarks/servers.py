"""Starting the servers that are compared, one process group each, and ending them for sure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

POLL_S = 0.25
TERM_WAIT_S = 20


class ServerFailed(Exception):
    """It did not come up; the text ends with the last lines of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How a server is started and asked. Texts may hold {home}, {port}, {cores} and {python}.

    `needs`: files without which it is not installed. `text_prompts`: it takes no token ids.
    """

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    health: str = "/health"
    model: str = "smollm2"
    start_timeout_s: float = 330
    text_prompts: bool = False
    ignore_eos: bool = True
    note: str = ""

    def filled(self, **values: object) -> ServerCommand:
        """With the placeholders replaced."""

        def fill(text: str) -> str:
            for name, value in values.items():
                text = text.replace("{" + name + "}", str(value))
            return text

        return ServerCommand(
            name=self.name,
            command=tuple(map(fill, self.command)),
            needs=tuple(map(fill, self.needs)),
            environment={name: fill(value) for name, value in self.environment.items()},
            health=self.health,
            model=fill(self.model),
            start_timeout_s=self.start_timeout_s,
            text_prompts=self.text_prompts,
            ignore_eos=self.ignore_eos,
            note=self.note,
        )

    @property
    def missing(self) -> str | None:
        """The first needed file that is not there."""
        return next((path for path in self.needs if not Path(path).exists()), None)


class RunningServer:
    """A started server. Entering waits until it answers; leaving ends its whole process group.

    Raises ServerFailed when the port is taken, the process ends, or the time is up.
    """

    def __init__(self, command: ServerCommand, port: int, log_folder: Path) -> None:
        self.command = command
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._log = log_folder / f"{command.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RunningServer:
        if not port_is_free(self.port):
            raise ServerFailed(f"port {self.port} is taken")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        environment = _without_our_environment() | self.command.environment
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        try:
            self._wait_ready(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def freeze(self) -> None:
        """Stop it from using any CPU, so that it does not disturb the server being measured."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End all of its processes; returns when they have gone."""
        if self._process is None:
            return
        self.thaw()
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + TERM_WAIT_S
        while self._is_alive() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process = None

    def _is_alive(self) -> bool:
        assert self._process is not None
        self._process.poll()  # reaps the leader, or its group would seem alive
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _signal(self, number: int) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return  # all of them have ended

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.command.start_timeout_s
        while not answers(self.url + self.command.health):
            if process.poll() is not None:
                raise ServerFailed(f"it ended with {process.returncode}{self._last_lines()}")
            if time.monotonic() > deadline:
                waited = self.command.start_timeout_s
                raise ServerFailed(f"not up within {waited:.0f} s{self._last_lines()}")
            time.sleep(POLL_S)

    def _last_lines(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-8:]
        return "\n    ".join([f"; the end of {self._log}:", *lines])


def end_on_sigterm() -> None:
    """Let SIGTERM unwind the stack, so that started servers end with the benchmark."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def answers(url: str) -> bool:
    """Whether a GET gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def port_is_free(port: int) -> bool:
    """Whether a server could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _without_our_environment() -> dict[str, str]:
    """Peers have their own Python environments; ours must not leak into them."""
    ours = {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "LD_PRELOAD", "TRITON_INTERPRET"}
    return {name: value for name, value in os.environ.items() if name not in ours}
