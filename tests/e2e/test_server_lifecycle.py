"""The server process as its operator sees it: start, signals, a dead engine, hang-ups, pressure."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.conftest import SOFT_FILE_LIMIT
from tests.e2e.requests import client, completion, events, is_idle, streamed_text, until
from tests.e2e.server_process import ServerProcess, serve

LONG = completion("Once upon a time", 1500, stream=True)


@asynccontextmanager
async def running_stream(http: httpx.AsyncClient) -> AsyncIterator[AsyncIterator[dict]]:
    """The rest of a long stream whose first token has arrived."""
    async with http.stream("POST", "/v1/completions", json=LONG) as response:
        stream = events(response)
        await anext(stream)
        yield stream


async def rest_of(stream: AsyncIterator[dict]) -> list[dict]:
    return [event async for event in stream]


# ------------------------------------------------------------------------------------------- start


def test_the_log_says_what_is_served_and_how_to_ask(tiny_server: ServerProcess) -> None:
    assert f"serving tiny at {tiny_server.url}" in tiny_server.log
    assert f"curl {tiny_server.url}/v1/chat/completions" in tiny_server.log
    assert not tiny_server.url.endswith(":0")


def start_up_failure(*arguments: str, **environment: str) -> str:
    """The only line that a server writes which cannot start."""
    with ServerProcess([*arguments, "--log-level", "error"], **environment) as server:
        assert server.wait() == 1, server.log
        assert len(server.lines) == 1, server.log
        return server.log


def test_a_missing_model_is_one_line_and_exit_code_1() -> None:
    assert "/no/such/model does not exist" in start_up_failure("/no/such/model", "--port", "0")


def test_a_taken_port_is_one_line_and_exit_code_1(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = start_up_failure(str(tiny_model), "--port", port)
    assert f"port {port}" in said
    assert "--port 0 takes a free one" in said


def cut_tail(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", cut_tail),
        ("config.json", lambda file: file.write_text("{")),
        ("tokenizer.json", Path.unlink),
    ],
)
def test_ops_13_a_damaged_model_folder_is_one_line_that_names_the_file(
    tiny_model: Path, tmp_path: Path, file: str, damage
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    damage(folder / file)
    said = start_up_failure(str(folder), "--port", "0")
    assert file.split(".")[0] in said


def test_a_signal_during_the_start_leaves_nothing_behind(tiny_model: Path) -> None:
    with serve(tiny_model) as server:
        while not server.process.children() and server.process.is_running():
            server.process.cpu_percent(interval=0.05)
        assert server.stop() == 0, server.log
        assert not server.url


def test_an_engine_killed_during_the_start_is_one_line_and_exit_code_1(tiny_model: Path) -> None:
    with serve(tiny_model, "--log-level", "error") as server:
        while not server.process.children() and server.process.is_running():
            server.process.cpu_percent(interval=0.05)
        server.engine.kill()
        assert server.wait() == 1
        assert len(server.lines) == 1, server.log
        assert "perhaps because memory ran out" in server.log


def test_sec_51_a_killed_start_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    with serve(tiny_model, TMPDIR=str(tmp_path)) as server:
        while not server.process.children() and server.process.is_running():
            server.process.cpu_percent(interval=0.05)
        for process in [*server.process.children(recursive=True), server.process]:
            process.kill()
        assert server.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_sec_51_a_limits_file_that_is_no_yaml_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    path = tmp_path / "limits.yaml"
    for text in ("[" * 20_000, "default: {weight: 2024-99-99}"):
        path.write_text(text)
        said = start_up_failure("/no/such/model", "--limits-file", str(path))
        assert "--limits-file" in said
        assert "limits.yaml" in said


async def test_ops_10_more_connections_than_the_soft_file_limit_are_served(
    tiny_server: ServerProcess,
) -> None:
    """The fixture starts the server under a soft limit of SOFT_FILE_LIMIT."""
    soft, hard = tiny_server.process.rlimit(psutil.RLIMIT_NOFILE)
    assert soft == min(hard, 1 << 20) > SOFT_FILE_LIMIT
    async with client(tiny_server) as http:
        bodies = [completion(f"Number {i}", 4) for i in range(SOFT_FILE_LIMIT + 50)]
        texts = await asyncio.gather(*(streamed_text(http, body) for body in bodies))
    assert len(texts) == len(bodies)


# --------------------------------------------------------------------------------------------- end


async def test_ops_01_a_killed_engine_fails_requests_at_once_and_ends_the_server(
    tiny_model: Path,
) -> None:
    with serve(tiny_model, "--served-model-name", "tiny", "--engine-restarts", "0") as server:
        server.wait_ready()
        async with client(server) as http, running_stream(http) as stream:
            plain = asyncio.create_task(http.post("/v1/completions", json=LONG | {"stream": False}))
            await until(
                lambda: server.metric("serve_llm_num_requests_running") == 2, "both requests run"
            )
            server.engine.kill()
            last = (await rest_of(stream))[-1]
            assert last["error"]["message"]
            answer = await plain
            assert answer.status_code in (500, 503)
            assert answer.json()["error"]["message"]
            health = await http.get("/health")
            assert health.status_code == 503
            refused = await http.post("/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert refused.json()["error"]["message"]
        assert server.wait() != 0
        assert "engine died" in server.log


WISHES: tuple[dict, ...] = (
    {},
    {"seed": 1, "temperature": 1.0, "logprobs": 2},
    {"seed": 2, "temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"seed": 3, "temperature": 1.2, "top_p": 0.9, "n": 2},
    {"repetition_penalty": 1.3, "logit_bias": {"40": 2.0}, "min_tokens": 5},
    {"seed": 4, "temperature": 1.0, "stop": ["zq", "qz"], "ignore_eos": False},
    {"seed": 5, "temperature": 1.0, "guided_regex": "([0-9]{1,3}, )*end"},
)
"""What a moved stream must not lose: draws, penalties, logprobs, choices, stop strings, forms."""


async def whole(http: httpx.AsyncClient, body: dict) -> dict:
    """Everything that a streamed completion says, put together."""
    texts: dict[int, str] = {}
    ends, logprobs, usage = {}, [], {}
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=asked) as response:
        async for event in events(response):
            assert "error" not in event, event
            usage = event["usage"] or usage
            for choice in event["choices"]:
                index = choice["index"]
                texts[index] = texts.get(index, "") + choice["text"]
                ends[index] = choice["finish_reason"] or ends.get(index)
                if choice["logprobs"]:
                    logprobs += choice["logprobs"]["token_logprobs"]
    counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    return {"texts": texts, "ends": ends, "logprobs": logprobs, "usage": counts}


async def test_a_killed_engine_costs_open_streams_a_pause_and_not_one_bit(
    tiny_model: Path,
) -> None:
    """kill -9 under 21 streams; and once more within a minute, which is the end."""
    with serve(tiny_model, "--served-model-name", "tiny") as server:
        server.wait_ready()
        bodies = [completion(f"Story {i}", 300) | WISHES[i % len(WISHES)] for i in range(21)]
        draw = completion("Draw", 300, temperature=1.0)  # its seed is drawn by the server

        def generated() -> float:
            return server.metric("serve_llm_generation_tokens_total")

        async with client(server) as http:
            undisturbed = await asyncio.gather(*(whole(http, body) for body in bodies))
            before, engine = generated(), server.engine
            moved = asyncio.gather(*(whole(http, body) for body in bodies))
            unseeded = asyncio.create_task(whole(http, draw))
            await until(lambda: generated() > before + 1000, "all are under way")
            engine.kill()
            await until(
                lambda: httpx.get(f"{server.url}/health").json()["status"] == "restarting",
                "the death is noticed",
            )
            not_ready = await http.get("/ready")
            assert (not_ready.status_code, "retry-after" in not_ready.headers) == (503, True)
            late = asyncio.create_task(streamed_text(http, completion("Late", 5)))
            assert await moved == undisturbed
            assert (await unseeded)["usage"]["completion_tokens"] == 300
            assert await late
            assert (await http.get("/ready")).status_code == 200
            assert server.metric("serve_llm_engine_restarts_total") == 1
            assert generated() > before
            assert is_idle(server)
            server.engine.kill()
        assert server.wait() == 1
        assert "engine died" in server.log


async def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones(tiny_model: Path) -> None:
    with serve(tiny_model, "--served-model-name", "tiny") as server:
        server.wait_ready()
        async with client(server) as http, running_stream(http) as stream:
            server.signal(signal.SIGTERM)
            await until(lambda: "stopping" in server.log, "it stops")
            refused = await http.post("/v1/completions", json=completion("late", 1))
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            received = await rest_of(stream)
        assert received[-1]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0, server.log


async def test_load_balancers_turn_away_first_and_keys_are_written_nowhere(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Keys of every source, all over the log, the engine's process and what is left behind."""
    keys = {name: f"planted-{name}" for name in ("file", "environment", "admin", "wrong")}
    for name in ("file", "admin"):
        (tmp_path / name).write_text(keys[name])
        (tmp_path / name).chmod(0o600)
    trace = tmp_path / "trace.jsonl"
    flags = ["--served-model-name", "tiny", "--drain-delay", "600", "--log-level", "debug"]
    flags += ["--api-key-file", str(tmp_path / "file"), "--trace-file", str(trace)]
    flags += ["--admin-api-key-file", str(tmp_path / "admin")]
    with serve(tiny_model, *flags, SERVE_LLM_API_KEY=keys["environment"]) as server:
        server.wait_ready()
        seen = " ".join([*server.engine.cmdline(), *server.engine.environ().values()])

        async def statuses(method: str, path: str, **body: object) -> list[int]:
            bearers = [{"authorization": f"Bearer {key}"} for key in keys.values()]
            answers = [await http.request(method, path, headers=h, json=body) for h in bearers]
            seen_answers.extend(answer.text for answer in answers)
            return [answer.status_code for answer in answers]

        seen_answers: list[str] = []
        async with client(server) as http:
            assert await statuses("POST", "/reset_prefix_cache") == [403, 403, 200, 401]
            assert await statuses("GET", "/v1/scheduler/config") == [200, 200, 200, 401]
            server.signal(signal.SIGTERM)
            await until(lambda: "stopping in 600 s" in server.log, "it says so")
            assert (await http.get("/ready")).status_code == 503
            asked = completion("late", 1)
            assert await statuses("POST", "/v1/completions", **asked) == [200, 200, 200, 401]
        assert server.stop() == 0, server.log
        seen += " ".join([server.log, trace.read_text(), *seen_answers])
    assert "planted" not in seen


