"""Whole steps over a model that reads every token of a request back from the KV cache."""

from __future__ import annotations

import pytest

from serve.kv_cache.block_copy import BlockCopy
from serve.sampling_params import SamplingParams
from serve.worker import model_runner
from tests.worker.harness import Asked, RunnerStand, next_token, plan, row_data, share

GREEDY = SamplingParams(temperature=0.0)
VOCAB = 97


def reference(prompt: list[int], count: int) -> list[int]:
    """The tokens that follow a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB))
    return tokens[len(prompt) :]


def admit(name: str, prompt: list[int], blocks: list[int], sampling: SamplingParams = GREEDY):  # type: ignore[no-untyped-def]
    return row_data(name, Asked(sampling, prompt=prompt), blocks)


def test_prompts_chunks_and_decodes_share_steps_and_give_each_request_its_own_tokens() -> None:
    stand = RunnerStand()
    a, b = [5, 6, 7, 8, 9], [30, 31]
    after_a, after_b = reference(a, 2), reference(b, 3)
    steps = [
        plan(
            [share("a", 0, a[:3], num_samples=0), share("b", 0, b)],
            admitted=[admit("a", a, [3]), admit("b", b, [9])],
        ),
        plan([share("b", 2, after_b[:1]), share("a", 3, a[3:], new_block_ids=[2])]),
        plan([share("a", 5, after_a[:1]), share("b", 3, after_b[1:2])]),
    ]
    results = [stand.runner.execute(step).wait().token_ids for step in steps]
    assert results == [
        {"b": after_b[:1]},
        {"b": after_b[1:2], "a": after_a[:1]},
        {"a": after_a[1:], "b": after_b[2:]},
    ]


def test_a_swapped_request_continues_after_its_blocks_were_overwritten() -> None:
    stand = RunnerStand()
    a, b = [5, 6, 7, 8, 9], [40, 41, 42, 43, 44]
    after = reference(a, 2)
    first = plan([share("a", 0, a)], admitted=[admit("a", a, [1, 2])])
    assert stand.runner.execute(first).wait().token_ids == {"a": after[:1]}
    # b takes a's blocks in the very step that swaps a out: the copy must come first.
    second = plan(
        [share("b", 0, b)],
        released=["a"],
        swap_out=[BlockCopy(1, 6), BlockCopy(2, 4)],
        admitted=[admit("b", b, [1, 2])],
    )
    assert stand.runner.execute(second).wait().token_ids == {"b": reference(b, 1)}
    third = plan(
        [share("a", 5, after[:1])],
        swap_in=[BlockCopy(6, 7), BlockCopy(4, 8)],
        admitted=[row_data("a", Asked(GREEDY, prompt=a, generated=after[:1]), [7, 8])],
    )
    assert stand.runner.execute(third).wait().token_ids == {"a": after[1:]}


def test_a_block_copied_within_the_device_serves_another_request() -> None:
    stand = RunnerStand()
    a = [5, 6, 7, 8, 9]
    stand.runner.execute(plan([share("a", 0, a)], admitted=[admit("a", a, [1, 2])]))
    fork = plan([share("b", 4, a[4:])], copy=[BlockCopy(1, 11)], admitted=[admit("b", a, [11, 12])])
    assert stand.runner.execute(fork).wait().token_ids == {"b": reference(a, 1)}


def test_a_row_freed_in_a_step_may_be_taken_in_the_same_step() -> None:
    stand = RunnerStand()
    for number in range(20):  # more requests than rows
        prompt = [number, number + 1]
        step = plan(
            [share(f"r{number}", 0, prompt)],
            released=[f"r{number - 1}"],
            admitted=[admit(f"r{number}", prompt, [1])],
        )
        assert stand.runner.execute(step).wait().token_ids == {f"r{number}": reference(prompt, 1)}


def test_steps_may_be_launched_before_the_last_ones_tokens_are_known() -> None:
    stand = RunnerStand()
    prompt = [5, 6, 7]
    expected = reference(prompt, 4)
    pending = [
        stand.runner.execute(plan([share("a", 0, prompt)], admitted=[admit("a", prompt, [1, 2])]))
    ]
    for position in range(3, 6):
        step = plan([share("a", position, [], num_tokens=1)])
        pending.append(stand.runner.execute(step))
    assert [p.wait().token_ids["a"][0] for p in pending] == expected


def test_a_step_that_only_releases_and_copies_runs_no_model() -> None:
    stand = RunnerStand()
    stand.model.fail_next = True
    result = stand.runner.execute(plan([], swap_out=[BlockCopy(1, 1)], released=["x"])).wait()
    assert result.token_ids == {}
    assert stand.model.fail_next


def test_a_failed_step_leaves_rows_that_can_be_released_and_taken_again() -> None:
    stand = RunnerStand()
    prompt = [5, 6, 7]
    stand.model.fail_next = True
    with pytest.raises(RuntimeError, match="fire"):
        stand.runner.execute(plan([share("a", 0, prompt)], admitted=[admit("a", prompt, [1])]))
    step = plan([share("b", 0, prompt)], released=["a"], admitted=[admit("b", prompt, [1])])
    assert stand.runner.execute(step).wait().token_ids == {"b": reference(prompt, 1)}


def test_logprobs_come_for_those_who_ask_as_many_as_they_ask() -> None:
    stand = RunnerStand()
    asked = SamplingParams(temperature=0.0, logprobs=2)
    step = plan(
        [share("a", 0, [1]), share("b", 0, [2]), share("c", 0, [3])],
        admitted=[
            admit("a", [1], [1], asked),
            admit("b", [2], [2]),
            admit("c", [3], [3], SamplingParams(temperature=0.0, logprobs=0)),
        ],
    )
    result = stand.runner.execute(step).wait()
    assert set(result.logprobs) == {"a", "c"}
    (scored,) = result.logprobs["a"]
    best = next_token([1], VOCAB)
    assert scored.token_id == result.token_ids["a"][0] == best
    assert scored.rank == 1
    assert scored.top_token_ids == [best, (best + 1) % VOCAB]
    assert scored.top_logprobs[0] == scored.logprob > scored.top_logprobs[1]
    assert result.logprobs["c"][0].top_token_ids == []


def test_log_01_log_04_prompt_logprobs_are_raw_and_complete_over_chunks() -> None:
    stand = RunnerStand()
    prompt = [5, 6, 7, 8, 9]
    asked = SamplingParams(seed=1, top_k=1, prompt_logprobs=1)
    steps = [
        plan(
            [share("a", 0, prompt[:2], num_samples=0)],
            admitted=[admit("a", prompt, [1, 2], asked)],
        ),
        plan([share("a", 2, prompt[2:])]),
        plan([share("a", 5, reference(prompt, 1))]),
    ]
    results = [stand.runner.execute(step).wait() for step in steps]
    scored = [s for r in results[:2] for s in r.prompt_logprobs["a"]]
    assert "a" not in results[2].prompt_logprobs
    assert [s.token_id for s in scored] == prompt[1:]
    for number, score in enumerate(scored, start=1):
        best = next_token(prompt[:number], VOCAB)
        assert score.top_token_ids == [best]
        assert score.rank == (prompt[number] - best) % VOCAB + 1
        assert score.top_logprobs[0] - score.logprob == pytest.approx(
            (score.rank - 1) / 10, abs=1e-5
        )


def test_log_10_scoring_a_long_prompt_holds_few_logits_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_runner, "_SCORE_ELEMENTS", 10 * VOCAB)
    stand = RunnerStand()
    prompt = list(range(35))
    asked = SamplingParams(temperature=0.0, prompt_logprobs=0)
    step = plan([share("a", 0, prompt)], admitted=[admit("a", prompt, list(range(1, 10)), asked)])
    scored = stand.runner.execute(step).wait().prompt_logprobs["a"]
    assert [s.token_id for s in scored] == prompt[1:]
    assert stand.model.largest_logits == 10
