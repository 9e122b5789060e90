"""Tests that need what the extra `foreign` installs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.conftest import tiny_model, tiny_server  # noqa: F401 (fixtures)

HERE = Path(__file__).parent
CLIENTS = (
    *("agents", "httpx_sse", "langchain_openai", "litellm", "llm", "lm_eval", "pydantic_ai"),
    *("schemathesis", "smolagents"),
)
MISSING = [name for name in CLIENTS if find_spec(name) is None]


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Everything here is marked; without the clients it is skipped."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker("foreign")
            if MISSING:
                reason = f"without {', '.join(MISSING)}; make test-foreign installs them"
                item.add_marker(pytest.mark.skip(reason))
