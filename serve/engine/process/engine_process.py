"""What runs in the engine's own process, from its first instruction to its exit code."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from serve import logs
from serve.config import EngineConfig
from serve.engine.core import EngineCore, Inbox, Outbox
from serve.engine.vigil import HEARTBEAT_S
from serve.errors import ConfigError, EngineDead
from serve.messages import EngineDied, EngineReady

if TYPE_CHECKING:
    from serve.link.ipc import EngineSocket, Launch

logger = logging.getLogger(__name__)

CoreBuilder = Callable[[EngineConfig, Path, Inbox, Outbox], tuple[EngineCore, EngineReady]]


def run_engine_process(
    arguments: Sequence[str], build: CoreBuilder, prepare: Callable[[], object] = lambda: None
) -> NoReturn:
    """Be the engine at the other end of `arguments` = (socket address, lifeline fd).

    `prepare` runs before it is known what to build. Exit code 0 after Shutdown, 1 after anything
    else, which the front is told.
    """
    exit_code = _run(arguments, build, prepare)
    logging.shutdown()
    os._exit(exit_code)  # taking torch's modules apart one by one would cost seconds, for nothing


def _run(arguments: Sequence[str], build: CoreBuilder, prepare: Callable[[], object]) -> int:
    address, lifeline = arguments
    _leave_signals_to_the_front()
    _end_with_the_front(int(lifeline))
    from serve.link.ipc import EngineSocket  # late: signals and lifeline come first

    channel = EngineSocket(address)
    prepare()
    launch = channel.receive_launch()
    logs.configure(launch.log_level)
    try:
        _serve(launch, channel, build)
    except ConfigError as error:
        channel.send(EngineDied(str(error), is_config_error=True))
        return 1
    except BaseException as error:
        logger.exception("the engine failed")
        told = str(error) if isinstance(error, EngineDead) else f"{type(error).__name__}: {error}"
        channel.send(EngineDied(told))
        return 1
    finally:
        channel.close()
    return 0


def _serve(launch: Launch, channel: EngineSocket, build: CoreBuilder) -> None:
    core, ready = build(launch.config, Path(launch.model_path), channel, channel)
    try:
        channel.send(ready)
        core.run()
    except EngineDead:
        raise
    except Exception as error:  # clients are told from here on, and what it says is for the log
        raise EngineDead("the engine failed; the server's log says why.") from error
    finally:
        core.close()


def _leave_signals_to_the_front() -> None:
    """Ctrl-C and a service manager's SIGTERM reach every process of the group, but when to stop,
    and whether to let requests finish, is the front's decision."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end_with_the_front(lifeline: int) -> None:
    """The front holds the other end of this pair and never writes: an end of file is its death,
    however it died. Now and then it is told that we live; it need not listen."""
    front = socket.socket(fileno=lifeline)
    front.settimeout(HEARTBEAT_S)

    def wait() -> None:
        with suppress(OSError):
            while _is_there(front):
                with suppress(TimeoutError):
                    front.send(b"\0")
        os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _is_there(front: socket.socket) -> bool:
    """Wait for a heartbeat's time; False as soon as the front is gone."""
    try:
        return front.recv(1) != b""
    except TimeoutError:
        return True
