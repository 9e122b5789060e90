"""Penalties, bias and bans, seen through the tokens they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from serve.sampling_params import SamplingParams
from serve.worker.sampling.listed_tokens import longest_start
from serve.worker.sampling.logit_edits import BANNED, LogitEditor
from tests.worker.harness import Asked, cpu, make_rows, row_data, sample

VOCAB = 12


def edited(logits: Tensor, asked: Sequence[Asked]) -> Tensor:
    """Logits after the edits of these requests."""
    rows = make_rows(VOCAB)
    for number, request in enumerate(asked):
        rows.admit(row_data(str(number), request))
    editor = LogitEditor(rows.columns, rows.counts, rows.recent_tokens, cpu().uploads(0))
    result = logits.clone()
    numbers = rows.rows_of([str(n) for n in range(len(asked))])
    positions = np.array([len(a.prompt) + len(a.generated) for a in asked])
    editor.apply(result, numbers, positions)
    return result


EVERYTHING: dict[str, Any] = {
    "allowed_token_ids": (2, 5, 11),
    "logit_bias": {2: 1.5, 11: -3.0},
    "bad_words_token_ids": ((5,), (4, 2)),
    "stop_token_ids": (11,),
    "min_tokens": 3,
    "max_tokens": 9,
    "presence_penalty": 0.5,
}


def greedy(**wishes: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **wishes)  # type: ignore[arg-type]


LOGITS = torch.arange(VOCAB).float()[None] - 4.0


def test_smp_09_presence_and_frequency_penalties_count_generated_tokens_only() -> None:
    prompt = [11] * 200
    asked = greedy(presence_penalty=0.5, frequency_penalty=0.25)
    assert torch.equal(edited(LOGITS, [Asked(asked, prompt=prompt)]), LOGITS)
    after = edited(LOGITS, [Asked(asked, prompt=prompt, generated=[11, 3, 11])])
    expected = LOGITS.clone()
    expected[0, 11] -= 0.5 + 2 * 0.25
    expected[0, 3] -= 0.5 + 0.25
    assert torch.allclose(after, expected)


def test_repetition_penalty_counts_prompt_and_generated_tokens_once() -> None:
    request = Asked(greedy(repetition_penalty=2.0), prompt=[11, 11, 0], generated=[7, 7])
    expected = LOGITS.clone()
    expected[0, 11] /= 2
    expected[0, 7] /= 2
    expected[0, 0] *= 2  # a negative logit moves away from zero
    assert torch.allclose(edited(LOGITS, [request]), expected)


def test_smp_10_edits_stay_in_the_rows_that_asked() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    asked = [
        Asked(greedy()),
        Asked(greedy(frequency_penalty=1.05, repetition_penalty=1.5), generated=[1, 2, 2]),
        Asked(greedy()),
        Asked(greedy(logit_bias={1: 3.0}, allowed_token_ids=(1, 2))),
        Asked(greedy(), generated=[5]),
    ]
    after = edited(logits, asked)
    assert torch.equal(after[[0, 2, 4]], logits[[0, 2, 4]])
    assert not torch.equal(after[1], logits[1])
    assert not torch.equal(after[3], logits[3])


@pytest.mark.parametrize("generated", range(6))
def test_smp_12_all_stop_ids_are_banned_until_exactly_min_tokens(generated: int) -> None:
    asked = SamplingParams(
        temperature=0.0,
        min_tokens=4,
        stop_token_ids=(3, 9),
        logit_bias={3: 100.0, 9: 90.0},
    )
    tokens = sample(LOGITS, [Asked(asked, prompt=[1, 2], generated=[5] * generated)])
    assert tokens == [11 if generated < 4 else 3]


@pytest.mark.parametrize("generated", [0, 9])
def test_smp_08_stop_ids_outside_the_vocabulary_touch_nobody(generated: int) -> None:
    stops = (VOCAB, VOCAB + 5, -1, -VOCAB, 2**40, 11)
    asked = [
        Asked(greedy()),
        Asked(greedy(stop_token_ids=stops, min_tokens=3, max_tokens=12), generated=[1] * generated),
        Asked(greedy()),
    ]
    logits = LOGITS.repeat(3, 1)
    after = edited(logits, asked)
    assert torch.equal(after[[0, 2]], logits[[0, 2]])
    assert torch.equal(after[1, :11], logits[1, :11])
    assert (after[1, 11] < -1e30) == (generated < 3)


def test_bias_on_tokens_outside_the_vocabulary_is_ignored() -> None:
    asked = Asked(greedy(logit_bias={VOCAB + 1: 100.0, -3: 100.0, 2: 1.5}))
    expected = LOGITS.clone()
    expected[0, 2] += 1.5
    assert torch.equal(edited(LOGITS, [asked]), expected)


def test_everything_but_the_allowed_tokens_is_out() -> None:
    after = edited(LOGITS, [Asked(greedy(allowed_token_ids=(2, 5, 99)))])
    assert after[0].isfinite().nonzero().flatten().tolist() == [2, 5]
    assert torch.equal(after[0, [2, 5]], LOGITS[0, [2, 5]])


@pytest.mark.parametrize("allowed", [(2,), (99,), tuple(range(1, VOCAB)), tuple(range(VOCAB))])
def test_sec_47_few_or_nearly_all_or_no_known_tokens_may_be_allowed(
    allowed: tuple[int, ...],
) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    asked = [Asked(greedy(allowed_token_ids=ids)) for ids in (allowed, (3, 4))]
    expected = logits.clone()
    expected[0, [t for t in range(VOCAB) if t not in allowed]] = -torch.inf
    expected[1, [t for t in range(VOCAB) if t not in (3, 4)]] = -torch.inf
    assert torch.equal(edited(logits, [*asked, Asked(greedy())]), expected)


class NoCopiesFromTheHost(TorchDispatchMode):
    """Stands for a GPU on which making a tensor of a host value waits for the whole step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        fresh = name in ("lift_fresh", "lift_fresh_copy") and args[0].dim() == 0
        assert not fresh, func
        assert name not in ("scalar_tensor", "_local_scalar_dense"), func
        return func(*args, **(kwargs or {}))


