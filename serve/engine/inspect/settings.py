"""The scheduler's settings under their flags' names, which are the only ones that people see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve.scheduler.limits import SETTINGS, SchedulerLimits, as_setting

LIVE_SETTINGS = tuple(name for name, limit in SETTINGS.items() if limit.is_live)
"""Settings that may change while the engine runs."""


def live_settings(limits: SchedulerLimits) -> dict[str, Any]:
    """What may change, as it is: a document that could be sent back as a change."""
    return {name: as_setting(name, vars(limits)) for name in LIVE_SETTINGS}


def settings_of(limits: Mapping[str, Any]) -> dict[str, Any]:
    """All settings, given the limits by name."""
    return {name: as_setting(name, limits) for name in SETTINGS}


def all_settings(limits: SchedulerLimits) -> dict[str, Any]:
    """The same and what may not."""
    return {**settings_of(vars(limits)), "max_model_len": limits.max_model_len}
