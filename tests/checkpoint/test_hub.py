"""Finding the model: local paths, the hub, and the default model from a package index.

Index and hub are small HTTP servers on loopback; pip and huggingface_hub are the real ones.
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from serve.checkpoint.hub import DEFAULT_MODEL, PackagedModel, find_model, find_packaged_model
from serve.errors import ConfigError

FILE_NAME = "tiny.gguf"
CONTENT = b"GGUF" + bytes(4096)
NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens


def make_wheel() -> bytes:
    buffer = io.BytesIO()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(buffer, "w") as wheel:
        wheel.writestr(f"tiny_model/{FILE_NAME}", CONTENT)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


class Index:
    """A package index folder, served on loopback, holding one wheel."""

    def __init__(self, root: Path) -> None:
        project = root / "simple" / "tiny-model"
        project.mkdir(parents=True)
        wheel = make_wheel()
        name = "tiny_model-1.0-py3-none-any.whl"
        (project / name).write_bytes(wheel)
        (project / "index.html").write_text(f'<a href="{name}">{name}</a>')
        self.downloads: list[str] = []
        self.model = PackagedModel(
            name="tiny",
            project="tiny-model",
            version="1.0",
            wheel_sha256=hashlib.sha256(wheel).hexdigest(),
            file_name=FILE_NAME,
            file_sha256=hashlib.sha256(CONTENT).hexdigest(),
            hub_id="org/tiny",
        )

    def seen(self, path: str) -> None:
        if path.endswith(".whl"):
            self.downloads.append(path)


class IndexHandler(SimpleHTTPRequestHandler):
    index: Index

    def do_GET(self) -> None:
        self.index.seen(self.path)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def serve_http(handler) -> tuple[ThreadingHTTPServer, str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    index = Index(tmp_path / "index")
    handler = type("Handler", (IndexHandler,), {"index": index})
    server, url = serve_http(partial(handler, directory=str(tmp_path / "index")))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_INDEX_URL", f"{url}/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    yield index
    server.shutdown()
    server.server_close()


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub client reads its environment when imported, so only its cache is ours to move."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_folder_or_gguf_file_is_itself(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert find_model(str(tmp_path)) == tmp_path
    assert find_model(str(file)) == file
    assert find_model(str(file.rename(tmp_path / "M.GGUF"))) == tmp_path / "M.GGUF"


def test_another_file_is_refused_with_advice(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"Pass the folder that holds config\.json"):
        find_model(str(file))


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./here", "missing.gguf", "a/b/c", "two words", "~/none"]
)
def test_what_cannot_be_a_hub_id_is_never_looked_up(model: str, no_hub: None) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        find_model(model)


@pytest.mark.usefixtures("no_hub")
def test_a_hub_id_out_of_reach_is_one_clear_sentence() -> None:
    with pytest.raises(ConfigError, match=r"org/model.*not in the local hub cache.*out of reach"):
        find_model("org/model")


def test_the_default_model_comes_from_the_package_index_once(index: Index, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = find_packaged_model(index.model, cache)
    assert path == cache / FILE_NAME
    assert path.read_bytes() == CONTENT
    assert find_packaged_model(index.model, cache) == path
    assert len(index.downloads) == 1
    assert sorted(p.name for p in cache.iterdir()) == [FILE_NAME, f"{FILE_NAME}.lock"]


def test_starts_at_the_same_moment_download_once(index: Index, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        paths = pool.starmap(find_packaged_model, [(index.model, cache)] * 3)
    assert paths == [cache / FILE_NAME] * 3
    assert len(index.downloads) == 1


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_a_file_that_is_not_the_known_one_is_never_kept(
    index: Index, tmp_path: Path, field: str
) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ConfigError, match="SHA-256"):
        find_packaged_model(replace(index.model, **{field: "0" * 64}), cache)
    assert [p.name for p in cache.iterdir()] == [f"{FILE_NAME}.lock"]


@pytest.mark.usefixtures("no_hub")
def test_without_index_and_hub_the_error_tells_how_to_pass_a_local_model(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{NOWHERE}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ConfigError, match=r"org/tiny.*serve-llm serve /path/to"):
        find_packaged_model(index.model, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(index: Index, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="SERVE_LLM_CACHE"):
        find_packaged_model(index.model, blocked / "cache")


def test_the_default_model_is_pinned_by_hash() -> None:
    assert DEFAULT_MODEL.file_name.endswith(".gguf")
    for digest in (DEFAULT_MODEL.wheel_sha256, DEFAULT_MODEL.file_sha256):
        assert len(bytes.fromhex(digest)) == 32


# ------------------------------------------------------------------------------- a hub on loopback

COMMIT = "a" * 40
HUB_FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same weights again",
    "onnx/model.safetensors": b"and again",
    "pytorch_model.bin": b"and again",
    "README.md": b"read me",
}


class HubHandler(BaseHTTPRequestHandler):
    """The few routes of the hub's API that a snapshot download uses."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if "/gated" in self.path:
            self._error(403, "GatedRepo")
        elif "/api/models/org/tiny/revision/" in self.path and "nope" in self.path:
            self._error(404, "RevisionNotFound")
        elif self.path.startswith("/api/models/org/tiny/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": "0" * 40}
                for name, body in HUB_FILES.items()
            ]
            self._answer(json.dumps(tree).encode())
        elif self.path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in HUB_FILES]
            self._answer(
                json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode()
            )
        elif self.path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            self._answer(HUB_FILES[self.path.split(f"{COMMIT}/")[1]])
        else:
            self._error(404, "RepoNotFound")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("etag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("content-length", "0")
        self.send_header("x-error-code", code)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server, url = serve_http(HubHandler)
    yield url
    server.shutdown()
    server.server_close()


def find_in_fresh_process(
    model: str, hub: str, home: Path, revision: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from serve.checkpoint.hub import find_model\n"
        "from serve.errors import ConfigError\n"
        "try: print(find_model(sys.argv[1], sys.argv[2] or None))\n"
        "except ConfigError as error: print(error); sys.exit(1)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, model, revision or ""],
        env={"HF_ENDPOINT": hub, "HF_HOME": str(home), "PATH": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_hub_model_brings_only_the_files_that_serving_needs(hub: str, tmp_path: Path) -> None:
    done = find_in_fresh_process("org/tiny", hub, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = Path(done.stdout.strip())
    assert tmp_path in folder.parents
    assert sorted(p.name for p in folder.rglob("*")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    again = find_in_fresh_process("org/tiny", NOWHERE, tmp_path, HF_HUB_OFFLINE="1")
    assert again.stdout == done.stdout  # offline, from the cache


@pytest.mark.parametrize(
    ("model", "revision", "says"),
    [
        ("org/none", None, "no model on the Hugging Face hub"),
        ("org/gated", None, "set HF_TOKEN"),
        ("org/tiny", "nope", "has no revision nope"),
    ],
)
def test_a_refusal_of_the_hub_is_one_line_with_what_to_do(
    hub: str, tmp_path: Path, model: str, revision: str | None, says: str
) -> None:
    done = find_in_fresh_process(model, hub, tmp_path, revision)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("\n") == 1
    assert says in done.stdout
    assert "Traceback" not in done.stderr
