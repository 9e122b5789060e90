"""Messages as bytes, and the socket that carries them: one ZeroMQ pair over a private unix socket.

A frame is one byte for the type, from a fixed table, and the plain dataclass as msgpack. Nothing in
it can name code (there is no pickle), and what does not have the type's shape is refused.
Neither side ever waits for the other to read: what is sent is kept until it is taken.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.messages import (
    AbortRequests,
    AddRequest,
    Control,
    ControlResult,
    EngineDied,
    EngineReady,
    FromEngine,
    Shutdown,
    StepOutputs,
    ToEngine,
)

LAST_WORDS_MS = 2000
"""How long an ending engine waits for its last message to leave."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The first message to an engine process: what to build, and how much to log."""

    config: EngineConfig
    model_path: str
    log_level: str


Message = Launch | ToEngine | FromEngine
TYPES = (
    Launch,
    AddRequest,
    AbortRequests,
    Shutdown,
    EngineReady,
    StepOutputs,
    EngineDied,
    Control,
    ControlResult,
)


class Codec:
    """Messages ↔ frames."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._tags = {message_type: bytes([i]) for i, message_type in enumerate(TYPES)}
        self._decoders: list[msgspec.msgpack.Decoder[Message]] = [
            msgspec.msgpack.Decoder(t, dec_hook=_rebuild) for t in TYPES
        ]

    def encode(self, message: Message) -> bytes:
        """One frame."""
        return self._tags[type(message)] + self._encoder.encode(message)

    def decode(self, frame: bytes) -> Message:
        """The message. Raises msgspec.ValidationError for a frame that is none."""
        return self._decoders[frame[0]].decode(memoryview(frame)[1:])


class FrontSocket:
    """The front's end, on its event loop.

    The socket's name is gone as soon as it is bound, so that nothing is left behind if we are
    killed, and nobody finds it: the engine connects by `address_fd`, which it must inherit.
    """

    def __init__(self) -> None:
        self._codec = Codec()
        self._context = zmq.asyncio.Context()
        self._socket = _unbounded(self._context.socket(zmq.PAIR))
        folder = Path(tempfile.mkdtemp(prefix="serve-llm-"))  # mode 0700
        try:
            self._socket.bind(f"ipc://{folder / 'engine'}")
            self.address_fd = os.open(folder / "engine", os.O_PATH)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"No socket could be made in {folder} ({error}); set TMPDIR to a folder with a "
                "short path that can be written."
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.address = f"ipc:///proc/self/fd/{self.address_fd}"
        self._has_address = True

    def send(self, message: Message) -> None:
        """Queue a message, also while the engine has not connected yet."""
        self._socket.send(self._codec.encode(message))

    async def receive(self) -> FromEngine:
        """The engine's next message."""
        message = self._codec.decode(await self._socket.recv())
        assert isinstance(message, FromEngine), message
        return message

    def forget_address(self) -> None:
        """The engine has connected: no other can."""
        if self._has_address:
            os.close(self.address_fd)
            self._has_address = False

    def close(self) -> None:
        """Drop what was not sent."""
        self._context.destroy(linger=0)
        self.forget_address()


class EngineSocket:
    """The engine's end: its Inbox and its Outbox."""

    def __init__(self, address: str) -> None:
        self._codec = Codec()
        self._context = zmq.Context()
        self._socket = _unbounded(self._context.socket(zmq.PAIR))
        self._socket.connect(address)

    def receive_launch(self) -> Launch:
        """Wait for the first message."""
        message = self._codec.decode(self._socket.recv())
        assert isinstance(message, Launch), message
        return message

    def drain(self, block: bool) -> list[ToEngine]:
        """All messages that are there. With `block`, waits until there is one."""
        messages: list[ToEngine] = []
        while block or self._socket.poll(0):
            message = self._codec.decode(self._socket.recv())
            assert isinstance(message, ToEngine), message
            messages.append(message)
            block = False
        return messages

    def send(self, message: FromEngine) -> None:
        """Queue a message; never blocks."""
        self._socket.send(self._codec.encode(message))

    def close(self) -> None:
        """Let the last message leave."""
        self._context.destroy(linger=LAST_WORDS_MS)


S = TypeVar("S", bound="zmq.Socket[Any]")


def _unbounded(socket: S) -> S:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


def _plain(value: object) -> int:
    """Numbers with a notation of their own travel as numbers."""
    if isinstance(value, int):
        return int(value)
    raise NotImplementedError(type(value))


def _rebuild(wanted: type, value: object) -> object:
    return wanted(value)
