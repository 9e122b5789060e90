"""The official JSON-Schema-Test-Suite, where a copy is given: see benchmarks/json_schemas.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.json_schemas import count

DIRECTORY = os.environ.get("JSON_SCHEMA_TEST_SUITE", "")


@pytest.mark.slow
@pytest.mark.skipif(not DIRECTORY, reason="JSON_SCHEMA_TEST_SUITE names no directory of the suite")
def test_what_is_promised_holds_and_little_that_is_valid_is_refused() -> None:
    counts, wrong = count(Path(DIRECTORY))
    assert counts["admits invalid"] == 0, wrong
    assert counts["right"] >= 560
    assert counts["refuses valid"] <= 25, wrong