async def test_after_the_shutdown_timeout_running_requests_end_with_an_error(
    tiny_model: Path,
) -> None:
    flags = ("--served-model-name", "tiny", "--shutdown-timeout", "0")
    with serve(tiny_model, *flags) as server:
        server.wait_ready()
        async with client(server) as http, running_stream(http) as stream:
            server.signal(signal.SIGINT)
            assert (await rest_of(stream))[-1]["error"]["message"]
        assert server.wait() == 0, server.log


async def test_a_second_signal_ends_the_wait(tiny_model: Path) -> None:
    flags = ("--served-model-name", "tiny", "--shutdown-timeout", "1000")
    with serve(tiny_model, *flags) as server:
        server.wait_ready()
        async with client(server) as http, running_stream(http) as stream:
            server.signal(signal.SIGTERM)
            await until(lambda: "stopping" in server.log, "it stops")
            server.signal(signal.SIGTERM)
            assert "error" in (await rest_of(stream))[-1]
        assert server.wait() == 0, server.log


async def test_ops_42_the_end_waits_for_nothing_that_is_not_there(tiny_model: Path) -> None:
    """Nor is a client that does not read its answer waited for long, or an error of ours."""
    start = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: "
    body = json.dumps({**LONG, "n": 64, "logprobs": 5}).encode()
    flags = ("--served-model-name", "tiny", "--shutdown-timeout", "1")
    with serve(tiny_model, *flags) as server, ExitStack() as connections:
        server.wait_ready()
        for sent in (start, start + b"100\r\n\r\n{", start + b"%d\r\n\r\n" % len(body) + body):
            address = ("127.0.0.1", httpx.URL(server.url).port)
            connection = connections.enter_context(socket.create_connection(address))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(sent)
        await until(lambda: server.metric("serve_llm_generation_tokens_total") > 5_000, "much")
        assert server.stop() == 0, server.log
        assert "ERROR" not in server.log
        assert "Traceback" not in server.log


