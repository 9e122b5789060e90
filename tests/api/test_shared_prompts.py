"""Choices of one prompt share its KV, in the real engine core and from a cold cache."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from serve.config import CacheConfig, EngineConfig
from serve.messages import EngineStats
from tests.api.stepped import stepped_server
from tests.fakes import FakeExecutor

BLOCK = 4
PROMPT = list(range(41))  # ten full blocks and a token
N, TOKENS = 4, 30


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_compute_a_cold_prompt_once_and_share_its_blocks(path: str, stream: bool) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=BLOCK, max_num_batched_tokens=256)
    config = EngineConfig(cache=CacheConfig(block_size=BLOCK))
    body: dict[str, Any] = {"prompt": PROMPT}
    if "chat" in path:
        body = {"messages": [{"role": "user", "content": "a" * 40}]}
    body |= {"n": N, "max_tokens": TOKENS, "ignore_eos": True, "stream": stream}
    seen: list[EngineStats] = []
    with (
        stepped_server(executor, config) as (server, client),
        server.http() as http,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(http.post, path, json=body)
        while not answer.done():
            server.on_loop(lambda: client.allow(1))
            seen.append(server.on_loop(client.core.scheduler.stats))
            time.sleep(0.001)  # lets the answer's own thread run
        assert answer.result().status_code == 200

    num_prompt = seen[-1].total_prompt_tokens // N
    cached = (num_prompt - 1) // BLOCK * BLOCK
    computed = num_prompt + (N - 1) * (num_prompt - cached) + N * (TOKENS - 1)
    assert sum(executor.step_sizes) == computed
    together = max(stats.num_running for stats in seen)
    assert together == N
    own = -(-(num_prompt + TOKENS - 1) // BLOCK) - cached // BLOCK
    assert max(stats.num_blocks_used for stats in seen) <= cached // BLOCK + N * own
