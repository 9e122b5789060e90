"""Thousands of requests made from the served OpenAPI document: none may fail the server, and every
answer must be what the document says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.conftest import running_server

pytestmark = pytest.mark.slow

REQUESTS_AT_LEAST = 2000


@pytest.mark.timeout(1800)
def test_generated_requests_get_answers_as_documented(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    with running_server() as server:
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--checks", "not_a_server_error,status_code_conformance,response_schema_conformance"),
            *("--phases", "examples,coverage,fuzzing", "--max-examples", "60", "--seed", "1"),
            *("--request-timeout", "60", "--suppress-health-check", "all"),
            *("--generation-database", "none"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        alive = server.http().get("/health").status_code

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated, done.stdout[-2000:]
    assert int(generated[1]) >= REQUESTS_AT_LEAST
    assert alive == 200
