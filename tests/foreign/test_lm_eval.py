"""lm-eval finds the same numbers through the server as in transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server_process import ServerProcess

DOCUMENTS = [
    {"prompt": "The sea is", "choices": [" blue", " seven", " ?!"], "answer": 0},
    {"prompt": "One, two,", "choices": [" three", " four, five"], "answer": 0},
    {"prompt": "a" * 300, "choices": ["a", "b" * 40], "answer": 0},
]


@pytest.mark.timeout(900)
def test_log_likelihoods_are_those_of_transformers(
    tiny_model: Path,
    tiny_server: ServerProcess,
    tmp_path: Path,
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps(each) for each in DOCUMENTS))

    ours, theirs = (
        scored(backend, tiny_model, tiny_server.url, data)
        for backend in ("local-completions", "hf")
    )

    assert len(ours) == len(theirs) == 3
    for our_document, their_document in zip(ours, theirs, strict=True):
        assert [greedy for _, greedy in our_document] == [greedy for _, greedy in their_document]
        assert [value for value, _ in our_document] == pytest.approx(
            [value for value, _ in their_document], abs=2e-3
        )


def scored(backend: str, model: Path, url: str, data: Path) -> list[Any]:
    out = data.with_name(f"{backend}.json")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.foreign.score_with_lm_eval"),
            *(backend, str(model), url, str(data), str(out)),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(data.parent / "cache")},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(out.read_text()))
