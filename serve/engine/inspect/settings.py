"""The scheduler's settings under their flags' names, which are the only ones that people see."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from serve.scheduler.limits import SchedulerLimits

LIVE_SETTINGS: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "max_num_seqs": ("max_num_seqs", 1),
        "max_num_batched_tokens": ("max_num_batched_tokens", 1),
        "target_itl_ms": ("target_itl_s", 1e-3),
        "preemption_mode": ("preemption_mode", 1),
        "preemption_victim": ("preemption_victim", 1),
        "thrash_guard": ("thrash_guard", 1),
        "scheduling_policy": ("policy", 1),
        "priority_aging_time": ("priority_aging_s", 1),
        "step_order": ("step_order", 1),
        "scheduler_delay_factor": ("delay_factor", 1),
        "long_prefill_token_threshold": ("long_prefill_token_threshold", 1),
        "max_num_partial_prefills": ("max_num_partial_prefills", 1),
        "max_long_partial_prefills": ("max_long_partial_prefills", 1),
        "fair_prefill": ("fair_prefill", 1),
        "max_num_queued_reqs": ("max_num_queued_reqs", 1),
        "max_num_queued_tokens": ("max_num_queued_tokens", 1),
    }
)
"""Settings that may change while the engine runs, by their flag's name: the limit that each is, and
its unit in the limit's."""

FIXED_SETTINGS: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "max_model_len": ("max_model_len", 1),
        "enable_chunked_prefill": ("enable_chunked_prefill", 1),
        "max_queue_time": ("max_queue_time_s", 1),
    }
)
"""Settings that stay as they were at the start, in the same form."""


def live_settings(limits: SchedulerLimits) -> dict[str, Any]:
    """What may change, as it is: a document that could be sent back as a change."""
    return _named(limits, LIVE_SETTINGS)


def all_settings(limits: SchedulerLimits) -> dict[str, Any]:
    """The same and what may not."""
    return {**live_settings(limits), **_named(limits, FIXED_SETTINGS)}


def as_limit(name: str, value: Any) -> tuple[str, Any]:
    """A live setting's value as the limit that it is: its name there, and its value."""
    limit, unit = LIVE_SETTINGS[name]
    return limit, value if unit == 1 or value is None else value * unit


def _named(limits: SchedulerLimits, names: Mapping[str, tuple[str, float]]) -> dict[str, Any]:
    values = {}
    for name, (limit, unit) in names.items():
        value = getattr(limits, limit)
        values[name] = value if unit == 1 or value is None else round(value / unit, 9)
    return values
