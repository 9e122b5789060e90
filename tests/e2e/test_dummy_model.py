"""A real server over dummy weights, from a folder that holds config.json and nothing else."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.e2e.server_process import serve


@pytest.fixture(scope="module")
def config_alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config-alone")
    (folder / "config.json").write_text((tiny_model / "config.json").read_text())
    return folder


def test_a_config_alone_serves_token_ids_and_refuses_chats_with_the_reason(
    config_alone: Path,
) -> None:
    options = ("--load-format", "dummy", "--served-model-name", "dummy")
    with serve(config_alone, *options) as server:
        server.wait_ready()
        with httpx.Client(base_url=server.url, timeout=60) as client:
            completion = client.post(
                "/v1/completions",
                json={"model": "dummy", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True},
            )
            chat = client.post(
                "/v1/chat/completions",
                json={"model": "dummy", "messages": [{"role": "user", "content": "hi"}]},
            )
            text = client.post("/v1/completions", json={"model": "dummy", "prompt": "hi"})
        assert server.stop() == 0, server.log

    assert completion.status_code == 200, completion.text
    assert completion.json()["usage"]["completion_tokens"] == 4
    assert completion.json()["choices"][0]["text"].count(" <") == 4
    for refused in (chat, text):
        assert refused.status_code == 400, refused.text
        assert "no tokenizer" in refused.json()["error"]["message"]
