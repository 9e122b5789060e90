"""The comparing benchmarks: arithmetic, table of servers, and starting and ending one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import loads, peers, roofline, static_vs_continuous
from benchmarks.machine import Rates
from benchmarks.servers import RunningServer, ServerCommand, ServerFailed, answers, free_port

HEALTHY = """
import http.server, os, sys
os.makedirs("health", exist_ok=True)
if os.fork() == 0:
    import time
    while True:
        time.sleep(1)  # a child that outlives its parent unless the group is ended
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""


def run(number: int, side: str, **figures: float) -> dict[str, object]:
    return {"round": number, "load": "1", "side": side, **figures}


def test_ratios_pair_neighbours_and_turn_latencies_round() -> None:
    runs = [
        run(0, "ours", tokens_per_s=200.0, ttft_p50=50.0),
        run(0, "peer", tokens_per_s=100.0, ttft_p50=100.0),
        run(1, "peer", tokens_per_s=50.0, ttft_p50=90.0),
        run(1, "ours", tokens_per_s=150.0, ttft_p50=30.0),
        run(2, "ours", tokens_per_s=10.0, ttft_p50=1.0),  # its pair is missing
    ]
    assert peers.ratios(runs, "1", "tokens_per_s") == [2.0, 3.0]
    assert peers.ratios(runs, "1", "ttft_p50") == [2.0, 3.0]


def test_the_table_of_servers_fills_its_places(tmp_path: Path) -> None:
    commands = peers.read_commands(peers.HERE / "peers.yaml", tmp_path)
    assert {"ours", "vllm-fp32", "llama-f16", "openvino-f16", "hf-static"} <= set(commands)
    for command in commands.values():
        assert command.missing is not None
        assert command.missing.startswith(str(tmp_path))
        filled = " ".join(command.filled(port=1234).command)
        assert "{" not in filled
        assert "--port 1234" in filled


def test_an_absent_peer_is_skipped_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "peers.yaml").write_text(
        "ours: {command: [x, --port, '{port}']}\n"
        "theirs: {command: [y], needs: ['{home}/bin/theirs']}\n"
    )
    line = f"--peers-home {tmp_path} --peers {tmp_path}/peers.yaml --out {tmp_path}/out"
    assert peers.main(line.split()) == 0
    assert f"theirs: skipped, {tmp_path}/bin/theirs is not there" in capsys.readouterr().out
    assert "skipped" in (tmp_path / "out" / "peers.md").read_text()


def test_a_floor_is_the_longer_of_reading_and_multiplying_step_by_step() -> None:
    shapes = [(10, 20), (1000, 20), (30, 20)]
    cost = roofline.model_cost([roofline.Matrix(*s, num_bytes=2 * s[0] * s[1]) for s in shapes])
    assert cost == roofline.ModelCost(41600, 2.0 * 40 * 20, 2.0 * 1000 * 20)
    rates = Rates(read_gb_s=1e-9 * 41600, gemm_gflop_s=1e-9 * 40000)  # a second to read it all
    assert roofline.floor_s([(1, 0)], cost, rates) == 1.0
    assert roofline.floor_s([(1, 0), (50, 0)], cost, rates) == 3.0
    assert roofline.floor_s([(1, 2)], cost, rates) == pytest.approx(2.04)


def test_the_sustained_rate_is_the_highest_within_the_limit() -> None:
    rows = [
        {"server": "a", "qps": 1.0, "ttft_p95": 300.0},
        {"server": "a", "qps": 2.0, "ttft_p95": 999.0},
        {"server": "a", "qps": 3.0, "ttft_p95": 1001.0},
        {"server": "b", "qps": 1.0, "ttft_p95": 5000.0},
    ]
    assert static_vs_continuous.sustained(rows, "a") == 2.0
    assert static_vs_continuous.sustained(rows, "b") == 0.0


def test_unknown_loads_are_named() -> None:
    assert [load.name for load in loads.find_loads("4,1")] == ["4", "1"]
    with pytest.raises(SystemExit, match="there is no load 9"):
        loads.find_loads("1,9")


def test_a_server_is_started_stopped_for_a_while_and_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    port = free_port()
    command = ServerCommand(
        name="healthy", command=(sys.executable, "-c", HEALTHY, str(port)), health="/health/"
    )
    with RunningServer(command, port, tmp_path) as server:
        assert answers(f"{server.url}/health/")
        server.freeze()
        server.thaw()
        assert answers(f"{server.url}/health/")
        group = server._process.pid
        with pytest.raises(ServerFailed, match="is taken"), RunningServer(command, port, tmp_path):
            pass
    members = [
        stat.parent.name
        for stat in Path("/proc").glob("[0-9]*/stat")
        if _process_group(stat) == group
    ]
    assert members == []


def _process_group(stat: Path) -> int | None:
    """The fifth field of /proc/PID/stat; None for a process that is gone, or a zombie."""
    try:
        fields = stat.read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[2])


def test_a_server_that_ends_shows_its_last_words(tmp_path: Path) -> None:
    words = "raise SystemExit('no such model')"
    command = ServerCommand(name="broken", command=(sys.executable, "-c", words))
    server = RunningServer(command, free_port(), tmp_path)
    with pytest.raises(ServerFailed, match="no such model"), server:
        pass
