from __future__ import annotations

import pytest
import torch

from serve.sampling_params import SamplingParams
from tests.worker.harness import Asked, make_rows, row_data

PLAIN = SamplingParams(temperature=0.0)


def test_rows_are_fixed_while_held_and_used_again_after_release() -> None:
    rows = make_rows(10, num_rows=2)
    rows.admit(row_data("a", Asked(PLAIN)))
    rows.admit(row_data("b", Asked(PLAIN)))
    first = rows.rows_of(["a"])[0]
    rows.release(["b"])
    rows.admit(row_data("c", Asked(PLAIN)))
    assert rows.rows_of(["a"])[0] == first
    assert {rows.rows_of(["a"])[0], rows.rows_of(["c"])[0]} == {0, 1}
    with pytest.raises(KeyError):
        rows.rows_of(["b"])[0]


def test_releasing_what_has_no_row_is_harmless() -> None:
    rows = make_rows(10, num_rows=1)
    rows.release(["never seen"])
    rows.admit(row_data("a", Asked(PLAIN)))
    rows.release(["a", "a"])
    rows.admit(row_data("b", Asked(PLAIN)))


def test_a_reused_row_has_null_blocks_past_its_table() -> None:
    rows = make_rows(10, num_rows=1, max_blocks=6)
    rows.admit(row_data("a", Asked(PLAIN), block_ids=[5, 6, 7]))
    rows.append_blocks("a", [8, 9])
    assert rows.block_table[0].tolist() == [5, 6, 7, 8, 9, 0]
    rows.release(["a"])
    rows.admit(row_data("b", Asked(PLAIN), block_ids=[3]))
    assert rows.block_table[0].tolist() == [3, 0, 0, 0, 0, 0]


def test_sampled_tokens_are_noted_where_the_next_step_and_the_penalties_find_them() -> None:
    rows = make_rows(10)
    rows.admit(row_data("plain", Asked(PLAIN)))
    penalized = SamplingParams(seed=1, presence_penalty=1.0, bad_words_token_ids=((1, 2),))
    rows.admit(row_data("penalized", Asked(penalized, prompt=[3])))
    numbers = torch.tensor([rows.rows_of(["plain"])[0], rows.rows_of(["penalized"])[0]])
    rows.record(numbers.numpy(), numbers, torch.tensor([7, 8]))
    assert rows.last_token[numbers].tolist() == [7, 8]
    generated, _ = rows.counts.of(numbers[1:].numpy())
    assert generated[0].nonzero().flatten().tolist() == [8]
    assert rows.recent_tokens.of(numbers[1:].numpy()).tolist() == [[8]]


def test_a_prompt_is_scored_only_before_the_first_generated_token() -> None:
    asked = SamplingParams(seed=1, prompt_logprobs=1)
    rows = make_rows(10)
    rows.admit(row_data("new", Asked(asked, prompt=[1, 2])))
    rows.admit(row_data("back", Asked(asked, prompt=[1, 2], generated=[3])))
    rows.admit(row_data("silent", Asked(PLAIN, prompt=[1, 2])))
    assert rows.prompts_to_score == {"new": [1, 2]}
    rows.release(["new"])
    assert rows.prompts_to_score == {}
