"""Progress bars on stderr. rich is imported when there is one: that takes as long as loading a
small model."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class _Bar:
    """A bar while the context is open."""

    _progress: Progress | None  # None: nothing is shown
    _task: TaskID

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


class StartBar(_Bar):
    """How far a part of the start is. On a terminal only, and gone afterwards: elsewhere the log
    line at the end is enough."""

    def __init__(self, what: str, total: int) -> None:
        self._progress = None
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn(what),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("", total=total)

    def advance(self, count: int = 1) -> None:
        """So much more is done."""
        if self._progress is not None:
            self._progress.advance(self._task, count)


class BatchBar(_Bar):
    """How far a batch of generations is: done, tokens, failed, time."""

    def __init__(self, what: str, total: int, *, shown: bool) -> None:
        self._progress = None
        self._num_tokens = self._num_failed = 0
        if not shown:
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._progress = Progress(
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens{task.fields[failed]}"),
            TimeElapsedColumn(),
            refresh_per_second=2,  # what generates needs the cores
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=total, tokens=0, failed="")

    def advance(self, num_tokens: int, *, done: int, failed: int = 0) -> None:
        """Note new tokens, and how many generations ended or failed with them."""
        if self._progress is None:
            return
        self._num_tokens += num_tokens
        self._num_failed += failed
        told = f", {self._num_failed} failed" if self._num_failed else ""
        self._progress.update(self._task, advance=done, tokens=self._num_tokens, failed=told)
