"""A drafter for the fake model that is right as often as it likes, and drafts whenever it can."""

from __future__ import annotations

from random import Random

from serve.kv_cache.manager import KVCacheManager
from serve.scheduler.drafting.drafter import Draft
from serve.scheduler.drafting.speculator import Speculator, make_speculator
from serve.scheduler.request import Request
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.totals import Totals
from serve.speculative_config import SpeculativeConfig
from tests.fakes import VOCAB_SIZE, extend_hash, hash_tokens, next_token

CONFIG = SpeculativeConfig(method="ngram", num_speculative_tokens=5)


class Oracle:
    """So many right tokens, then wrong ones; more than asked for at times. Knows whose it keeps."""

    def __init__(self) -> None:
        self.kept: set[Request] = set()

    def propose(self, request: Request, most: int) -> Draft:
        self.kept.add(request)
        rng = Random(f"{request.request_id} {len(request.token_ids)}")
        num_right, tokens = rng.choice([0, 1, most // 2, most, most]), []
        value = hash_tokens(request.token_ids)
        for number in range(rng.randint(0, most)):
            token_id = next_token(value) if number < num_right else rng.randrange(VOCAB_SIZE)
            tokens.append(token_id)
            value = extend_hash(value, token_id)
        return Draft(tokens, rng.randint(1, 9))

    def forget(self, request: Request) -> None:
        self.kept.discard(request)


class FreeRows:
    """Every row costs nothing, so that every draft pays."""

    def curve(self, first: int, last: int) -> list[float]:
        return [1.0] * (last - first + 1)

    def observe(self, num_rows: int, duration_s: float) -> None:
        assert num_rows > 0


def make_eager(config: SpeculativeConfig, kv: KVCacheManager, totals: Totals) -> Speculator:
    """A speculator that drafts all it may."""
    speculator = make_speculator(config, kv, totals)
    speculator._drafter, speculator._costs = Oracle(), FreeRows()  # type: ignore[assignment]
    return speculator


def speculate(scheduler: Scheduler) -> Oracle:
    """Let a new scheduler guess whatever it can."""
    speculator = make_eager(CONFIG, scheduler.kv, scheduler._totals)
    scheduler._speculator = scheduler._results._speculator = speculator
    assert isinstance(speculator._drafter, Oracle)
    return speculator._drafter


def check_figures(scheduler: Scheduler) -> None:
    """What was drafted and what came of it add up."""
    stats = scheduler.stats()
    assert stats.total_spec_drafts <= stats.total_spec_draft_tokens
    assert stats.total_spec_accepted_tokens <= stats.total_spec_draft_tokens
    per_pos = stats.spec_accepted_per_pos
    assert sum(per_pos) == stats.total_spec_accepted_tokens
    assert list(per_pos) == sorted(per_pos, reverse=True)
