"""`serve-llm collect-env`: what a report of a problem should say about the machine; no secrets.

Secrets stay out by what is asked, not by a filter over what was found: of the environment only the
variables named here are looked at, and values are printed only of those that can hold no secret.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from serve.worker.device.host_memory import available_bytes, total_bytes, usable_cores

_PACKAGES = (
    "serve-llm",
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "gguf",
    "huggingface_hub",
    "fastapi",
    "uvicorn",
    "pydantic",
    "pyzmq",
    "msgspec",
    "llguidance",
    "numpy",
)
# Switches, counts and lists of numbers. Their values are shown.
_PLAIN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "TORCH_CUDA_ARCH_LIST",
    "TRITON_INTERPRET",
)
# Keys, addresses and paths. Of these only whether they are set.
_PRIVATE_VARIABLES = (
    "CXX",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_TOKEN",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "LD_PRELOAD",
    "SERVE_LLM_API_KEY",
    "SERVE_LLM_CACHE",
)
_COMMAND_TIMEOUT_S = 20

Section = dict[str, str]


def collect(environ: Mapping[str, str] = os.environ) -> dict[str, Section]:
    """Section → name → value, all of it text."""
    return {
        "system": _system(),
        "processor": _processor(),
        "graphics": _graphics(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "environment": _environment(environ),
    }


def run(*, as_json: bool) -> int:
    """Print what was collected; returns 0."""
    report = collect()
    sys.stdout.write(json.dumps(report, indent=2) if as_json else as_text(report))
    sys.stdout.write("\n")
    return 0


def as_text(report: Mapping[str, Section]) -> str:
    """The report to paste into an issue: a headline per section, its lines aligned."""
    return "\n\n".join(_section_text(name, section) for name, section in report.items())


def _section_text(name: str, section: Section) -> str:
    width = max(map(len, section), default=0)
    lines = [f"  {key:<{width}}  {value}" for key, value in section.items()]
    return "\n".join([name, *(lines or ["  nothing"])])


def _system() -> Section:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "compiler": _lines("c++", "--version")[0],
    }


def _processor() -> Section:
    import torch

    return {
        "model": _processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "usable cores": str(usable_cores()),
        "memory": _gib(total_bytes()),
        "memory available": _gib(available_bytes()),
    }


def _graphics() -> Section:
    """What the driver says, so that a card that torch cannot use is seen too."""
    import torch

    query = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    devices = _lines("nvidia-smi", *query)
    return {
        "CUDA of torch": str(torch.version.cuda),
        **{f"device {number}": line for number, line in enumerate(devices)},
    }


def _environment(environ: Mapping[str, str]) -> Section:
    plain = {name: environ[name] for name in _PLAIN_VARIABLES if name in environ}
    return plain | {name: "is set" for name in _PRIVATE_VARIABLES if name in environ}


def _processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Linux names it in a file; elsewhere the architecture has to do."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _lines(command: str, *arguments: str) -> list[str]:
    """What a program says, or one line on why it says nothing."""
    program = shutil.which(command)
    if program is None:
        return [f"no {command}"]
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{command} does not answer ({type(error).__name__})"]
    return done.stdout.splitlines() or [f"{command} ended with code {done.returncode}"]


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
