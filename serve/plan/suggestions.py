"""Flags that suit a plan, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from serve.plan.capacity import Capacity

_USUAL_LENGTH = 2048
_FEW_LONGEST = 2.0  # requests of the greatest length in the pool, below which it is soon full


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A flag with its value, and why."""

    flag: str
    reason: str


def suggest(capacity: Capacity) -> list[Suggestion]:
    """What to set for this model and machine; nothing where the defaults will do."""
    cache, footprint = capacity.cache, capacity.footprint
    if cache is None:
        return _to_make_it_fit(capacity)
    found = []
    pool_tokens = cache.num_blocks * capacity.block_size
    if cache.max_model_len < footprint.max_position:
        found.append(
            Suggestion(
                f"--max-model-len {cache.max_model_len}",
                f"the pool cannot hold the model's {footprint.max_position:,} tokens of context",
            )
        )
    usual = min(_USUAL_LENGTH, cache.max_model_len)
    at_once = max(1, pool_tokens // usual)
    if at_once < capacity.max_num_seqs:
        found.append(
            Suggestion(
                f"--max-num-seqs {at_once}",
                f"more requests of {usual:,} tokens do not fit at once and would be preempted",
            )
        )
    if pool_tokens < _FEW_LONGEST * cache.max_model_len and cache.num_host_blocks == 0:
        found.append(
            Suggestion(
                "--preemption-mode auto",
                "two requests of the greatest length already fill the pool; long ones cost less "
                "to swap than to compute again",
            )
        )
    return found


def _to_make_it_fit(capacity: Capacity) -> list[Suggestion]:
    smaller = {
        name: size
        for name, size in capacity.weight_bytes_by_dtype.items()
        if size < capacity.footprint.weight_bytes
    }
    if not smaller:
        return []
    name = min(smaller, key=lambda n: smaller[n])
    return [Suggestion(f"--dtype {name}", f"the weights then take {smaller[name]:,} bytes")]
