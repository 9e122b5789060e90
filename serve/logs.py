"""What the log looks like, in both processes: one line per event, on stderr."""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
# Libraries that report every request or every file at INFO.
_TALKATIVE = (
    "httpx",
    "httpx2",
    "httpcore",
    "huggingface_hub",
    "transformers",
    "uvicorn",
    "asyncio",
)


def configure(level: str) -> None:
    """Send our messages of `level` and above to stderr; libraries only speak up from WARNING.

    Call once at the start of a process; calling again changes the level.
    """
    logging.basicConfig(stream=sys.stderr, format=_FORMAT, datefmt="%H:%M:%S", force=True)
    logging.getLogger("serve").setLevel(level.upper())
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)


def level() -> str:
    """The level set by `configure`, for handing on to a child process."""
    return logging.getLevelName(logging.getLogger("serve").getEffectiveLevel()).lower()
