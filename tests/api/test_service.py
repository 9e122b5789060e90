"""Several models behind one service."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from serve.api.app import create_app
from serve.api.figures.metrics import Metrics
from serve.config import ServerConfig
from serve.engine.async_engine import AsyncEngine
from serve.engine.observer import NoObserver
from tests.api.scripted import Script, ScriptedClient, byte_level_tokenizer

MESSAGES = [{"role": "user", "content": "Hello"}]
ROADS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}


def engine_of(model: str, answer: str, max_model_len: int, observer: Any) -> AsyncEngine:
    tokenizer = byte_level_tokenizer()
    script = Script(tokenizer.encode_now(answer))
    client = ScriptedClient(tokenizer, lambda request: script, max_model_len=max_model_len)
    return AsyncEngine(client, tokenizer, observer, names=(model,))


@pytest.mark.parametrize("stream", [False, True])
async def test_each_request_is_answered_by_the_engine_of_its_model(stream: bool) -> None:
    metrics = Metrics("vllm:")
    small = engine_of("small", " one", 256, metrics)
    large = engine_of("large", " two", 512, NoObserver())
    for engine in (small, large):
        await engine.start()
    app = create_app(small, ServerConfig(), metrics, large)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        for road, body in ROADS.items():
            for model, own, others in (("small", " one", " two"), ("large", " two", " one")):
                asked = {**body, "model": model, "stream": stream}
                answer = await http.post(road, json=asked)
                assert answer.status_code == 200, answer.text
                assert f'"{own}"' in answer.text, (road, model)
                assert f'"{others}"' not in answer.text, (road, model)
                assert f'"model":"{model}"' in answer.text
            refused = await http.post(road, json={**body, "model": "none"})
            assert refused.status_code == 404
            assert "small, large" in refused.text
        models = (await http.get("/v1/models")).json()["data"]
        assert [(m["id"], m["max_model_len"]) for m in models] == [("small", 256), ("large", 512)]
        tokens = (await http.post("/tokenize", json={"model": "large", "prompt": "Hello"})).json()
        assert tokens["max_model_len"] == 512
        large._client.die("it is gone")  # type: ignore[attr-defined]
        await large.wait_dead()
        assert (await http.get("/health")).status_code == 503
    for engine in (small, large):
        await engine.close()