async def test_sec_48_a_frozen_engine_is_not_healthy_and_goes_on_afterwards(
    tiny_model: Path,
) -> None:
    """And it does not know the keys, which it has no use for (SEC-51)."""
    flags = ("--served-model-name", "tiny", "--engine-timeout", "2")
    key = {"authorization": "Bearer a-secret"}
    with serve(tiny_model, *flags, SERVE_LLM_API_KEY="a-secret", HF_TOKEN="another") as server:
        server.wait_ready()
        environment = server.engine.environ()
        assert environment["PATH"]
        assert not {"a-secret", "another"} & set(environment.values())
        async with client(server, headers=key) as http, running_stream(http) as stream:

            async def health() -> int:
                return (await http.get("/health")).status_code

            assert await health() == 200
            server.engine.suspend()
            while await health() == 200:
                await asyncio.sleep(0.1)
            refused = await http.post("/v1/completions", json=completion("late", 1))
            assert refused.json()["error"]["code"] == "engine_not_responding"
            server.engine.resume()
            assert (await rest_of(stream))[-1]["choices"][0]["finish_reason"] == "length"
            assert await health() == 200
            assert (await http.post("/v1/completions", json=completion("a", 1))).status_code == 200
        assert server.stop() == 0, server.log


async def test_a_killed_front_takes_its_engine_with_it(tiny_model: Path) -> None:
    with serve(tiny_model) as server:
        server.wait_ready()
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL


