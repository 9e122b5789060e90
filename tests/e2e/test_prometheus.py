"""/metrics as Prometheus itself sees it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.e2e.prometheus_process import PrometheusProcess, need
from tests.e2e.requests import client, completion, is_idle, streamed_text, until
from tests.e2e.server_process import ServerProcess


async def test_promtool_has_nothing_to_say(tiny_server: ServerProcess) -> None:
    promtool = need("promtool")
    async with client(tiny_server) as http:
        await streamed_text(http, completion("Hello", 4))
        page = (await http.get("/metrics")).text
    done = subprocess.run(
        [promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


async def test_prometheus_scrapes_what_the_server_did(
    tiny_server: ServerProcess, tmp_path: Path
) -> None:
    target = tiny_server.url.removeprefix("http://")
    with PrometheusProcess(target, tmp_path) as prometheus:

        def value(expression: str) -> float:
            samples = prometheus.query(expression)
            return float(samples[0]["value"][1]) if samples else -1.0

        generated = "serve_llm_generation_tokens_total"
        await until(lambda: value(generated) >= 0, "a first scrape")
        before = value(generated)
        async with client(tiny_server) as http:
            await streamed_text(http, completion("Once", 25))
        await until(lambda: value(generated) == before + 25, "25 more tokens")
        assert value("up") == 1
        await until(lambda: is_idle(tiny_server), "idle")
        await until(lambda: value("serve_llm_num_requests_running") == 0, "idle in Prometheus")
