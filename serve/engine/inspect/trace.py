"""The step log as lines of JSON, and the file that collects them.

The format, one object per line, told apart by `type`; all times in seconds of one clock:

engine: what the engine was started with; the first line of a run. Runs follow one another.
step: its number, `began`, seconds per phase, its load by kind, queue lengths and pool use after it
  was planned, and who was in it with a chunk, was admitted, or was preempted.
request: one request's history, written at its end. `hash_ids` stand for its prompt's full blocks:
  equal prefixes have equal ids, and that is all that can be read from them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from serve.engine.inspect.step_log import EndedRequest, StepLog, StepRecord
from serve.errors import ConfigError
from serve.scheduler.view import SchedulerView

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1

Line = dict[str, Any]


class TraceFile:
    """An open trace, after what is in its file already; a new file is for us alone. A disk that
    fills up ends the trace, not the engine."""

    def __init__(self, path: Path, view: SchedulerView) -> None:
        """Raises ConfigError when the file cannot be written."""
        try:
            cut_short = _is_cut_short(path)
            self._file: BinaryIO | None = open(path, "ab", opener=_for_us_alone)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"--trace-file {path} cannot be written ({error.strerror})."
            ) from error
        if cut_short:
            self._write_text("\n")
        self._block_size = view.block_size
        self._write(engine_line(view))

    def step(self, record: StepRecord) -> None:
        """Append a step."""
        self._write(step_line(record))

    def end(self, ended: EndedRequest, hashes: Sequence[bytes]) -> None:
        """Append a request's history."""
        num_full = ended.num_prompt_tokens // self._block_size
        ids = [int.from_bytes(value[:6], "big") for value in hashes[:num_full]]
        self._write({**request_line(ended), "block_size": self._block_size, "hash_ids": ids})

    def close(self) -> None:
        """Nothing can be appended afterwards."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: Line) -> None:
        self._write_text(json.dumps(line, separators=(",", ":")) + "\n")

    def _write_text(self, text: str) -> None:
        """At once, so that what has happened is in the file even if we are killed."""
        if self._file is None:
            return
        try:
            self._file.write(text.encode())
            self._file.flush()
        except OSError as error:
            logger.error("the trace ends here: %s", error)
            with suppress(OSError):  # what could not be written cannot be written now either
                self._file.close()
            self._file = None


def _for_us_alone(path: str, flags: int) -> int:
    """A trace tells who asked for how much, and which prompts were alike."""
    return os.open(path, flags, 0o600)


def _is_cut_short(path: Path) -> bool:
    """Whether a file's last line has no end, because the disk was full or the machine went down."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def trace_lines(log: StepLog, view: SchedulerView) -> list[Line]:
    """Everything the log remembers; the requests without their `hash_ids`."""
    requests = [request_line(ended) for ended in log.ended]
    return [engine_line(view), *(step_line(record) for record in log.steps), *requests]


def engine_line(view: SchedulerView) -> Line:
    """Sizes and limits, as they are now."""
    return {
        "type": "engine",
        "version": FORMAT_VERSION,
        "block_size": view.block_size,
        "num_blocks": view.num_blocks,
        "num_host_blocks": view.num_host_blocks,
        "enable_prefix_caching": view.has_prefix_cache,
        "limits": asdict(view.limits),
    }


def step_line(record: StepRecord) -> Line:
    """A step in plain values."""
    step = record.opened
    chunks = step.changes.chunks
    chunk_tokens = sum(chunk.num_tokens for chunk in chunks)
    recomputed = sum(chunk.num_recomputed for chunk in chunks)
    return {
        "type": "step",
        "number": step.number,
        "began": step.began,
        "schedule_s": step.scheduled - step.began,
        "execute_s": record.execute_s,
        "update_s": record.update_s,
        "num_tokens": step.num_tokens,
        "num_chunk_tokens": chunk_tokens,
        "num_recomputed_tokens": recomputed,
        "num_chunk_pairs": sum(_pairs(chunk.start, chunk.num_tokens) for chunk in chunks),
        "num_decodes": step.num_requests - len(chunks),
        "num_drafts": step.num_drafts,
        "num_accepted": record.num_accepted,
        "num_context_tokens": step.num_context_tokens,
        "num_block_copies": step.num_swapped_out + step.num_swapped_in,
        "num_running": step.num_running,
        "num_waiting": step.num_waiting,
        "num_swapped": step.num_swapped,
        "num_blocks_used": step.num_blocks_used,
        "num_host_blocks_used": step.num_host_blocks_used,
        "chunks": [list(chunk) for chunk in chunks],
        "admitted": [list(change) for change in step.changes.admitted],
        "preempted": [list(change) for change in step.changes.preempted],
    }


def request_line(ended: EndedRequest) -> Line:
    """A request's history in plain values; also a line of a workload for `simulate`."""
    times = ended.times
    return {
        "type": "request",
        "id": ended.label,
        "arrival": times.arrival_time,
        "prompt_len": ended.num_prompt_tokens,
        "output_len": ended.num_generated_tokens,
        "priority": ended.priority,
        "reason": ended.reason.value,
        "first_scheduled": times.first_scheduled_time,
        "first_token": times.first_token_time,
        "finished": times.finished_time,
        "num_preemptions": times.num_preemptions,
        "num_cached_tokens": ended.num_cached_tokens,
    }


def _pairs(start: int, num_tokens: int) -> int:
    """(token, earlier token) pairs that a chunk attends over, itself included."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2
