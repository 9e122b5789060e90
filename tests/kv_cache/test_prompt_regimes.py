"""Which lengths of prompts share blocks."""

from __future__ import annotations

from itertools import combinations

import pytest

from serve.kv_cache.prompt_regimes import PromptRegimes

LONGROPE, DYNAMIC = (8, False), (8, True)


def groups(regimes: PromptRegimes) -> list[list[int]]:
    """Lengths from 6 to 14, those that share together."""
    found: dict[str, list[int]] = {}
    for length in range(6, 15):
        found.setdefault(str(regimes.extras(length)), []).append(length)
    return list(found.values())


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([], [[6, 7, 8, 9, 10, 11, 12, 13, 14]]),
        ([LONGROPE], [[6, 7, 8], [9, 10, 11, 12, 13, 14]]),
        ([DYNAMIC], [[6, 7, 8], [9], [10], [11], [12], [13], [14]]),
        # layers of several kinds: what any of them tells apart is apart
        ([LONGROPE, (12, False)], [[6, 7, 8], [9, 10, 11, 12], [13, 14]]),
        ([LONGROPE, (12, True)], [[6, 7, 8], [9, 10, 11, 12], [13], [14]]),
        ([DYNAMIC, (12, False)], [[6, 7, 8], [9], [10], [11], [12], [13], [14]]),
    ],
)
def test_sch_41_lengths_share_when_no_rope_tells_them_apart(
    limits: list[tuple[int, bool]], expected: list[list[int]]
) -> None:
    assert groups(PromptRegimes(limits)) == expected


@pytest.mark.parametrize("limits", [[], [LONGROPE], [DYNAMIC], [LONGROPE, (12, True)]])
@pytest.mark.parametrize("prefix", [4, 7, 8, 11, 12, 13])
def test_sch_41_a_prefix_is_kept_for_every_group_of_longer_prompts(
    limits: list[tuple[int, bool]], prefix: int
) -> None:
    regimes = PromptRegimes(limits)
    longer = [regimes.extras(n) for n in range(prefix + 1, 40)]
    shared = [one for one, other in combinations(longer, 2) if one == other]
    kept = regimes.extras_beyond(prefix)
    assert all(extras in kept for extras in shared)
    assert all(extras in longer for extras in kept)


def test_other_models_hash_as_they_always_did() -> None:
    assert PromptRegimes().extras(5) == {}
    assert PromptRegimes().extras_beyond(5) == [{}]
