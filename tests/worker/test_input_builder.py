from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve.sampling_params import SamplingParams
from serve.scheduler.output import SchedulerOutput
from serve.worker.input_builder import InputBuilder, ModelInput
from tests.worker.harness import Asked, cpu, make_rows, plan, row_data, share

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0)


def build(step: SchedulerOutput, *tables: list[int], **wishes: SamplingParams) -> ModelInput:
    """Admit a, b, c … with these block tables (prompts of 10 tokens), then build the step."""
    rows = make_rows(100)
    for name, table in zip("abcdefgh", tables, strict=False):
        asked = Asked(wishes.get(name, GREEDY), prompt=range(10))
        rows.admit(row_data(name, asked, table))
    rows.last_token += 50  # row r holds 50 + r
    rows.last_token += rows.last_token.new_tensor(range(len(rows.last_token)))
    return InputBuilder(rows, BLOCK_SIZE, cpu().uploads(0)).build(step.scheduled)


def test_single_tokens_come_first_and_everything_follows_that_order() -> None:
    step = plan(
        [share("a", 2, [12, 13, 14], num_samples=0), share("b", 5, [25]), share("c", 0, [30, 31])]
    )
    built = build(step, [4, 9], [7, 3], [1])
    meta = built.attention
    assert built.token_ids.tolist() == [25, 12, 13, 14, 30, 31]
    assert built.positions.tolist() == [5, 2, 3, 4, 0, 1]
    assert built.prompt_lens.tolist() == [10] * 6
    assert meta.query_start_loc.tolist() == [0, 1, 4, 6]
    assert meta.seq_lens.tolist() == meta.seq_lens_host == [6, 5, 2]
    assert meta.query_lens_host == [1, 3, 2]
    assert (meta.num_decode_rows, meta.max_query_len, meta.max_seq_len) == (1, 3, 6)
    assert meta.block_table.tolist() == [[7, 3], [4, 9], [1, 0]]
    # slot = block * 4 + offset: b's position 5 is in its second block, a's 2 and 3 in its first.
    assert meta.slot_mapping.tolist() == [13, 18, 19, 36, 4, 5]


def test_only_shares_that_reach_the_end_are_sampled() -> None:
    step = plan(
        [share("a", 2, [12, 13], num_samples=0), share("b", 5, [25]), share("c", 0, [3, 4])]
    )
    built = build(step, [4], [7, 3], [1])
    sample = built.sample
    assert sample is not None
    assert sample.request_ids == ["b", "c"]
    assert built.logits_indices.tolist() == [0, 4]
    assert sample.positions.tolist() == [6, 2]
    assert sample.rows.tolist() == sample.rows_on_device.tolist() == [1, 2]
    without = build(plan([share("a", 0, [1], num_samples=0)]), [4])
    assert without.sample is None
    assert without.logits_indices.tolist() == []


def test_tokens_still_in_flight_come_from_the_rows() -> None:
    step = plan(
        [
            share("a", 3, [13], num_tokens=2),
            share("b", 5, [], num_tokens=1),
            share("c", 6, [36]),
        ]
    )
    built = build(step, [4, 5], [7, 3], [1, 2])
    assert built.token_ids.tolist() == [51, 36, 13, 50]


def test_log_04_each_prompt_position_but_the_first_is_scored_once_over_chunks() -> None:
    wish = SamplingParams(seed=1, prompt_logprobs=2)
    scored: list[int] = []
    for start, count in ((0, 3), (3, 1), (4, 6)):
        step = plan([share("b", 0, [1, 2]), share("a", start, [*range(start, start + count)])])
        found = build(step, [1, 2, 3], [4], a=wish).prompt_scores
        assert [f.request_id for f in found] == ["a"]
        assert found[0].num_top == 2
        assert found[0].first_token == (0 if count == 1 else 2)
        scored += found[0].next_token_ids
    assert scored == list(range(1, 10))
    decode = build(plan([share("a", 10, [77])]), [1, 2, 3], a=wish)
    assert decode.prompt_scores == []


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 9), st.booleans(), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_any_mix_of_shares_is_laid_out_as_a_slow_loop_would(
    shares: list[tuple[int, int, bool, bool]],
) -> None:
    tables = [[1 + 8 * row + block for block in range(8)] for row in range(len(shares))]
    entries = []
    for row, (start, count, in_flight, samples) in enumerate(shares):
        known = list(range(100 * row + start, 100 * row + start + count - in_flight))
        entries.append(
            share("abcdefgh"[row], start, known, num_tokens=count, num_samples=int(samples))
        )
    built = build(plan(entries), *tables)

    token_ids, positions, slots, ends = [], [], [], []
    order = sorted(range(len(shares)), key=lambda row: shares[row][1] > 1)
    for row in order:
        start, count, in_flight, _ = shares[row]
        for position in range(start, start + count):
            newest = position == start + count - 1
            token_ids.append(50 + row if in_flight and newest else 100 * row + position)
            positions.append(position)
            slots.append(tables[row][position // 4] * 4 + position % 4)
        ends.append(len(positions))
    assert built.token_ids.tolist() == token_ids
    assert built.positions.tolist() == positions
    assert built.attention.slot_mapping.tolist() == slots
    assert built.attention.query_start_loc.tolist() == [0, *ends]
    wanted = [row for row in order if shares[row][3]]
    assert (built.sample.rows.tolist() if built.sample else []) == wanted
