"""A real Prometheus that scrapes one server, five times a second."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).parents[2]


def need(program: str) -> str:
    """The program's path; skips the test, visibly, where it is not installed."""
    beside_python = str(Path(sys.executable).parent)
    path = shutil.which(program, path=beside_python) or shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


class PrometheusProcess:
    """Runs with the scrape configuration of docker/, pointed at `target` (host:port)."""

    def __init__(self, target: str, folder: Path) -> None:
        config = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text())
        config["global"]["scrape_interval"] = "200ms"
        (job,) = config["scrape_configs"]
        job["static_configs"][0]["targets"] = [target]
        config_file = folder / "prometheus.yml"
        config_file.write_text(yaml.safe_dump(config))
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [
                need("prometheus"),
                f"--config.file={config_file}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> PrometheusProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples an expression has now; none while Prometheus itself is starting."""
        try:
            response = httpx.get(f"{self.url}/api/v1/query", params={"query": expression})
        except httpx.TransportError:
            return []
        if response.status_code == 503:  # it listens before it is ready, and says so in plain text
            return []
        answer = response.json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
