"""Lists of values on the command line."""

from __future__ import annotations

from serve.simulate.variants import expand


def lines(text: str) -> list[str]:
    return [" ".join(variant.tokens) for variant in expand(text.split())]


def test_a_line_without_lists_is_itself() -> None:
    line = "simulate --rate 3 --preemption-mode swap --no-enable-chunked-prefill"
    assert lines(line) == [line]
    assert expand(line.split())[0].settings == {}


def test_every_combination_is_a_line() -> None:
    variants = expand(["simulate", "--preemption-mode", "recompute,swap", "--max-num-seqs", "8,64"])
    assert [variant.settings for variant in variants] == [
        {"preemption-mode": mode, "max-num-seqs": seqs}
        for mode in ("recompute", "swap")
        for seqs in ("8", "64")
    ]


def test_a_switch_may_be_on_and_off() -> None:
    assert lines("--enable-chunked-prefill on,off") == [
        "--enable-chunked-prefill",
        "--no-enable-chunked-prefill",
    ]
    assert lines("--enable-chunked-prefill --rate 3") == ["--enable-chunked-prefill --rate 3"]


def test_an_equals_sign_works_as_well() -> None:
    assert lines("--block-size=16,32 --rate=3") == [
        "--block-size 16 --rate=3",
        "--block-size 32 --rate=3",
    ]


def test_other_flags_keep_their_commas() -> None:
    assert lines("--workload a,b.jsonl") == ["--workload a,b.jsonl"]
