"""What the front may ask of a running engine beside generating: to be shown something, or to change
a limit. Between two steps, by the thread that owns the scheduler."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

from serve.engine.inspect.explain import explain_requests, scheduler_state
from serve.engine.inspect.prefix_controls import PrefixControls
from serve.engine.inspect.settings import LIVE_SETTINGS, live_settings
from serve.engine.inspect.step_log import StepLog
from serve.engine.inspect.trace import trace_lines
from serve.errors import InvalidRequest
from serve.messages import Control, ControlResult
from serve.scheduler.limits import SchedulerLimits, as_limit
from serve.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_SIZED_AT_START = ("max_num_seqs", "max_num_batched_tokens")


class Controls:
    """Answers control messages."""

    def __init__(self, scheduler: Scheduler, log: StepLog) -> None:
        self._scheduler = scheduler
        self._first_limits = scheduler.limits
        prefixes = PrefixControls(scheduler.kv, scheduler.clock)
        self._answers: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "state": lambda args: scheduler_state(scheduler.view(), log),
            "requests": lambda args: explain_requests(scheduler.view(), log, args["request_id"]),
            "trace": lambda args: trace_lines(log, scheduler.view()),
            "settings": lambda args: live_settings(scheduler.limits),
            "configure": self._configure,
            "pin": prefixes.pin,
            "unpin": prefixes.unpin,
            "pins": prefixes.pins,
            "reset_prefix_cache": prefixes.reset,
        }

    def answer(self, message: Control) -> ControlResult:
        """Do what a message asks; an impossible change is an answer, too."""
        try:
            value = self._answers[message.name](message.args)
        except InvalidRequest as error:
            return ControlResult(message.call_id, error=str(error), param=error.param)
        return ControlResult(message.call_id, value)

    def _configure(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change limits from the next step on; all of them or, with InvalidRequest, none."""
        old = self._scheduler.limits
        for name, value in changes.items():
            self._check(name, value)
        renamed = dict(as_limit(name, value) for name, value in changes.items())
        try:
            new = dataclasses.replace(old, **renamed)
        except ValueError as error:
            raise InvalidRequest(f"{error}.") from error
        before, now = live_settings(old), live_settings(new)
        self._scheduler.set_limits(new)
        for name, value in now.items():
            if value != before[name]:
                logger.info("changed while running: %s from %s to %s", name, before[name], value)
        return now

    def _check(self, name: str, value: object) -> None:
        if name not in LIVE_SETTINGS:
            known = ", ".join(LIVE_SETTINGS)
            raise InvalidRequest(f"{name} cannot be changed; {known} can.", param=name)
        limit, _ = as_limit(name, None)
        wanted = get_type_hints(SchedulerLimits)[limit]
        if not _fits(value, wanted):
            raise InvalidRequest(f"{name} cannot be {value!r}; it is {_spell(wanted)}.", param=name)
        if name in _SIZED_AT_START:
            most = getattr(self._first_limits, limit)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise InvalidRequest(
                    f"{name} must be between 1 and {most}, for which memory was set aside at the "
                    "start.",
                    param=name,
                )
        elif isinstance(value, int | float):
            is_optional = type(None) in get_args(wanted)
            if value < 0 or (is_optional and value == 0) or not math.isfinite(value):
                raise InvalidRequest(f"{name} cannot be {value}.", param=name)
        if (
            name == "preemption_mode"
            and value == "swap"
            and not self._scheduler.view().num_host_blocks
        ):
            raise InvalidRequest(
                "preemption_mode cannot become swap: the server was started without swap space "
                "(--preemption-mode auto sets it up).",
                param=name,
            )


def _fits(value: object, wanted: Any) -> bool:
    """Whether a JSON value has the type of a limit; whole numbers are numbers, truth values not."""
    choices = get_args(wanted)
    if choices and isinstance(choices[0], str):
        return value in choices
    if value is None:
        return type(None) in choices
    kinds = choices or (wanted,)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, int) if int in kinds else isinstance(value, int | float)


def _spell(wanted: Any) -> str:
    choices = get_args(wanted)
    if choices and isinstance(choices[0], str):
        return "one of " + ", ".join(choices)
    if wanted is bool:
        return "true or false"
    if int in (choices or (wanted,)):
        return "a whole number or null" if choices else "a whole number"
    return "a number"