def test_sec_47_a_step_reads_no_list_and_copies_no_value_from_the_host() -> None:
    rows = make_rows(VOCAB)
    rows.admit(row_data("0", Asked(greedy(**EVERYTHING), generated=[4])))
    editor = LogitEditor(rows.columns, rows.counts, rows.recent_tokens, cpu().uploads(0))
    rows.columns.params = []  # the lists are arrays since admission
    result = LOGITS.clone()

    with NoCopiesFromTheHost():
        editor.apply(result, rows.rows_of(["0"]), np.array([2]))

    expected = torch.full_like(LOGITS, -torch.inf)
    expected[0, [2, 5, 11]] = BANNED  # within BANNED nothing else shows
    assert torch.equal(result, expected)
    with pytest.raises(AssertionError, match="lift_fresh"), NoCopiesFromTheHost():
        result[torch.tensor([0])] = -torch.inf


@pytest.mark.parametrize(
    ("generated", "banned"),
    [
        ([], [9]),
        ([4], [9, 7]),
        ([7], [9]),
        ([4, 4], [9, 7]),
        ([1, 2], [9, 11]),
        ([2], [9]),  # the word's start (1, 2) is not complete
        ([0, 1, 2], [9, 11]),
        ([1, 2, 4], [9, 7]),
    ],
)
def test_a_bad_word_is_stopped_before_its_last_token(
    generated: list[int], banned: list[int]
) -> None:
    words = ((9,), (4, 7), (1, 2, 11), (3, VOCAB + 2), ())
    asked = Asked(greedy(bad_words_token_ids=words), prompt=[8], generated=generated)
    after = edited(LOGITS, [asked])
    assert sorted((after[0] < -1e30).nonzero().flatten().tolist()) == sorted(banned)
    others = [t for t in range(VOCAB) if t not in banned]
    assert torch.equal(after[0, others], LOGITS[0, others])


def test_bad_words_reach_back_into_the_prompt() -> None:
    asked = Asked(greedy(bad_words_token_ids=((4, 11),)), prompt=[1, 4])
    assert sample(LOGITS, [asked]) == [10]


def test_requests_with_longer_and_shorter_bad_words_share_a_batch() -> None:
    asked = [
        Asked(greedy(bad_words_token_ids=((11,),)), generated=[1]),
        Asked(greedy(bad_words_token_ids=((1, 2, 3, 11),)), generated=[1, 2, 3]),
        Asked(greedy(bad_words_token_ids=((3, 11),)), generated=[1, 2]),
    ]
    assert sample(LOGITS.repeat(3, 1), asked) == [10, 10, 11]


def test_longest_start_is_what_must_be_remembered() -> None:
    assert longest_start([]) == 0
    assert longest_start([(1,), (1, 2, 3), (1, 2)]) == 2
