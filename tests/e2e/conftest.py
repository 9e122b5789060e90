"""Servers and models that the end-to-end tests share."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serve.checkpoint.hub import find_model
from serve.errors import ConfigError
from tests.e2e.server_process import ServerProcess, serve
from tests.e2e.tiny_model import save_tiny_model

SOFT_FILE_LIMIT = 100  # of the shared server when it starts; fewer than its tests open


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random model."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, downloaded on first use."""
    try:
        return find_model(None)
    except ConfigError as error:
        pytest.skip(f"the default model is out of reach: {error}")


@contextmanager
def soft_file_limit(soft: int) -> Iterator[None]:
    """Lower this process's own limit for a while; children that it starts inherit it."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path) -> Iterator[ServerProcess]:
    """A server of the tiny model that tests share: none may stop it or leave requests behind."""
    with soft_file_limit(SOFT_FILE_LIMIT):
        server = serve(tiny_model, "--served-model-name", "tiny")
    with server:
        yield server.wait_ready()
        assert server.stop() == 0, server.log


@pytest.fixture(scope="module")
def default_server(default_model: Path) -> Iterator[ServerProcess]:
    """A server of the default model, started without naming it, as `make serve` does."""
    with ServerProcess(["--port", "0"]) as server:
        yield server.wait_ready()
        assert server.stop() == 0, server.log
