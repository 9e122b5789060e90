"""Thousands of requests made from the served OpenAPI document: none may fail the server, and every
answer must be what the document says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from serve.config import EngineConfig
from tests.api.stepped import stepped_server
from tests.fakes import FakeExecutor

REQUESTS_AT_LEAST = 2000
# A request that waits longer than its own timeout allows gets 504, and some allow next to nothing.
SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 504]
"""
CHECKS = "not_a_server_error,status_code_conformance,response_schema_conformance"


@pytest.mark.timeout(1800)
def test_generated_requests_get_answers_as_documented(tmp_path: Path) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=16, max_num_batched_tokens=256)
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    with stepped_server(executor, EngineConfig()) as (server, client):
        server.on_loop(lambda: client.allow(sys.maxsize))
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--checks", CHECKS, "--phases", "examples,coverage,fuzzing"),
            *("--max-examples", "50", "--seed", "1", "--generation-database", "none"),
            *("--request-timeout", "60", "--suppress-health-check", "all"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        with server.http() as http:
            alive = http.get("/health").status_code
            following = http.post("/v1/completions", json={"prompt": "a"}).status_code

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated, done.stdout[-2000:]
    assert int(generated[1]) >= REQUESTS_AT_LEAST
    assert (alive, following) == (200, 200)
    assert executor.violations == []
