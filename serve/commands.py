"""The commands of `serve-llm`: flags made from the config dataclasses, then the server.

Exit codes: 0 a clean end, 1 the server could not start or its engine died, 2 a wrong command line,
130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, ArgumentCollection, CycloptsError, Group, Parameter
from cyclopts.config import Dict

from serve import __version__
from serve.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from serve.errors import ConfigError, EngineDead
from serve.flags import HELP_PAGE, flags
from serve.plan.settings import PlanConfig

Parse = Callable[[Sequence[str]], "partial[int]"]
"""A command line → the call it asks for."""

_DESCRIPTION = """An LLM server that speaks OpenAI's API.

`serve-llm serve` serves the default model on http://127.0.0.1:8000; `serve-llm serve --help` lists
every setting.
"""


def run(tokens: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    parse = partial(_parse, _app())
    try:
        call = _simulation(tokens, parse) if tokens[:1] == ["simulate"] else parse(tokens)
    except (CycloptsError, ConfigError) as error:
        return _fail(error, exit_code=2)
    try:
        exit_code: int | None = call()
    except (ConfigError, EngineDead) as error:
        return _fail(error, exit_code=1)
    except KeyboardInterrupt:  # Ctrl-C while something loads that has no answer of its own to it
        return 130
    return exit_code or 0  # --help and --version return None


def _parse(app: App, tokens: Sequence[str]) -> partial[int]:
    """The call that a command line asks for. Raises CycloptsError or ConfigError."""
    command, bound, _ = app.parse_args(tokens, print_error=False, exit_on_error=False)
    return partial(command, *bound.args, **bound.kwargs)


def _simulation(tokens: Sequence[str], parse: Parse) -> partial[int]:
    from serve.simulate.flags import comparison

    return comparison(tokens, parse)


def _app() -> App:
    app = App(
        name="serve-llm",
        help=_DESCRIPTION,
        version=__version__,
        config=_merge_file,
        result_action=None,
    )
    app.command(serve, help_formatter=HELP_PAGE)
    app.command(plan, help_formatter=HELP_PAGE)
    app.command(collect_env, help_formatter=HELP_PAGE)
    # By name: what these import takes as long as all the rest.
    app.command(
        "serve.simulate.flags:simulate",
        name="simulate",
        help="Run the scheduler and the cache against a cost model, without a model or a device.",
        help_formatter=HELP_PAGE,
    )
    app.command(
        "serve.bench.commands:bench",
        name="bench",
        help="Measure a server, or the engine without one.",
    )
    return app


def serve(
    model: Annotated[ModelConfig, flags("Model", 1)] = ModelConfig(),
    *,
    server: Annotated[ServerConfig, flags("Server", 2)] = ServerConfig(),
    scheduler: Annotated[SchedulerConfig, flags("Scheduler", 3)] = SchedulerConfig(),
    cache: Annotated[CacheConfig, flags("KV cache", 4)] = CacheConfig(),
    device: Annotated[DeviceConfig, flags("Device", 5)] = DeviceConfig(),
    config: Annotated[Path | None, Parameter(group=Group("More", sort_key=6))] = None,
) -> int:
    """Serve a model over HTTP.

    MODEL is a Hugging Face folder, a .gguf file or a hub id. Flags beat the --config file, which
    beats the defaults.

    Parameters
    ----------
    config
        YAML file of flags without their dashes (`port: 9000`, `api-key: [a, b]`).
    """
    from serve.server import run_server  # late: --help need not wait for torch

    engine = EngineConfig(model=model, cache=cache, scheduler=scheduler, device=device)
    return run_server(engine, server)


def plan(
    model: Annotated[ModelConfig, flags("Model", 1)] = ModelConfig(),
    *,
    options: Annotated[PlanConfig, flags("Plan", 2)] = PlanConfig(),  # noqa: B008 (frozen)
    scheduler: Annotated[SchedulerConfig, flags("Scheduler", 3)] = SchedulerConfig(),
    cache: Annotated[CacheConfig, flags("KV cache", 4)] = CacheConfig(),
    device: Annotated[DeviceConfig, flags("Device", 5)] = DeviceConfig(),
) -> int:
    """Tell what a model needs and what fits beside it, from its config alone.

    MODEL is a folder, a config.json, a .gguf file or a hub id, of which only the config is fetched.
    No GPU is needed: `--memory 80GiB` plans for one. The other flags are serve's.
    """
    from serve.plan.command import run_plan  # late: --help need not wait for torch

    engine = EngineConfig(model=model, cache=cache, scheduler=scheduler, device=device)
    return run_plan(engine, options)


def collect_env(*, as_json: Annotated[bool, Parameter(name="--json", negative=())] = False) -> int:
    """Tell about this machine what a report of a problem should say, without secrets.

    Parameters
    ----------
    as_json
        Print JSON instead of lines.
    """
    from serve.collect_env import run  # late: --help need not wait for torch

    return run(as_json=as_json)


def _merge_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill what the command line left open from the file that --config names."""
    given = next((a.tokens for a in arguments if a.name == "--config"), [])
    if given:
        path = given[-1].value
        Dict(_read_flags(Path(path)), source=path, use_commands_as_keys=False)(
            app, commands, arguments
        )


def _read_flags(path: Path) -> dict[str, Any]:
    from serve.settings_file import read_yaml  # late: few command lines have a file

    flags = read_yaml(path, "--config")
    if flags is None:
        return {}
    if not isinstance(flags, dict) or not all(isinstance(key, str) for key in flags):
        raise ConfigError(f"--config {path}: must hold `flag: value` lines, such as `port: 9000`.")
    if "config" in flags:
        raise ConfigError(f"--config {path}: a file cannot name another config file.")
    return flags


def _fail(error: Exception, *, exit_code: int) -> int:
    sys.stderr.write(f"serve-llm: {' '.join(str(error).split())}\n")
    return exit_code
