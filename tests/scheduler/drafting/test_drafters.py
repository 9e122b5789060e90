"""What is guessed, from whose text, and how many guesses pay."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from serve.errors import ConfigError
from serve.messages import AddRequest
from serve.sampling_params import SamplingParams
from serve.scheduler.drafting import suffix
from serve.scheduler.drafting.length import (
    FIRST_RATE,
    LEAST_GAIN,
    NUM_REMEMBERED,
    Acceptance,
    RowCosts,
    best_lengths,
)
from serve.scheduler.drafting.ngram import NGramDrafter
from serve.scheduler.drafting.suffix import SuffixDrafter
from serve.scheduler.request import Request, make_request
from serve.speculative_config import SpeculativeConfig

SUFFIX = SpeculativeConfig(method="suffix", num_speculative_tokens=8)


def request(tokens: Sequence[int], *, client: str = "", salt: str | None = None) -> Request:
    sampling = SamplingParams(max_tokens=100, temperature=0.0)
    message = AddRequest("r", list(tokens), sampling, 0.0, client=client, cache_salt=salt)
    return make_request(message, (0, 0.0, 0), 16)


def last_match(tokens: Sequence[int], shortest: int, longest: int) -> tuple[int, int] | None:
    """(length, place behind it) of the most recent occurrence of as many last tokens as can be."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        pattern = list(tokens[-length:])
        for start in range(len(tokens) - length - 1, -1, -1):
            if list(tokens[start : start + length]) == pattern:
                return length, start + length
    return None


@pytest.mark.parametrize("largest_id", [2, 3, 300, 70_000, 2**31 - 1])
def test_ngrams_find_the_most_recent_occurrence_of_the_longest_match(largest_id: int) -> None:
    rng = Random(largest_id)
    for _ in range(300):
        few = [rng.randint(0, largest_id) for _ in range(4)]
        tokens = [rng.choice(few) for _ in range(rng.randint(1, 40))]
        draft = NGramDrafter(2, 5).propose(request(tokens), 6)
        found = last_match(tokens, 2, 5)
        if found is None:
            assert draft.token_ids == ()
            continue
        length, place = found
        assert draft.num_matched == length
        going_on = [*tokens]
        for i in range(6):
            going_on.append(going_on[place + i])
        assert list(draft.token_ids) == going_on[len(tokens) :]


def test_a_match_across_the_bytes_of_two_ids_is_none() -> None:
    # as bytes 01 00 00 00 | 00 01 00 00: the first id's pattern also lies across others
    tokens = [0x00000100, 0x00010000, 0x01000000, 0x00000001, 7, 0x00000001]
    draft = NGramDrafter(1, 1).propose(request(tokens), 1)
    assert list(draft.token_ids) == [7]
    assert NGramDrafter(1, 1).propose(request([0x00010000, 0x00000100]), 1).token_ids == ()


def test_ngrams_follow_a_request_that_grows_and_forget_one_that_is_over() -> None:
    drafter, asked = NGramDrafter(1, 3), request([1, 2, 3])
    assert drafter.propose(asked, 3).token_ids == ()
    asked.append([1])
    assert list(drafter.propose(asked, 3).token_ids) == [2, 3, 1]
    asked.append([2, 9])
    assert drafter.propose(asked, 3).token_ids == ()
    drafter.forget(asked)
    assert drafter._texts == {}


def test_suffixes_follow_the_longest_match_and_no_further_than_it_is_long() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 9, 3, 4, 8, 8, 1, 2, 3, 4]
    draft = SuffixDrafter(SUFFIX).propose(request(tokens), 8)
    assert (list(draft.token_ids), draft.num_matched) == ([5, 6, 7, 9], 4)
    assert list(SuffixDrafter(SUFFIX).propose(request(tokens), 2).token_ids) == [5, 6]


def test_suffixes_take_what_most_places_go_on_with() -> None:
    tokens = [1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 5, 3, 1, 2]
    draft = SuffixDrafter(SUFFIX).propose(request(tokens), 8)
    assert next(iter(draft.token_ids)) == 5
    strict = SpeculativeConfig(method="suffix", suffix_decoding_min_token_prob=0.9)
    assert list(SuffixDrafter(strict).propose(request(tokens), 8).token_ids) == []


def test_suffixes_of_earlier_answers_help_the_same_client_and_salt_alone() -> None:
    drafter = SuffixDrafter(SUFFIX)
    first = request([9], client="a", salt="s")
    first.append([1, 2, 3, 4, 5, 6])
    drafter.forget(first)
    same = request([8, 2, 3], client="a", salt="s")
    assert list(drafter.propose(same, 8).token_ids) == [4, 5]
    for other in (
        request([8, 2, 3], client="b", salt="s"),
        request([8, 2, 3], client="a", salt="t"),
        request([8, 2, 3], client="a"),
    ):
        assert list(drafter.propose(other, 8).token_ids) == []


