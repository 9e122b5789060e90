"""End ids and sampling defaults from a checkpoint's files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from serve.errors import ConfigError
from serve.text.generation_config import GenerationConfig, read_generation_config


def folder(path: Path, generation: Any = None, config: Any = None) -> Path:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (path / name).write_text(text)
    return path


def test_ops_17_defaults_are_read_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "serve")
    wishes = {"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.05}
    model = folder(tmp_path, {**wishes, "top_p": None, "do_sample": True, "eos_token_id": 2})
    assert read_generation_config(model, "auto") == GenerationConfig(frozenset({2}), wishes)
    assert "'temperature': 0.1" in caplog.text


def test_ops_17_none_switches_the_defaults_off_but_not_the_ends(tmp_path: Path) -> None:
    model = folder(tmp_path, {"temperature": 0.1, "eos_token_id": [2, 7]})
    assert read_generation_config(model, "none") == GenerationConfig(frozenset({2, 7}), {})


def test_ends_come_from_config_json_where_there_is_no_generation_config(tmp_path: Path) -> None:
    model = folder(tmp_path, config={"eos_token_id": [4]})
    assert read_generation_config(model, "auto") == GenerationConfig(frozenset({4}), {})
    assert read_generation_config(folder(tmp_path, {}, {}), "auto") == GenerationConfig()


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ("{", "not readable JSON"),
        ("[1]", "JSON object"),
        ({"eos_token_id": "two"}, "token id"),
        ({"eos_token_id": [True]}, "token id"),
        ({"temperature": "hot"}, "temperature .* number"),
        ({"top_p": 7}, "top_p .*--generation-config none"),
    ],
)
def test_files_that_make_no_sense_are_config_errors(
    tmp_path: Path, generation: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_generation_config(folder(tmp_path, generation), "auto")
