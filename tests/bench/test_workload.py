"""What a run asks for: the same for the same options, and of the lengths that were named."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest

from serve.bench.options import ArrivalOptions, Lengths, ReportOptions, WorkloadOptions
from serve.bench.workload import MIN_TOKEN_ID, PlannedRequest, arrival_times, plan_requests
from serve.errors import ConfigError


def test_random_prompts_have_their_lengths_and_repeat_with_their_seed() -> None:
    options = WorkloadOptions(num_prompts=200, input_len="3:9", output_len="8:256", seed=5)
    planned = plan_requests(options, chat=False)
    assert {len(request.prompt) for request in planned} == set(range(3, 10))
    assert all(8 <= request.output_len <= 256 for request in planned)
    assert 110 < mean(request.output_len for request in planned) < 155
    ids = [token_id for request in planned for token_id in request.prompt]
    assert min(ids) >= MIN_TOKEN_ID  # type: ignore[type-var]
    assert planned == plan_requests(options, chat=False)
    other = WorkloadOptions(num_prompts=200, input_len="3:9", output_len="8:256", seed=6)
    assert planned != plan_requests(other, chat=False)


def test_words_stand_for_tokens_where_ids_cannot_be_sent() -> None:
    chat = plan_requests(WorkloadOptions(num_prompts=1, input_len="7"), chat=True)[0].prompt
    assert chat[0]["role"] == "user"  # type: ignore[index, call-overload]
    assert len(chat[0]["content"].split()) == 7  # type: ignore[index, union-attr, call-overload]
    options = WorkloadOptions(num_prompts=1, input_len="7", prompt_format="words")
    assert len(str(plan_requests(options, chat=False)[0].prompt).split()) == 7
    with pytest.raises(ConfigError, match="words"):
        plan_requests(WorkloadOptions(prompt_format="ids"), chat=True)


def test_shared_prefixes_are_shared() -> None:
    options = WorkloadOptions(
        dataset="shared-prefix", num_prompts=40, prefix_len=20, num_prefixes=3, input_len="4"
    )
    prompts = [tuple(request.prompt) for request in plan_requests(options, chat=False)]
    assert len({prompt[:20] for prompt in prompts}) == 3
    assert len(set(prompts)) == 40
    assert {len(prompt) for prompt in prompts} == {24}


def test_a_share_of_mixed_prompts_is_long() -> None:
    options = WorkloadOptions(
        dataset="mixed", num_prompts=300, input_len="4", long_input_len="64", long_share=0.25
    )
    lengths = Counter(len(request.prompt) for request in plan_requests(options, chat=False))
    assert lengths.keys() == {4, 64}
    assert 45 < lengths[64] < 105


def test_a_file_gives_prompts_lengths_and_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "Hello", "output_len": 5, "arrival_s": 0.5},
        {"prompt": [1, 2, 3], "arrival_s": 2},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    options = WorkloadOptions(dataset="jsonl", dataset_path=path, output_len="7")
    planned = plan_requests(options, chat=False)
    assert planned == [PlannedRequest("Hello", 5, 0.5), PlannedRequest([1, 2, 3], 7, 2.0)]
    assert arrival_times(planned, ArrivalOptions(arrivals="trace"), 0) == [0.5, 2.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1: is not a JSON object"),
        ("[1]", "line 1: is not a JSON object"),
        ('{"output_len": 3}', "line 1: has no prompt|line 1: has no a prompt"),
    ],
)
def test_a_wrong_line_of_a_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        plan_requests(WorkloadOptions(dataset="jsonl", dataset_path=path), chat=False)


def test_a_trace_without_times_is_refused() -> None:
    with pytest.raises(ConfigError, match="arrival_s"):
        arrival_times([PlannedRequest("a", 1)], ArrivalOptions(arrivals="trace"), 0)


def test_poisson_gaps_have_the_asked_for_mean_and_fixed_ones_are_equal() -> None:
    requests = [PlannedRequest("a", 1)] * 3000
    poisson = arrival_times(requests, ArrivalOptions(request_rate=10), 1)
    assert poisson == sorted(poisson)
    assert 280 < poisson[-1] < 320
    fixed = arrival_times(requests[:4], ArrivalOptions(request_rate=10, arrivals="fixed"), 1)
    assert fixed == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert arrival_times(requests[:2], ArrivalOptions(), 1) == [0.0, 0.0]


def test_lengths_are_a_number_or_a_range() -> None:
    assert Lengths.parse("128", "x") == Lengths(128, 128)
    assert Lengths.parse("8:256", "x") == Lengths(8, 256)
    for wrong in ("", "x", "0", "9:8", "1:2:3", "-4"):
        with pytest.raises(ConfigError, match="--x"):
            Lengths.parse(wrong, "x")


@pytest.mark.parametrize(
    "make",
    [
        lambda: WorkloadOptions(input_len="0"),
        lambda: WorkloadOptions(num_prompts=0),
        lambda: WorkloadOptions(dataset="jsonl"),
        lambda: WorkloadOptions(dataset_path=Path("x")),
        lambda: WorkloadOptions(long_share=1.5),
        lambda: WorkloadOptions(max_token_id=10),
        lambda: ArrivalOptions(request_rate=0),
        lambda: ArrivalOptions(max_concurrency=0),
        lambda: ReportOptions(goodput=("ttft",)),
        lambda: ReportOptions(goodput=("speed:3",)),
    ],
)
def test_impossible_options_are_refused(make) -> None:
    with pytest.raises(ConfigError, match="--"):
        make()


def test_ben_41_lines_end_with_a_newline_only(tmp_path: Path) -> None:
    prompts = ["a\u2028b\u0085c", "d\u2029e\u000bf\u000cg", "h\u001c\u001d\u001ei", "last"]
    lines = [json.dumps({"prompt": text, "output_len": 3}, ensure_ascii=False) for text in prompts]
    lines[1] = lines[1].replace(": ", ":\r", 1)  # white space, as far as JSON goes
    path = tmp_path / "d.jsonl"
    path.write_bytes("\r\n".join(["", *lines, "  "]).encode())
    options = WorkloadOptions(dataset="jsonl", dataset_path=path, num_prompts=9)

    assert [request.prompt for request in plan_requests(options, chat=False)] == prompts

    path.write_bytes("\n".join([*lines, "{"]).encode())
    with pytest.raises(ConfigError, match="line 5"):
        plan_requests(options, chat=False)
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ConfigError, match="cannot be read"):
        plan_requests(options, chat=False)
