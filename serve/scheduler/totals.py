"""What has happened since the engine's start, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve.kv_cache.manager import KVCacheManager
from serve.messages import EngineStats
from serve.scheduler.policy.victims import PreemptionMode


@dataclass(slots=True)
class Totals:
    """Changed only by Scheduler. All but `step_tokens` only grow."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens looked up, when a request first runs
    prefix_cache_hits: int = 0  # tokens found
    tokens_to_recompute: int = 0  # computed tokens that preemption dropped
    blocks_swapped: int = 0  # out and in
    preemptions: dict[PreemptionMode, int] = field(
        default_factory=lambda: dict.fromkeys(PreemptionMode, 0)
    )
    spec_drafts: int = 0  # shares of steps that had drafts in them
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    spec_accepted_per_pos: tuple[int, ...] = ()  # by the draft's number among its share's
    step_tokens: list[int] = field(default_factory=list)  # of steps retired since last taken

    def stats(
        self, kv: KVCacheManager, *, num_running: int, num_waiting: int, num_swapped: int
    ) -> EngineStats:
        """The message to the front. Step sizes are handed over: each is told once."""
        step_tokens, self.step_tokens = self.step_tokens, []
        return EngineStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_swapped=num_swapped,
            num_blocks_used=kv.num_blocks_used,
            num_blocks=kv.num_blocks,
            num_host_blocks_used=kv.num_host_blocks_used,
            num_host_blocks=kv.num_host_blocks,
            num_blocks_cached=kv.prefixes.num_blocks,
            num_blocks_pinned=kv.prefixes.num_pinned,
            total_preemptions_recompute=self.preemptions[PreemptionMode.RECOMPUTE],
            total_preemptions_swap=self.preemptions[PreemptionMode.SWAP],
            total_prompt_tokens=self.prompt_tokens,
            total_generation_tokens=self.generation_tokens,
            total_prefix_cache_queries=self.prefix_cache_queries,
            total_prefix_cache_hits=self.prefix_cache_hits,
            total_preemption_tokens_recomputed=self.tokens_to_recompute,
            total_preemption_blocks_swapped=self.blocks_swapped,
            total_spec_drafts=self.spec_drafts,
            total_spec_draft_tokens=self.spec_draft_tokens,
            total_spec_accepted_tokens=self.spec_accepted_tokens,
            spec_accepted_per_pos=self.spec_accepted_per_pos,
            step_tokens=step_tokens,
        )
