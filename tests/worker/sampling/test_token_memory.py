from __future__ import annotations

import numpy as np
import torch

from serve.worker.sampling.token_memory import RecentTokens, SlotMap, TokenCounts
from tests.worker.harness import cpu


def rows(*numbers: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.array(numbers, dtype=np.int64)


def test_slots_of_released_rows_are_used_again_and_rows_without_one_may_be_released() -> None:
    slots = SlotMap()
    assert [slots.take(row) for row in (30, 10, 20)] == [0, 1, 2]
    slots.release(10)
    slots.release(99)
    assert slots.take(5) == 1
    assert slots.take(6) == 3
    assert slots[rows(6, 5, 30)].tolist() == [3, 1, 0]


def test_counts_tell_prompt_from_generated_tokens_and_grow_on_the_device() -> None:
    counts = TokenCounts(6, cpu())
    for row in range(9):  # more than the first allocation holds
        counts.admit(row, [0, 0, 5, row % 6], num_prompt_tokens=3)
    counts.add(rows(8, 2), torch.tensor([1, 2]))
    counts.add(rows(8), torch.tensor([1]))
    generated, in_prompt = counts.of(rows(8, 2, 3))
    assert generated.tolist() == [[0, 2, 1, 0, 0, 0], [0, 0, 2, 0, 0, 0], [0, 0, 0, 1, 0, 0]]
    assert in_prompt.tolist() == [[True, False, False, False, False, True]] * 3


def test_a_reused_slot_remembers_nothing_of_its_last_owner() -> None:
    counts, last = TokenCounts(4, cpu()), RecentTokens(cpu())
    for memory in (
        lambda: counts.admit(0, [1, 2, 3], 1),
        lambda: last.admit(0, [1, 2, 3], 3),
    ):
        memory()
    counts.release(0)
    last.release(0)
    counts.admit(7, [0], 1)
    last.admit(7, [0], 2)
    generated, in_prompt = counts.of(rows(7))
    assert generated.sum() == 0
    assert in_prompt.tolist() == [[True, False, False, False]]
    assert last.of(rows(7)).tolist() == [[-1, -1, 0]]


def test_recent_tokens_slide_and_may_become_wider() -> None:
    last = RecentTokens(cpu())
    last.admit(1, [5, 6, 7], 2)
    assert last.of(rows(1)).tolist() == [[6, 7]]
    last.admit(2, [9], 3)
    last.add(rows(2, 1), torch.tensor([8, 4]))
    assert last.of(rows(1, 2)).tolist() == [[6, 7, 4], [-1, 9, 8]]


def test_a_start_of_no_tokens_needs_no_memory() -> None:
    last = RecentTokens(cpu())
    last.admit(1, [5, 6], 0)
    assert last.of(rows(1)).shape == (1, 0)
    last.add(rows(1), torch.tensor([8]))
    assert last.of(rows(1)).shape == (1, 0)
