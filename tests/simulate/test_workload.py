"""Requests of a simulation: drawn, and read from files."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.errors import ConfigError
from serve.simulate.lengths import parse_length
from serve.simulate.workload import SimRequest, Synthetic, draw, read_workload


def synthetic(**settings: Any) -> Synthetic:
    values = {"num_requests": 300, "rate": 5.0, "prompt_len": "100", "output_len": "20"}
    return Synthetic(**{**values, **settings})


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def shared_len(a: SimRequest, b: SimRequest) -> int:
    """Tokens at the start that two prompts have in common."""
    pairs = zip(a.message("a").prompt_token_ids, b.message("b").prompt_token_ids, strict=False)
    same = 0
    for left, right in pairs:
        if left != right:
            break
        same += 1
    return same


def test_the_same_seed_draws_the_same_requests() -> None:
    settings = synthetic(prompt_len="lognormal:200:0.9", output_len="uniform:1:50")
    assert draw(settings) == draw(settings)
    assert draw(settings) != draw(synthetic(seed=1))


def test_arrivals_come_at_the_rate_asked_for() -> None:
    requests = draw(synthetic(num_requests=5000))
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(1000, rel=0.1)


def test_rate_0_is_all_at_once() -> None:
    assert {request.arrival_s for request in draw(synthetic(rate=0.0))} == {0.0}


def test_prefixes_are_shared_and_nothing_else() -> None:
    requests = draw(synthetic(num_requests=20, prefix_len=64, num_prefixes=2))
    for first in requests:
        for second in requests:
            if first is not second:
                same_prefix = first.pieces[0] == second.pieces[0]
                assert shared_len(first, second) == (64 if same_prefix else 0)
    assert {request.prompt_len for request in requests} == {164}


@given(st.integers(0, 2**32), st.sampled_from(["7", "uniform:3:9", "3@0.5+9@0.5"]))
def test_lengths_stay_in_their_range(seed: int, text: str) -> None:
    assert 3 <= parse_length(text)(Random(seed)) <= 9


def test_the_median_of_a_lognormal_is_its_first_number() -> None:
    length, rng = parse_length("lognormal:500:0.5"), Random(0)
    drawn = sorted(length(rng) for _ in range(2001))
    assert drawn[1000] == pytest.approx(500, rel=0.1)


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "x", "5:6", "uniform:9:3", "uniform:1", "lognormal:5:-1", "3@0+4@0"]
)
def test_an_impossible_length_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="length"):
        parse_length(text)


def test_a_file_is_read_in_order_of_arrival_from_its_first(tmp_path: Path) -> None:
    path = write(
        tmp_path / "w.jsonl",
        {"arrival": 12.5, "prompt_len": 30, "output_len": 4, "priority": -1, "user": "b"},
        {"arrival": 10.0, "prompt_len": 20, "output_len": 3},
        {"type": "step", "number": 1},
    )
    first, second = read_workload(path)
    assert (first.arrival_s, first.prompt_len, first.output_len) == (0.0, 20, 3)
    assert (second.arrival_s, second.priority, second.user) == (2.5, -1, "b")
    assert shared_len(first, second) == 0


def test_a_named_prefix_is_shared(tmp_path: Path) -> None:
    line = {"arrival": 0, "prompt_len": 30, "output_len": 4, "prefix": "system", "prefix_len": 16}
    first, second = read_workload(write(tmp_path / "w.jsonl", line, line))
    assert shared_len(first, second) == 16


def test_mooncake_lines_share_the_blocks_with_equal_ids(tmp_path: Path) -> None:
    path = write(
        tmp_path / "w.jsonl",
        {"timestamp": 1000, "input_length": 1500, "output_length": 9, "hash_ids": [7, 8, 9]},
        {"timestamp": 3000, "input_length": 1100, "output_length": 9, "hash_ids": [7, 8, 30]},
    )
    first, second = read_workload(path)
    assert (second.arrival_s, first.prompt_len, second.prompt_len) == (2.0, 1500, 1100)
    assert shared_len(first, second) == 1024


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no request"),
        ("[1]", "line 1: is no JSON object"),
        ("{", "line 1: is not valid JSON"),
        ('{"arrival": 1, "prompt_len": 3}', "line 1: 'output_len' is missing"),
        ('\n{"arrival": 1, "prompt_len": 0, "output_len": 1}', "line 2: prompt and output"),
        ('{"arrival": 1, "prompt_len": "x", "output_len": 1}', "line 1"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        read_workload(path)
    assert "bad.jsonl" in str(caught.value)


def test_ben_41_lines_end_with_a_newline_only(tmp_path: Path) -> None:
    lines = [
        {"arrival": 0.0, "prompt_len": 30, "output_len": 4, "user": "a\u2028b\u0085c\u2029"},
        {"arrival": 1.0, "prompt_len": 20, "output_len": 3},
    ]
    text = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "w.jsonl").write_bytes(text.replace(": ", ":\r").encode())
    first, second = read_workload(tmp_path / "w.jsonl")
    assert (first.user, second.prompt_len) == ("a\u2028b\u0085c\u2029", 20)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        read_workload(tmp_path / "none.jsonl")
