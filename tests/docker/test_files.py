"""The image and compose files, as far as they can be checked without a Docker engine."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.e2e.prometheus_process import ROOT, need

DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(dockerfile: Path) -> None:
    done = subprocess.run(
        [need("hadolint"), "--no-color", str(dockerfile)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_an_ordinary_user_with_a_health_check_and_a_model_volume(
    dockerfile: Path,
) -> None:
    final_stage = dockerfile.read_text().split("\nFROM ")[-1]
    assert re.search(r"^USER 1000$", final_stage, re.MULTILINE)
    assert "\nHEALTHCHECK " in final_stage
    assert "\nVOLUME /models" in final_stage
    assert ":latest" not in dockerfile.read_text()


def test_every_direct_dependency_of_the_images_is_pinned() -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (DOCKER / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {
        re.match(r"[\w-]+", entry)[0].lower().replace("_", "-") for entry in project["dependencies"]
    }
    assert wanted - pinned == set()


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.cuda.yaml"]])
def test_compose_itself_accepts_the_files(files: list[str]) -> None:
    chosen = [word for file in files for word in ("-f", str(DOCKER / file))]
    done = subprocess.run(
        [need("docker-compose"), *chosen, "config", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_compose_waits_longer_than_the_server_lets_requests_run() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert set(services) == {"serve-llm", "prometheus", "grafana"}
    grace_s = int(services["serve-llm"]["stop_grace_period"].removesuffix("s"))
    from serve.config import ServerConfig

    assert grace_s > ServerConfig().shutdown_timeout


def test_every_file_that_compose_mounts_exists() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    mounts = [volume for service in services.values() for volume in service.get("volumes", [])]
    ours = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    assert len(ours) == 3
    for path in ours:
        assert (DOCKER / path).exists()


def test_promtool_accepts_the_scrape_configuration() -> None:
    done = subprocess.run(
        [need("promtool"), "check", "config", str(DOCKER / "prometheus.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
