"""What a step costs: a linear model of its load."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from serve.scheduler.output import SchedulerOutput


class StepLoad(NamedTuple):
    """What a step's duration depends on. A share of one token is a decode, a longer one a chunk."""

    num_chunk_tokens: int = 0
    num_chunk_pairs: int = 0  # (token, earlier token) pairs that chunks attend over
    num_decodes: int = 0
    num_context_tokens: int = 0  # KV that decodes read
    num_block_copies: int = 0  # out or in


def load_of(plan: SchedulerOutput) -> StepLoad:
    """The load of a plan."""
    chunk_tokens = pairs = decodes = context = 0
    for _, start, num_tokens, _, _, _ in plan.scheduled:
        if num_tokens == 1:
            decodes += 1
            context += start + 1
        else:
            chunk_tokens += num_tokens
            pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2
    return StepLoad(chunk_tokens, pairs, decodes, context, len(plan.swap_out) + len(plan.swap_in))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Seconds per step, and per unit of each part of its load."""

    step_s: float
    chunk_token_s: float = 0.0
    chunk_pair_s: float = 0.0
    decode_s: float = 0.0
    context_token_s: float = 0.0
    block_copy_s: float = 0.0

    def seconds(self, load: StepLoad) -> float:
        """How long a step takes."""
        return (
            self.step_s
            + self.chunk_token_s * load.num_chunk_tokens
            + self.chunk_pair_s * load.num_chunk_pairs
            + self.decode_s * load.num_decodes
            + self.context_token_s * load.num_context_tokens
            + self.block_copy_s * load.num_block_copies
        )

    def as_dict(self) -> dict[str, float]:
        """By field name."""
        return asdict(self)
