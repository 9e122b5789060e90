"""The command `serve-llm plan`, after its flags have been read."""

from __future__ import annotations

import json

from rich.console import Console

from serve.checkpoint.hub import find_config
from serve.config import EngineConfig
from serve.plan.capacity import plan_capacity
from serve.plan.report import as_json, print_plan
from serve.plan.settings import PlanConfig
from serve.plan.suggestions import suggest


def run_plan(config: EngineConfig, options: PlanConfig) -> int:
    """Print the plan; returns 0, or 1 when the model does not fit. Raises ConfigError."""
    path = find_config(config.model.model, config.model.revision)
    capacity = plan_capacity(config, options, path)
    suggestions = suggest(capacity)
    console = Console(highlight=False)
    if options.json:
        console.print_json(json.dumps(as_json(capacity, suggestions)))
    else:
        print_plan(capacity, suggestions, console)
    return 0 if capacity.cache is not None else 1
