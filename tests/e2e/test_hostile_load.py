"""What a stranger can take: one attack after another on one server, beside an open stream."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.requests import client, completion, events, is_idle, streamed_text, until
from tests.e2e.server_process import ServerProcess, serve

GROWTH_BYTES = 20 * 2**20  # what the front may have kept after each attack
TIMES_QUIET = 60  # how many times its longest quiet gap the bystander's gaps may reach
MB = 10**6

Attack = Callable[[httpx.AsyncClient], Awaitable[None]]


@dataclass
class Bystander:
    """A stream that is always open, and a probe of /health; both note the time between answers."""

    longest_s: float = 0.0
    unhealthy: list[int] = field(default_factory=list)

    async def read(self, http: httpx.AsyncClient) -> None:
        while True:
            body = completion("Bystander", 1500, stream=True)
            async with http.stream("POST", "/v1/completions", json=body) as response:
                last = time.monotonic()
                async for _ in events(response):
                    now = time.monotonic()
                    self.longest_s, last = max(self.longest_s, now - last), now

    async def probe(self, http: httpx.AsyncClient) -> None:
        while True:
            began = time.monotonic()
            health = await http.get("/health")
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            if health.status_code != 200:
                self.unhealthy.append(health.status_code)
            await asyncio.sleep(0.02)

    def take_longest(self) -> float:
        longest, self.longest_s = self.longest_s, 0.0
        return longest


@asynccontextmanager
async def bystander(server: ServerProcess) -> AsyncIterator[Bystander]:
    """One that watches while the body runs. Its clients are its own: attackers share no pool."""
    noted = Bystander()
    async with client(server) as reading, client(server) as probing:
        tasks = [
            asyncio.create_task(noted.read(reading)),
            asyncio.create_task(noted.probe(probing)),
        ]
        try:
            yield noted
            assert not any(task.done() for task in tasks), tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def refused(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    """A request that must be a 4xx with a message."""
    answer = await http.post(path, json=body)
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:300])
    assert answer.json()["error"]["message"]


async def harmless(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    """A request that may be answered or refused, but is no failure of the server."""
    answer = await http.post(path, json=body)
    assert answer.status_code < 500, answer.text[:300]


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **fields}


async def sec_41_trailers_without_end(http: httpx.AsyncClient) -> None:
    """Also extensions of a chunk's size without end."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    for begin, more in ((b"2\r\n{}\r\n0\r\n", b"a1:\r\n"), (b"2;", b"a=1;")):
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(head + begin)
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                writer.write(more * (MB // len(more)))
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await reader.read()


async def sec_42_stop_strings_of_any_length(http: httpx.AsyncClient) -> None:
    await refused(http, "/v1/completions", completion("x", 2, stop="a" * 3 * MB, n=10))
    await refused(http, "/v1/chat/completions", chat("x", stop=["b" * 100_000] * 20, n=10))
    message = {**chat("x"), "model": "tiny", "stop_sequences": ["c" * 3 * MB]}
    await refused(http, "/v1/messages", message)


async def sec_43_conversations_that_are_stored(http: httpx.AsyncClient) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "x" * (7 * MB // 2)}
    output = {"type": "function_call_output", "call_id": "c", "output": "y"}
    for _ in range(20):
        await harmless(http, "/v1/responses", {"input": [call, output], "max_output_tokens": 16})
    empty = [{"role": "user", "content": ""}] * 8000
    await harmless(http, "/v1/responses", {"input": empty, "max_output_tokens": 16})


async def sec_44_texts_that_hold_every_tokenizer_thread(http: httpx.AsyncClient) -> None:
    large = "qzxj" * (MB - 1000)
    await asyncio.gather(
        *(refused(http, "/v1/chat/completions", chat(large)) for _ in range(4)),
        refused(http, "/tokenize", {"prompt": large}),
        refused(http, "/v1/responses", {"input": large, "truncation": "auto"}),
    )


async def sec_45_templates(http: httpx.AsyncClient) -> None:
    for template in (
        "{{ 'a' * 300000000 }}",
        "{{ '%030000000d' % 1 }}",
        "{{ messages|length ** (9 ** 9) }}",
        "{{ 9 ** (9 ** 8) % 7 }}",
        "(" * 3000 + "1" + ")" * 3000,
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ 'a'.ljust(400000000) }}",
        "{% for i in range(100000) %}{{ 'abcdefgh' * 100000 }}{% endfor %}",
    ):
        await harmless(http, "/v1/chat/completions", chat("x", chat_template=template))


async def sec_46_answers_without_a_bound(http: httpx.AsyncClient) -> None:
    await refused(http, "/v1/completions", completion("x", 1500, n=1024, logprobs=20))
    await refused(http, "/v1/completions", completion("x", 1900, n=128, logprobs=20))
    await harmless(http, "/v1/completions", completion("x", 380, n=16, logprobs=20))


async def sec_47_lists_of_ids(http: httpx.AsyncClient) -> None:
    many = [i % 250 for i in range(1_300_000)]
    await harmless(http, "/v1/completions", completion("x", 4, n=8, allowed_token_ids=many))
    await harmless(http, "/v1/completions", completion("x", 4, n=8, stop_token_ids=many))


async def sec_50_many_users(http: httpx.AsyncClient) -> None:
    bodies = [completion("x", 1, user=f"user {i}") for i in range(300)]
    await asyncio.gather(*(harmless(http, "/v1/completions", body) for body in bodies))


async def sec_51_small_ones(http: httpx.AsyncClient) -> None:
    for _ in range(20):
        offered = {"connection": "Upgrade", "upgrade": "websocket"}
        assert (await http.get("/health", headers=offered)).status_code == 200
        assert (await http.head("/health")).status_code == 200
    deep = '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}"
    json = {"content-type": "application/json"}
    answer = await http.post("/v1/chat/completions", content=deep, headers=json)
    assert answer.status_code == 400


ATTACKS: tuple[Attack, ...] = (
    sec_41_trailers_without_end,
    sec_42_stop_strings_of_any_length,
    sec_43_conversations_that_are_stored,
    sec_44_texts_that_hold_every_tokenizer_thread,
    sec_45_templates,
    sec_46_answers_without_a_bound,
    sec_47_lists_of_ids,
    sec_50_many_users,
    sec_51_small_ones,
)


async def test_sec_41_to_51_one_after_another_cost_a_bystander_nothing_and_leave_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("default: {requests_per_minute: 1000000}\n")
    flags = ("--served-model-name", "tiny", "--trust-request-chat-template")
    with serve(tiny_model, *flags, "--limits-file", str(limits)) as server:
        server.wait_ready()
        async with client(server) as http, bystander(server) as watching:
            for _ in range(10):  # what the first requests make is kept for good
                await harmless(http, "/v1/chat/completions", chat("warm " * 100, logprobs=True))
                await harmless(http, "/v1/responses", {"input": "x", "max_output_tokens": 16})
            watching.take_longest()
            await asyncio.sleep(2)
            quiet_s = watching.take_longest()
            for attack in ATTACKS:
                before = server.process.memory_info().rss
                await attack(http)
                gap_s = watching.take_longest()
                assert gap_s < TIMES_QUIET * quiet_s, (attack.__name__, gap_s, quiet_s)
                await until(
                    lambda before=before: (  # type: ignore[misc]
                        server.process.memory_info().rss < before + GROWTH_BYTES
                    ),
                    f"memory is back after {attack.__name__}",
                )
                assert await streamed_text(http, completion("plain", 4))
            assert watching.unhealthy == []
        await until(lambda: is_idle(server), "every block is free")
        assert "Traceback" not in server.log
        assert server.stop() == 0
