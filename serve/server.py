"""The server process from its first instruction: a line in the log, the address, the engine's
process, and only then what takes a second to import."""

from __future__ import annotations

import logging
import resource
import signal
import socket

from serve import __version__, logs
from serve.checkpoint.hub import DEFAULT_MODEL
from serve.config import EngineConfig, ServerConfig
from serve.engine.process.child import EngineChild
from serve.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_OPEN_FILES = 1 << 20
_FEW_OPEN_FILES = 4096


def run_server(config: EngineConfig, server: ServerConfig) -> int:
    """Serve until a signal (returns 0) or the engine's death (returns 1).

    Raises ConfigError when it cannot start.
    """
    logs.configure(server.log_level)
    # Until the event loop takes over, SIGTERM ends a download or a load as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logger.info("serve-llm %s: starting %s", __version__, config.model.model or DEFAULT_MODEL.name)
    try:
        with _bind(server.host, server.port) as listener:
            _raise_file_limit()
            return _serve(config, server, listener)
    except KeyboardInterrupt:
        # If it came inside an `exec` of some import, CPython notes it as unhandled there and would
        # end the process by SIGINT; the next `exec` forgets it.
        exec("")
        logger.info("stopped before the server was ready")
        return 0


def _serve(config: EngineConfig, server: ServerConfig, listener: socket.socket) -> int:
    child = EngineChild()  # imports torch while we import the rest, and find the model
    try:
        from serve.serving import serve

        return serve(config, server, listener, child)
    finally:
        child.close()


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a taken port shows before the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror}). Choose another with --host "
            "and --port; --port 0 takes a free one."
        ) from error


def _raise_file_limit() -> None:
    """Allow as many open connections as the system lets us: each one is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < _FEW_OPEN_FILES:
        logger.warning("only %d files may be open: about as many connections (ulimit -Hn)", wanted)
