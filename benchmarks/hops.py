"""How far the road of a step and of a request is: functions, files and file switches.

    python -m benchmarks.hops [--list]

Counted by Python's profiler: calls into `serve/`, the different functions and files among them, and
how often a call goes to another file than the one before it. Four roads are walked: a steady decode
step and an arrival with its first step over a simulated device (engine, scheduler and cache alone),
a whole decode step of a tiny model on the reference kernels, and the front half of a streamed chat
request over a scripted engine. `--list` names the functions in the order of their first call.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import serve
from serve.api.app import create_app
from serve.api.figures.metrics import Metrics
from serve.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from serve.engine.async_engine import AsyncEngine
from serve.engine.build import build_engine_core, core_over
from serve.engine.core import EngineCore
from serve.messages import AddRequest
from serve.sampling_params import SamplingParams
from tests.api.conftest import ServerConfig
from tests.api.scripted import Script, ScriptedClient, byte_level_tokenizer
from tests.fakes import FakeExecutor, FakeInbox, FakeOutbox
from tests.tiny_models import save_model

ROOT = Path(serve.__file__).parent
BLOCK_SIZE = 16


@dataclass
class Road:
    """The calls that were made, as (file, function), in order."""

    calls: list[tuple[str, str]] = field(default_factory=list)

    def only(self, *parts: str) -> Road:
        """The calls into these parts of `serve/`."""
        return Road([call for call in self.calls if call[0].split("/")[0] in parts])

    @property
    def functions(self) -> list[tuple[str, str]]:
        """Each once, in the order of first calls."""
        return list(dict.fromkeys(self.calls))

    @property
    def files(self) -> list[str]:
        """Each once, in the order of first calls."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    @property
    def num_switches(self) -> int:
        """Calls into another file than the call before."""
        return sum(a[0] != b[0] for a, b in itertools.pairwise(self.calls))


@contextmanager
def walked() -> Iterator[Road]:
    """Every Python call into `serve/` made meanwhile, in this thread."""
    road, prefix = Road(), f"{ROOT}/"

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix) and code.co_name[0] != "<":
            road.calls.append((code.co_filename.removeprefix(prefix), code.co_qualname))

    sys.setprofile(note)
    try:
        yield road
    finally:
        sys.setprofile(None)


def simulated_core() -> tuple[EngineCore, FakeInbox]:
    """A core over the fake device."""
    executor = FakeExecutor(64, BLOCK_SIZE, max_num_batched_tokens=64)
    config = EngineConfig(cache=CacheConfig(block_size=BLOCK_SIZE))
    inbox = FakeInbox()
    core, _ = core_over(executor, config, inbox, FakeOutbox())
    return core, inbox


def real_core(folder: Path) -> EngineCore:
    """A core over two layers of a random Llama on the reference kernels."""
    save_model(folder)
    config = EngineConfig(
        model=ModelConfig(model=str(folder)),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=32),
        scheduler=SchedulerConfig(max_num_seqs=4),
        device=DeviceConfig(attention_backend="reference"),
    )
    core, _ = build_engine_core(config, folder, FakeInbox(), FakeOutbox())
    return core


def request(name: str) -> AddRequest:
    """Three tokens in, twenty out, greedy."""
    sampling = SamplingParams(max_tokens=20, temperature=0.0)
    return AddRequest(name, [1, 2, 3], sampling, arrival_time=0.0)


def arrival(core: EngineCore) -> Road:
    """A request arrives and has its first step."""
    with walked() as road:
        core.handle(request("first"))
        core.step()
    return road


def decode(core: EngineCore) -> Road:
    """A step in which nothing but decodes happens."""
    core.step()
    with walked() as road:
        core.step()
    return road


async def streamed_chat() -> Road:
    """The front half of a chat request, from the ASGI call to the last event."""
    tokenizer = byte_level_tokenizer()
    client = ScriptedClient(tokenizer, lambda _: Script(tokenizer.encode_now(" Hello world")))
    config = ServerConfig(disable_log_requests=True)
    metrics = Metrics(config.metrics_prefix)
    engine = AsyncEngine(client, tokenizer, metrics, names=("tiny",))
    await engine.start()
    app = create_app(engine, config, metrics)
    await ask(app)  # what is made once, at the first request, is no part of the road
    with walked() as road:
        await ask(app)
    await engine.close()
    return road


async def ask(app: Callable[..., Any]) -> None:
    """One streamed chat request, without a server."""
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 8}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "state": {},
    }
    events = iter([{"type": "http.request", "body": json.dumps(body).encode()}])
    answered = asyncio.Event()

    async def receive() -> dict[str, Any]:
        event = next(events, None)
        if event is not None:
            return event
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200, message
        if message["type"] == "http.response.body" and not message.get("more_body"):
            answered.set()

    await app(scope, receive, send)


def sizes() -> str:
    """How long functions and files are: hops must not be won by halls."""
    functions, files = [], {}
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        files[str(path.relative_to(ROOT))] = text.count("\n")
        functions += [
            node.end_lineno - node.body[0].lineno + 1
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
        ]
    functions.sort()
    long = {name: lines for name, lines in files.items() if lines > 300}
    return (
        f"{len(files)} files of {sum(files.values()):,} lines; longest functions' bodies: median "
        f"{statistics.median(functions):.0f}, p90 {functions[len(functions) * 9 // 10]} lines; "
        f"files over 300 lines: {long or 'none'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.hops", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the functions of each road")
    options = parser.parse_args()
    core, _ = simulated_core()
    inner = ("engine", "scheduler", "kv_cache")
    roads = {"arrival and first step: engine, scheduler, cache": arrival(core).only(*inner)}
    roads["steady decode step: engine, scheduler, cache"] = decode(core).only(*inner)
    with tempfile.TemporaryDirectory() as folder:
        whole = real_core(Path(folder))
        arrival(whole)
        roads["steady decode step: whole, reference kernels"] = decode(whole)
        whole.close()
    roads["streamed chat request: front half"] = asyncio.run(streamed_chat())
    print("| road | functions | calls | files | file switches |\n|---|---|---|---|---|")
    for name, road in roads.items():
        counts = (len(road.functions), len(road.calls), len(road.files), road.num_switches)
        print(f"| {name} | {' | '.join(map(str, counts))} |")
    print(f"\n{sizes()}")
    for name, road in roads.items() if options.list else ():
        print(f"\n{name}")
        for file in road.files:
            print(f"  {file}: {', '.join(f for where, f in road.functions if where == file)}")


if __name__ == "__main__":
    main()