def test_earlier_answers_are_few_and_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=2)
    drafter = SuffixDrafter(config)
    for number in range(5):
        asked = request([9], client=str(number % 3))
        asked.append([number, 1, 2, 3])
        drafter.forget(asked)
    assert len(drafter._answers) == 2
    assert len(drafter._earlier) == 2
    monkeypatch.setattr(suffix, "MOST_TOKENS", 3)
    asked = request([9])
    asked.append([7, 7, 7, 7])
    drafter.forget(asked)
    assert (drafter._answers, drafter._earlier, drafter._num_tokens) == ({}, {}, 0)


# ---------------------------------------------------------------------------- how many


def test_no_draft_pays_where_a_row_costs_its_share_and_all_do_where_it_is_free() -> None:
    dear = [float(n) for n in range(32, 64)]  # 32 streams, and a row costs a 32nd of the step
    assert best_lengths([0.9] * 32, [4] * 32, 32, dear) == [0] * 32
    free = [1.0] * 9
    assert best_lengths([0.5, 0.9], [4, 4], 2, free) == [4, 4]
    assert best_lengths([], [], 1, [1.0]) == []


def test_the_likeliest_drafts_are_taken_first() -> None:
    lengths = best_lengths([0.9, 0.2], [3, 3], 2, [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2])
    assert lengths[0] > lengths[1] == 0


def test_lengths_are_those_with_the_most_tokens_per_second() -> None:
    rng = Random(1)
    for _ in range(200):
        rate, most = rng.random(), rng.randint(1, 8)
        costs = [1.0]
        for _ in range(most):
            costs.append(costs[-1] + rng.random() / 2)
        speeds = [sum(rate**i for i in range(k + 1)) / costs[k] for k in range(most + 1)]
        (length,) = best_lengths([rate], [most], 1, costs)
        if max(speeds) > LEAST_GAIN * speeds[0]:
            assert speeds[length] == pytest.approx(max(speeds))
        else:
            assert length == 0


def test_costs_are_measured_where_tried_and_estimated_beside() -> None:
    costs = RowCosts()
    assert costs.curve(1, 4) is None
    costs.observe(1, 1.0)
    assert costs.curve(1, 3) == pytest.approx([1.0, 1.1, 1.2])
    costs.observe(5, 2.0)
    assert costs.curve(1, 5) == pytest.approx([1.0, 1.25, 1.5, 1.75, 2.0])
    costs.observe(3, 0.5)  # a bigger step is never taken to be cheaper
    curve = costs.curve(1, 5)
    assert curve is not None
    assert curve == sorted(curve)
    later = costs.curve(6, 8)
    assert later is not None
    assert later[0] > 2.0


def test_one_slow_step_is_no_measurement_and_old_ones_are_forgotten() -> None:
    costs = RowCosts()
    for _ in range(3):
        costs.observe(1, 1.0)
    for seconds in (2.0, 50.0, 2.0):
        costs.observe(2, seconds)
    assert costs.curve(1, 2) == [1.0, 2.0]
    for _ in range(2 * NUM_REMEMBERED):
        costs.observe(1, 1.0)
    assert costs.curve(1, 2) == pytest.approx([1.0, 1.1])


def test_who_is_wrong_is_drafted_for_less_and_tried_again_later() -> None:
    acceptance, asked = Acceptance(), request([1])
    assert acceptance.rate(asked, 3) == FIRST_RATE
    for _ in range(30):
        acceptance.verified(asked, 3, 4, 0)
    low = acceptance.rate(asked, 3)
    assert low < 0.05
    assert acceptance.rate(request([2]), 3) < 0.05  # others begin with what is known of all
    assert acceptance.rate(asked, 5) == FIRST_RATE
    for _ in range(200):
        acceptance.passed_over(asked)
    assert acceptance.rate(asked, 3) > 0.4
    for _ in range(30):
        acceptance.verified(asked, 3, 4, 4)
    assert acceptance.rate(asked, 3) > 0.95


# ---------------------------------------------------------------------------- the flag


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[]", "object"),
        ("{}", "method"),
        ('{"method": "eagle3"}', "ngram, suffix"),
        ('{"method": "ngram", "prompt_lookup": 3}', "'prompt_lookup'"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 1000}', "64"),
        ('{"method": "ngram", "num_speculative_tokens": "5"}', "whole number"),
        ('{"method": "ngram", "prompt_lookup_min": 6}', "prompt_lookup_min"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": 2}', "min_token_prob"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": NaN}', "max_spec_factor"),
        ('{"method": 3}', "text"),
    ],
)
def test_what_cannot_work_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match="--speculative-config") as error:
        SpeculativeConfig.read(text)
    assert named in str(error.value)


def test_vllms_keys_are_read() -> None:
    text = (
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 3,'
        ' "prompt_lookup_max": 4, "disable_by_batch_size": null}'
    )
    assert SpeculativeConfig.read(text) == SpeculativeConfig(
        method="ngram", num_speculative_tokens=5, prompt_lookup_min=3, prompt_lookup_max=4
    )
    whole = SpeculativeConfig.read('{"method": "suffix", "suffix_decoding_max_spec_factor": 2}')
    assert whole.suffix_decoding_max_spec_factor == 2