# ---------------------------------------------------------------------------------------- hang-ups


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_frees_its_blocks(
    tiny_server: ServerProcess, stream: bool
) -> None:
    def aborted() -> float:
        return tiny_server.metric("serve_llm_request_success_total", finished_reason="abort")

    before = aborted()
    async with client(tiny_server) as http:
        body = LONG | {"stream": stream, "n": 2}
        request = http.build_request("POST", "/v1/completions", json=body)
        sending = asyncio.create_task(http.send(request, stream=True))
        await until(lambda: tiny_server.metric("serve_llm_kv_cache_usage_perc") > 0, "it runs")
        if stream:
            await (await sending).aclose()
        else:
            sending.cancel()
        await until(lambda: is_idle(tiny_server), "every block is free")
    assert aborted() == before + 2


# --------------------------------------------------------------------------------------- strangers


async def test_sec_41_bytes_without_end_take_no_memory(tiny_server: ServerProcess) -> None:
    """Trailers, and what follows an answer that did not wait for its body."""
    post = b"POST %s HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    before = tiny_server.process.memory_info().rss
    port = httpx.URL(tiny_server.url).port
    for path, body in (
        (b"/v1/completions", b"2\r\n{}\r\n0\r\n"),
        (b"/nope", b"2\r\n{}\r\n0\r\n"),
        (b"/nope", b"ffffffff\r\n"),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post % path + body)
        with suppress(ConnectionError):
            for _ in range(60):
                writer.write(b"a1:\r\n" * 200_000)
                await writer.drain()
        with suppress(ConnectionError):
            assert (await reader.read()).startswith(b"HTTP/1.1 4")
        writer.close()
    assert tiny_server.process.memory_info().rss < before + 20 * 2**20


# ---------------------------------------------------------------------------------------- pressure


@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_sixteen_long_streams_in_forty_blocks_give_the_undisturbed_texts(
    tiny_model: Path, mode: str
) -> None:
    flags = ("--served-model-name", "tiny", "--num-gpu-blocks-override", "40")
    with serve(tiny_model, *flags, "--preemption-mode", mode) as server:
        server.wait_ready()
        bodies = [completion(f"Story {i} of {'many ' * i}", 200) for i in range(16)]
        async with client(server) as http:
            alone = [await streamed_text(http, body) for body in bodies]
            assert server.metric("serve_llm_num_preemptions_total") == 0
            together = await asyncio.gather(*(streamed_text(http, body) for body in bodies))
        assert together == alone
        assert len(set(alone)) == 16
        assert server.metric("serve_llm_num_preemptions_total") > 0
        assert server.metric("serve_llm_num_preemptions_by_mode_total", mode=mode) > 0
        assert is_idle(server)
        assert server.stop() == 0


async def test_a_short_request_overtakes_long_ones_that_came_before(
    tiny_server: ServerProcess,
) -> None:
    async with client(tiny_server) as http, running_stream(http) as stream:
        answer = await http.post("/v1/completions", json=completion("quick", 2))
        assert answer.status_code == 200
        assert "choices" in await anext(stream)  # the long one is still going
        assert tiny_server.metric("serve_llm_num_requests_running") == 1
    await until(lambda: is_idle(tiny_server), "the long one is aborted")


async def test_sch_22_an_idle_server_rests_and_answers_afterwards(
    tiny_server: ServerProcess,
) -> None:
    """Whatever looks after the cache at idle may neither find fault nor keep a processor busy."""
    shared = "The same long beginning of every prompt. " * 4
    bodies = [completion(f"{shared}{i % 8}", 4) for i in range(256)]
    processes = [tiny_server.process, tiny_server.engine]

    def computed_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    async with client(tiny_server) as http:
        texts = await asyncio.gather(*(streamed_text(http, body) for body in bodies))
        await until(lambda: is_idle(tiny_server), "every block is free")
        started, computed_before_s = time.monotonic(), computed_s()
        await asyncio.sleep(3)  # the idle time itself is what is tested
        share = (computed_s() - computed_before_s) / (time.monotonic() - started)
        again = await streamed_text(http, bodies[0])
    assert share < 0.2
    assert again == texts[0]


@pytest.mark.slow
async def test_ops_18_an_idle_connection_is_kept_for_longer_than_clients_keep_it(
    tiny_server: ServerProcess,
) -> None:
    """uvicorn's own limit would be 5 seconds, and so would be httpx's."""
    patient = httpx.Limits(keepalive_expiry=60)
    async with httpx.AsyncClient(base_url=tiny_server.url, limits=patient) as http:
        await http.get("/health")
        (connection,) = http._transport._pool.connections
        await asyncio.sleep(7)  # the idle time itself is what is tested
        assert (await http.get("/health")).status_code == 200
        assert http._transport._pool.connections == [connection]
