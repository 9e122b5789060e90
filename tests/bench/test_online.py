"""`bench serve` from end to end, against a server that does what it is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve.bench.online import bench_serve, measure
from serve.bench.options import ArrivalOptions, ReportOptions, TargetOptions, WorkloadOptions
from serve.bench.summary import Summary
from serve.cli import main
from serve.errors import ConfigError
from tests.bench.fake_openai import FakeOpenAI

QUIET = ReportOptions(progress=False)
NO_WARMUP = ArrivalOptions(num_warmups=0)


def summary(
    server: FakeOpenAI, *, arrivals: ArrivalOptions = NO_WARMUP, **target: object
) -> Summary:
    options = TargetOptions(base_url=server.url, **target)  # type: ignore[arg-type]
    workload = WorkloadOptions(num_prompts=6, input_len="5", output_len="4:9", seed=3)
    return measure(options, workload, arrivals, QUIET).summary


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("stream", [True, False])
def test_every_request_gets_exactly_what_it_asked_for(endpoint: str, stream: bool) -> None:
    with FakeOpenAI() as server:
        figures = summary(server, endpoint=endpoint, stream=stream)
    asked = sum(body["max_tokens"] for body in server.bodies)
    assert (figures.completed, figures.failed, figures.wrong_length) == (6, 0, 0)
    assert (figures.output_tokens, figures.counted_by) == (asked, ["usage"])
    assert figures.cached_tokens == 18
    assert figures.ttft_ms is not None
    assert figures.e2e_ms is not None
    assert (figures.tpot_ms is not None) == stream
    assert figures.ttft_ms.max <= figures.e2e_ms.max


def test_requests_ask_for_a_fixed_length_and_an_exact_count() -> None:
    with FakeOpenAI() as server:
        summary(server, extra_body='{"top_k": 5}')
    body = server.bodies[0]
    assert (body["model"], body["ignore_eos"], body["top_k"]) == ("fake", True, 5)
    assert body["stream_options"] == {"include_usage": True}
    assert len(body["prompt"]) == 5


def test_a_closed_loop_keeps_so_many_requests_open() -> None:
    with FakeOpenAI() as server:
        figures = summary(server, arrivals=ArrivalOptions(max_concurrency=2, num_warmups=0))
    assert figures.completed == 6
    assert server.most_open == 2


def test_an_open_loop_sends_when_a_request_is_due() -> None:
    with FakeOpenAI() as server:
        arrivals = ArrivalOptions(request_rate=50, arrivals="fixed", num_warmups=2)
        figures = summary(server, arrivals=arrivals)
    assert figures.completed == 6
    assert len(server.bodies) == 8  # two of them to warm up
    assert figures.duration_s >= 5 / 50


@pytest.mark.parametrize(
    ("misbehaviour", "says"),
    [
        ("refuse", "HTTP 429: too busy"),
        ("break off", "ended early"),
        ("error event", "the engine died"),
        ("silent", "no answer within 0.1 s"),
    ],
)
def test_failures_are_counted_and_named(misbehaviour: str, says: str) -> None:
    with FakeOpenAI(misbehaviour) as server:
        timeout = 0.1 if misbehaviour == "silent" else 60.0
        figures = summary(server, model="fake", timeout=timeout)
    assert (figures.completed, figures.failed, figures.output_tokens) == (0, 6, 0)
    assert figures.ttft_ms is None
    [(error, count)] = figures.errors.items()
    assert says in error
    assert count == 6


def test_without_usage_events_are_counted_and_that_is_said() -> None:
    with FakeOpenAI("no usage") as server:
        figures = summary(server)
    assert figures.counted_by == ["events"]
    assert figures.wrong_length == 0


def test_a_shorter_answer_than_asked_for_is_seen() -> None:
    with FakeOpenAI("short") as server:
        assert summary(server).wrong_length == 6


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    with FakeOpenAI() as server:
        options = TargetOptions(base_url=server.url)
        workload = WorkloadOptions(num_prompts=4, output_len="4")
        for limit, share in (("e2e:60000", 1.0), ("ttft:0.0001", 0.0)):
            report = ReportOptions(goodput=(limit, "tpot:60000"), progress=False)
            figures = measure(options, workload, NO_WARMUP, report).summary
            assert figures.good_share == share


def test_a_server_that_is_not_there_is_one_line() -> None:
    options = TargetOptions(base_url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"nothing answers at http://127\.0\.0\.1:9"):
        measure(options, WorkloadOptions(num_prompts=1), NO_WARMUP, QUIET)


def test_a_warm_up_that_fails_stops_the_run() -> None:
    with FakeOpenAI("refuse") as server, pytest.raises(ConfigError, match="too busy"):
        summary(server, arrivals=ArrivalOptions())
    assert len(server.bodies) == 1


def test_the_command_prints_figures_and_writes_every_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "run.json"
    with FakeOpenAI() as server:
        line = f"bench serve --base-url {server.url} --num-prompts 3 --output-len 5 --api-key k"
        line += f" --output-json {path} --no-progress --goodput ttft:60000 tpot:1000"
        assert main(line.split()) == 0
    printed = capsys.readouterr().out
    assert "goodput" in printed
    assert "first token (TTFT)" in printed
    written = json.loads(path.read_text())
    assert written["summary"]["output_tokens"] == 15
    assert [len(r["token_times_s"]) for r in written["requests"]] == [5, 5, 5]
    assert written["settings"]["target"]["api_key"] is None


def test_the_command_fails_when_a_request_did(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI("refuse") as server:
        line = f"bench serve --base-url {server.url} --num-prompts 2 --num-warmups 0 --no-progress"
        assert main(line.split()) == 1
    assert "2 × HTTP 429: too busy" in capsys.readouterr().out


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    with FakeOpenAI() as server:
        options = TargetOptions(base_url=server.url)
        workload = WorkloadOptions(num_prompts=4, output_len="6")
        report = ReportOptions(progress=False, plot=path)
        assert bench_serve(options, workload, NO_WARMUP, report) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
