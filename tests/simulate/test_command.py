"""`serve-llm simulate` from the command line to its output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from serve.cli import main
from serve.engine.inspect.trace import TraceFile
from tests.scheduler.driver import make_scheduler

SMALL = "simulate --num-requests 12 --rate 50 --prompt-len 40 --output-len 20"


def test_a_table_has_a_column_for_each_variant(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{SMALL} --num-gpu-blocks-override 8 --preemption-mode recompute,swap"
    assert main(line.split()) == 0
    printed = capsys.readouterr().out
    modes = next(row for row in printed.splitlines() if "preemption-mode" in row)
    assert modes.split() == ["preemption-mode", "recompute", "swap"]
    assert "TTFT p99" in printed
    assert "KV use, most" in printed


def test_the_first_example_of_the_readme_shows_a_difference(
    capsys: pytest.CaptureFixture[str],
) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    line = re.search(r"^serve-llm (simulate .*?) *#", readme, re.MULTILINE)
    assert line is not None
    assert main([*line[1].split(), "--json"]) == 0
    variants = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert len(variants) > 1
    for figure in ("ttft", "itl"):
        seconds = [variant[figure]["p99"] for variant in variants]
        assert max(seconds) > 1.5 * min(seconds), figure


def test_json_is_one_object_per_variant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{SMALL} --max-num-seqs 1,8 --json".split()) == 0
    one, eight = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert one["settings"] == {"max-num-seqs": "1"}
    assert one["num_finished"] == eight["num_finished"] == 12
    assert one["ttft"]["p99"] > eight["ttft"]["p99"]


def test_a_recorded_trace_gives_requests_and_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"type": "request", "arrival": 3.0 + i, "prompt_len": 9, "output_len": 3} for i in (0, 1)
    ]
    lines += [
        {
            "type": "step",
            "schedule_s": 0.001,
            "execute_s": 0.5 + 0.01 * decodes,
            "update_s": 0.001,
            "num_chunk_tokens": 0,
            "num_chunk_pairs": 0,
            "num_decodes": decodes,
            "num_context_tokens": decodes * (decodes % 7),
            "num_block_copies": 0,
        }
        for decodes in range(1, 60)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert main(["simulate", "--workload", str(trace), "--fit-trace", str(trace), "--json"]) == 0

    printed = capsys.readouterr()
    figures = json.loads(printed.out)
    assert figures["num_finished"] == 2
    assert figures["tpot"]["p50"] == pytest.approx(0.512, rel=0.1)
    assert "cost fitted to 59 steps" in printed.err


def test_a_replay_starts_with_the_pool_and_the_limits_of_the_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    scheduler = make_scheduler(
        num_blocks=40, block_size=4, num_host_blocks=19, max_num_seqs=3, max_num_batched_tokens=24,
        max_model_len=80, preemption_mode="swap", policy="priority", target_itl_s=0.5,
        max_queue_time_s=900.0,
    )  # fmt: skip
    TraceFile(trace, scheduler.view()).close()
    with trace.open("a") as file:
        for i in range(6):
            request = {"type": "request", "arrival": 0.0, "prompt_len": 30, "output_len": 40}
            file.write(json.dumps({**request, "priority": i}) + "\n")

    def run(*more: str) -> dict[str, Any]:
        assert main(["simulate", "--workload", str(trace), "--json", *more]) == 0
        printed = capsys.readouterr()
        figures: dict[str, Any] = json.loads(printed.out)
        return {**figures, "err": printed.err}

    recorded = run()
    assert "--num-gpu-blocks-override 40" in recorded["err"]
    assert recorded["preemptions_swap"] > 0  # three at once outgrow forty blocks
    wider = run("--num-gpu-blocks-override=400", "--max-num-seqs", "6")
    assert "--num-gpu-blocks-override 40" not in wider["err"]
    assert wider["preemptions_swap"] == 0
    assert wider["ttft"]["max"] < recorded["ttft"]["max"]


def test_a_first_line_that_is_no_engine_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"type": "engine", "block_size": 4}\n')
    assert main(["simulate", "--workload", str(trace)]) == 2
    assert "trace.jsonl, line 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says", "code"),
    [
        ("--rate -1", "--rate must be 0 or more", 2),
        ("--prompt-len x", "no length", 1),
        ("--workload /none.jsonl", "/none.jsonl", 1),
        ("--preemption-mode swap,burn", "burn", 2),
        ("--prompt-len 99999 --num-gpu-blocks-override 4", "no request could be served", 1),
        ("--max-num-batched-tokens 64 --no-enable-chunked-prefill", "whole prompts", 1),
    ],
)
def test_a_wrong_line_says_what_is_wrong(
    flags: str, says: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *flags.split()]) == code
    assert says in capsys.readouterr().err


def test_help_lists_own_flags_and_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--help"]) == 0
    page = capsys.readouterr().out
    for flag in ("--workload", "--rate", "--fit-trace", "--target-ttft-ms", "--preemption-mode"):
        assert flag in page
