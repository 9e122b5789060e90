"""What the scheduler may do in a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, Self

from serve.config import Limit, SchedulerConfig

VictimPolicy = Literal["last-admitted", "least-progress", "most-blocks", "cheapest"]
"""Which of the least urgent running requests makes room."""


@dataclass(frozen=True)  # without slots: `max_share` is kept
class SchedulerLimits:
    """Resolved limits; `config.SchedulerConfig` says what each means to an operator.

    Raises ValueError when whole prompts could be larger than a step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    delay_factor: float = 0.0
    preemption_mode: Literal["recompute", "swap", "auto"] = "recompute"
    preemption_victim: VictimPolicy = "last-admitted"
    thrash_guard: bool = True
    policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    priority_aging_s: float = 60.0
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_queue_time_s: float | None = None
    target_itl_s: float | None = None
    step_order: Literal["decode-first", "prefill-first"] = "decode-first"
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    fair_prefill: bool = True

    def __post_init__(self) -> None:
        assert self.max_num_seqs >= 1, self.max_num_seqs
        assert self.max_num_batched_tokens >= 1, self.max_num_batched_tokens
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill a step must hold a whole prompt, but "
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and "
                f"max_model_len is {self.max_model_len}"
            )

    @classmethod
    def of(
        cls, config: SchedulerConfig, *, max_num_batched_tokens: int, max_model_len: int
    ) -> Self:
        """Those that the settings say, beside what was decided at the start."""
        values = dict(as_limit(name, getattr(config, name)) for name in SETTINGS)
        decided = {"max_num_batched_tokens": max_num_batched_tokens}
        return cls(**{**values, **decided}, max_model_len=max_model_len)

    @cached_property
    def max_share(self) -> int:
        """Most tokens one request gets in a step; prompts above it are long.

        Several partial prefills need a share below the budget, or the first takes it all: 4 % of
        the context unless set, as in vLLM before its version 1.
        """
        if not self.enable_chunked_prefill:
            return self.max_num_batched_tokens
        if self.long_prefill_token_threshold:
            return min(self.long_prefill_token_threshold, self.max_num_batched_tokens)
        if self.max_num_partial_prefills is not None and self.max_num_partial_prefills > 1:
            return max(1, min(self.max_model_len * 4 // 100, self.max_num_batched_tokens))
        return self.max_num_batched_tokens


SETTINGS: Mapping[str, Limit] = MappingProxyType(
    {f.name: f.metadata["limit"] for f in fields(SchedulerConfig) if "limit" in f.metadata}
)
"""The settings that are limits, by their flags' names."""


def as_limit(setting: str, value: Any) -> tuple[str, Any]:
    """A setting's value as the limit that it is: its name there, and its value."""
    limit = SETTINGS[setting]
    return limit.name or setting, value if limit.unit == 1 or value is None else value * limit.unit


def as_setting(setting: str, limits: Mapping[str, Any]) -> Any:
    """The value of a setting, given all limits by name."""
    limit = SETTINGS[setting]
    value = limits[limit.name or setting]
    return value if limit.unit == 1 or value is None else round(value / limit.unit, 9)


def within(count: int, limit: int | None) -> bool:
    """Whether there may be one more."""
    return limit is None or count < limit


def kv_tokens_at_most(num_prompt_tokens: int, max_tokens: int) -> int:
    """Tokens whose KV a request may need: all but the last one it may produce."""
    return num_prompt_tokens + max(0, max_tokens - 1)
