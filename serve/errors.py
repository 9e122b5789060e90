"""What goes wrong on purpose, as all rooms know it; what HTTP alone refuses is in `api/errors.py`.

ServeError
 ├─ ConfigError           start-up: a flag, a model folder, the machine. One line, exit code 1.
 ├─ RequestError          the caller's request is wrong or cannot be taken now (HTTP 4xx)
 │   ├─ InvalidRequest      400: a field is wrong; `param` names it as a path
 │   ├─ PromptTooLong       400: prompt (+ max_tokens) exceeds the context or the KV pool
 │   ├─ ModelNotFound       404
 │   ├─ DeadlinePassed      504: it waited longer than the caller's own timeout
 │   ├─ QueueFull           429: too much waiting; `retry_after_s` says when to come back
 │   │   ├─ QueuedTooLong     503: it waited longer than the server lets anything wait
 │   │   └─ RateLimited       429: a limit of the client's own (--limits-file)
 │   └─ RequestAborted      499: ended on somebody's request before it was done
 └─ EngineError           our failure (HTTP 5xx)
     ├─ EngineDead          503: the engine process ended
     │   └─ ShuttingDown      503: it is being ended, with the server
     ├─ EngineSilent        503: the engine owes answers and shows no life
     └─ StepFailed          500: a step failed; its requests end, the others go on
         └─ OutOfMemory         the device had no memory for it
"""

from __future__ import annotations


class ServeError(Exception):
    """Base of all errors above; `str(error)` is a sentence for a person."""


class ConfigError(ServeError):
    """Start-up cannot go on: names the flag or file, what is wrong, and what to do."""


class RequestError(ServeError):
    """The caller's fault: says what was sent, the limit, and what to do.

    `param` is the path of the field at fault (`messages.0.content`), or None.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field of the request is wrong."""


class PromptTooLong(RequestError):
    """Prompt, or prompt plus `max_tokens`, does not fit the context or the KV pool."""


class ModelNotFound(RequestError):
    """The request names a model that is not served here."""


class QueueFull(RequestError):
    """Too much work is waiting."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestAborted(RequestError):
    """The request was ended from outside, by its id."""


class QueuedTooLong(QueueFull):
    """The request was taken, but did not begin within `--max-queue-time`."""


class RateLimited(QueueFull):
    """The client has reached a limit that is its own."""


class DeadlinePassed(RequestError):
    """The request did not begin within its own `timeout`."""


class EngineError(ServeError):
    """The server's fault."""


class EngineDead(EngineError):
    """The engine process ended; nothing can be generated any more."""


class EngineRestarting(EngineError):
    """The engine process ended and is being started again: requests wait until it is back."""


class ShuttingDown(EngineDead):
    """The server is being stopped: another, or the next one, can do it."""


class EngineSilent(EngineError):
    """The engine has not shown life for too long; it may yet go on."""


class StepFailed(EngineError):
    """A step of the engine failed; the requests in it are over, the engine goes on."""


class OutOfMemory(StepFailed):
    """The device had no memory for a step: says how large both are, and which flags to change."""
