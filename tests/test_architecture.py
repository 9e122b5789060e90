"""The house rules that a machine can check: who may import what, and where state may live.

Every rule reads the source of `serve/` as it is; each comes with a check that it can fail.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "serve").rglob("*.py"))

BASE = {
    *("__init__", "config", "errors", "messages", "progress", "sampling_params"),
    "speculative_config",
}
# Which of our parts each part may import, besides itself and the base. `llm` (offline use) and
# `server` (the process) join the halves; `bench` measures either from outside; `cli` starts them.
MAY_IMPORT: dict[str, set[str]] = {
    **{name: set() for name in BASE},
    "__init__": {"llm"},
    "logs": set(),
    "flags": set(),
    "checkpoint": set(),
    "kernels": set(),
    "models": {"kernels", "checkpoint"},
    "kv_cache": set(),
    "scheduler": {"kv_cache"},
    "worker": {"models", "kernels", "kv_cache.storage", "kv_cache.block_copy", "scheduler.output"},
    "text": {"checkpoint"},
    "answers": {"text"},
    "link": set(),
    "engine": {"scheduler", "kv_cache", "worker", "text", "answers", "link", "checkpoint", "logs"},
    "settings_file": set(),
    "http_protocol": set(),
    "api": {"engine", "text", "answers", "settings_file"},
    "llm": {"engine", "text", "checkpoint"},
    "serving": {"http_protocol", "api", "engine", "text", "checkpoint", "logs"},
    "server": {"serving", "engine", "checkpoint", "logs"},
    "bench": {"llm", "flags"},
    "simulate": {
        "flags",
        "engine",
        "worker.executor",
        "worker.startup.cache_size",
        "scheduler.output",
    },
    "plan": {"models", "worker", "checkpoint", "kernels.select"},
    "collect_env": {"worker.device.host_memory"},
    "cli": {"commands"},
    "commands": {"server", "bench", "simulate", "plan", "collect_env", "flags", "settings_file"},
}

# Which other rooms of its part each room may import, besides what lies in the part's own hall.
ROOM_MAY_IMPORT: dict[str, set[str]] = {
    "api.protocol": set(),
    "api.figures": set(),
    "api.clients": set(),
    "api.answering": {"api.protocol", "api.clients"},
    "api.openai": {"api.answering", "api.clients", "api.protocol"},
    "api.anthropic": {"api.openai", "api.answering", "api.protocol"},
    "api.admin": {"api.answering", "api.protocol"},
    "engine.grammar": set(),
    "engine.inspect": set(),
    "engine.process": set(),
    "scheduler.policy": set(),
    "scheduler.drafting": set(),
    "worker.device": set(),
    "worker.sampling": {"worker.device"},
    "worker.startup": {"worker.device"},
    "models.weights": set(),
    "kernels.cpu": set(),
    "kernels.triton": set(),
}

INSPECT = "engine.inspect"

# Third-party (or standard) modules that may be imported only in these parts or modules.
ONLY_IN: dict[str, set[str]] = {
    "triton": {"kernels"},
    "fastapi": {"api"},
    "starlette": {"api"},
    "prometheus_client": {"api"},
    "pydantic": {"api"},
    "uvicorn": {"serving", "http_protocol"},
    "httptools": {"http_protocol", "bench"},
    "uvloop": {"serving", "bench"},
    "cyclopts": {"commands", "flags", "bench", "simulate.flags"},
    "yaml": {"settings_file"},
    "llguidance": {
        "answers",
        "engine.grammar.grammars",
        "engine.grammar.templates",
        "engine.grammar.vocabulary",
    },
    "zmq": {"link"},
    "msgspec": {"link"},
    "huggingface_hub": {"checkpoint.hub"},
}


def name_of(path: Path) -> str:
    """serve/kv_cache/storage.py → kv_cache.storage"""
    return ".".join(path.relative_to(ROOT / "serve").with_suffix("").parts)


MODULES = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def imports(tree: ast.Module) -> Iterator[str]:
    """Every imported module, also those imported late or for types; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attribute_chains(tree: ast.Module) -> Iterator[str]:
    """Dotted names as written: `torch.cuda.is_available` gives all its prefixes too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = [node.attr]
            inner = node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield ".".join([inner.id, *reversed(parts)])


def part_of(module: str) -> str:
    return module.split(".", 1)[0]


def forbidden_imports(module: str, tree: ast.Module) -> list[str]:
    part = part_of(module)
    allowed = MAY_IMPORT[part] | BASE | {part}
    ours = [name.removeprefix("serve.") for name in imports(tree) if name.startswith("serve.")]
    return [
        name
        for name in ours
        if not any(name == ok or name.startswith(f"{ok}.") for ok in allowed)
        and name != "__version__"
    ]


def test_imports_point_one_way() -> None:
    found = {name: forbidden_imports(name, tree) for name, tree in MODULES.items()}
    assert {name: bad for name, bad in found.items() if bad} == {}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("api.chat", "from serve.scheduler.request import Request"),
        ("scheduler.scheduler", "from serve.worker.worker import Worker"),
        ("kv_cache.manager", "import serve.scheduler.output"),
        ("worker.worker", "from serve.kv_cache.manager import KVCacheManager"),
        ("models.decoder", "def late():\n    from serve.engine.core import EngineCore"),
        ("config", "from serve.checkpoint.hub import find_model"),
    ],
)
def test_an_import_against_the_direction_is_seen(module: str, line: str) -> None:
    assert len(forbidden_imports(module, ast.parse(line))) == 1


def uses(module: str, tree: ast.Module) -> set[str]:
    """Modules of ours that this one imports, or names from."""
    names = {name.removeprefix("serve.") for name in imports(tree)}
    found = names | {name.rpartition(".")[0] for name in names}
    return (found & MODULES.keys()) - {module}


def test_modules_import_each_other_in_no_circle_not_even_for_types() -> None:
    graph = {module: uses(module, tree) for module, tree in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
    with pytest.raises(CycleError):
        TopologicalSorter({**graph, "errors": {"server"}}).prepare()


def test_every_part_and_every_room_has_its_row_in_the_tables() -> None:
    assert {part_of(name) for name in MODULES} <= set(MAY_IMPORT)
    assert {room_of(name) for name in MODULES} - {None} == set(ROOM_MAY_IMPORT)


def room_of(module: str) -> str | None:
    """worker.device.uploads → worker.device; None for what lies in its part's hall."""
    names = module.removesuffix(".__init__").split(".")
    depth = 3 if not module.endswith(".__init__") else 2
    return ".".join(names[:2]) if len(names) >= depth else None


def forbidden_rooms(module: str, tree: ast.Module) -> set[str]:
    room = room_of(module)
    if room is None:
        return set()
    others = {room_of(used) for used in uses(module, tree) if part_of(used) == part_of(module)}
    return {other for other in others if other} - ROOM_MAY_IMPORT[room] - {room}


def test_rooms_know_only_those_below_them() -> None:
    for module, tree in MODULES.items():
        assert forbidden_rooms(module, tree) == set(), module
    line = ast.parse("from serve.api.openai.chat import prepare")
    assert forbidden_rooms("api.answering.choices", line) == {"api.openai"}


def test_inspection_looks_at_the_schedulers_view_and_only_controls_change_it() -> None:
    room = {name: uses(name, tree) for name, tree in MODULES.items() if room_of(name) == INSPECT}
    assert [name for name, used in room.items() if used & {"scheduler.scheduler"}] == [
        f"{INSPECT}.controls"
    ]
    assert not any(used & {"scheduler.roster", "scheduler.queues"} for used in room.values())
    assert sum("scheduler.view" in used for used in room.values()) >= 3


def test_libraries_stay_in_their_place() -> None:
    for module, tree in MODULES.items():
        for library in {name.split(".", 1)[0] for name in imports(tree)} & set(ONLY_IN):
            assert {module, part_of(module)} & ONLY_IN[library], f"{module} imports {library}"


# Libraries that come with a declared one, of which they are the half that does the work.
COMES_WITH = {"starlette": "fastapi", "tokenizers": "transformers"}


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """Importable name → the installed distributions that bring it. Takes a second."""
    return packages_distributions()


def brought_by(library: str) -> list[str]:
    """The distributions that bring a library; one that is not installed is taken for its own."""
    return distributions().get(library, [library])


def declared_libraries(*extras: str) -> set[str]:
    """The distributions that pyproject.toml asks for, by their normalized names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(line).name) for line in wanted}


def undeclared_libraries(module: str, tree: ast.Module) -> set[str]:
    """Libraries a module imports that installing us without extras need not bring."""
    declared = declared_libraries(*(["bench"] if part_of(module) == "bench" else []))
    libraries = {name.split(".", 1)[0] for name in imports(tree)}
    return {
        library
        for library in libraries - set(sys.stdlib_module_names) - {"serve"}
        if COMES_WITH.get(library, "") not in declared
        and not declared & {canonicalize_name(name) for name in brought_by(library)}
    }


def test_every_library_is_a_declared_dependency() -> None:
    found = {name: undeclared_libraries(name, tree) for name, tree in MODULES.items()}
    assert {name: libraries for name, libraries in found.items() if libraries} == {}


def test_an_undeclared_library_is_seen() -> None:
    late = "def late():\n    import httpx, yaml\n    from matplotlib import pyplot"
    assert undeclared_libraries("checkpoint.hub", ast.parse(late)) == {"httpx", "matplotlib"}
    assert undeclared_libraries("bench.plot", ast.parse(late)) == {"httpx"}


CHANGERS = {"append", "extend", "insert", "remove", "pop", "clear", "update", "add", "discard"}


def changes_from_outside(tree: ast.Module, fields: set[str]) -> list[str]:
    """Where a field of another object is assigned, or a collection in one is changed."""
    owned = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    found = []
    for node in owned:
        if isinstance(node.ctx, ast.Load) and node.attr in CHANGERS:
            node = node.value if isinstance(node.value, ast.Attribute) else node
        elif isinstance(node.ctx, ast.Load):
            continue
        if node.attr in fields and ast.unparse(node.value) != "self":
            found.append(ast.unparse(node))
    return found


def annotated_fields(module: str, name: str) -> set[str]:
    """A dataclass's fields, or a class's slots."""
    (found,) = (n for n in MODULES[module].body if isinstance(n, ast.ClassDef) and n.name == name)
    targets = (node.target for node in found.body if isinstance(node, ast.AnnAssign))
    slots = (n.value for n in found.body if isinstance(n, ast.Assign))
    return {target.id for target in targets if isinstance(target, ast.Name)} | {
        str(name) for value in slots for name in ast.literal_eval(value)
    }


OWNERS = {"Request": "scheduler.request", "PlanBuilder": "scheduler.plan_builder"}


@pytest.mark.parametrize("name", OWNERS)
def test_a_request_and_a_plan_in_the_making_are_changed_only_in_their_own_file(name: str) -> None:
    fields = annotated_fields(OWNERS[name], name)
    assert len(fields) > 10
    for module, tree in MODULES.items():
        if part_of(module) in {"scheduler", "engine"} and module != OWNERS[name]:
            assert changes_from_outside(tree, fields) == [], module


@pytest.mark.parametrize(
    "line",
    [
        "request.num_tokens += 1",
        "self.running[0].num_tokens = 3",
        "a, request.num_tokens = 1, 2",
        "request.token_ids.append(5)",
        "del request.token_ids",
    ],
)
def test_a_change_from_outside_is_seen(line: str) -> None:
    fields = annotated_fields("scheduler.request", "Request")
    assert len(changes_from_outside(ast.parse(line), fields)) == 1
    assert changes_from_outside(ast.parse("self.num_tokens = request.num_tokens"), fields) == []


# Files of more than 300 lines, and why each is one idea all the same.
LONG_FILES = {
    "config": "every setting with its help text, in one place: cut in two, one would look in both",
    "scheduler.request": "a request and every change to it: it is changed in no other file",
}


def test_a_file_is_one_idea_and_a_function_a_short_one() -> None:
    lines = {name_of(path): path.read_text(encoding="utf-8").count("\n") for path in SOURCES}
    assert {name for name, count in lines.items() if count > 300} == set(LONG_FILES)
    lengths = sorted(
        node.end_lineno - node.body[0].lineno + 1
        for tree in MODULES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    )
    assert lengths[len(lengths) // 2] <= 8
    assert lengths[len(lengths) * 9 // 10] <= 25


def test_torch_stays_out_of_the_scheduler_and_the_logical_cache() -> None:
    pure = {n: t for n, t in MODULES.items() if part_of(n) in {"scheduler", "kv_cache"}}
    del pure["kv_cache.storage"]
    assert len(pure) > 5
    for module, tree in pure.items():
        assert "torch" not in {name.split(".")[0] for name in imports(tree)}, module


def test_only_the_cuda_device_knows_cuda() -> None:
    for module, tree in MODULES.items():
        if module != "worker.device.cuda_device" and part_of(module) != "kernels":
            known = [*imports(tree), *attribute_chains(tree)]
            assert not [name for name in known if name.startswith("torch.cuda")], module


# Where it may be asked which kind of device there is; all else reads `DeviceKind`, or is given the
# kernels that were selected. Copying a block needs to know which side of it lies in host memory,
# and a conversion which GPUs have an instruction for it.
KNOWS_PLATFORMS = {
    "worker.device.find_device",
    "worker.device.kinds",
    "kernels.select",
    "kernels.triton.block_copy",
    "kernels.triton.fp8",
}
PLATFORMS = {"cpu", "cuda", "gpu", "hip", "mps", "xpu"}


def platform_tests(tree: ast.Module) -> list[int]:
    """Lines that compare something with a platform's name, or ask a tensor or class for it."""
    return sorted({node.lineno for node in ast.walk(tree) if asks_for_platform(node)})


def asks_for_platform(node: ast.AST) -> bool:
    match node:
        case ast.Compare() | ast.MatchValue():
            named = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)]
            return bool(PLATFORMS & {str(value).partition(":")[0] for value in named})
        case ast.Attribute(attr="is_cuda" | "is_cpu"):
            return True
        case ast.Attribute(attr="type", value=owner):
            return ast.unparse(owner).endswith("device")
        case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
            return bool({"CpuDevice", "CudaDevice"} & set(ast.unparse(kinds).split(" | ")))
    return False


def test_nothing_but_devices_and_kernel_selection_asks_for_the_platform() -> None:
    found = {name: platform_tests(tree) for name, tree in MODULES.items()}
    assert {name for name, lines in found.items() if lines} <= KNOWS_PLATFORMS, found


@pytest.mark.parametrize(
    "line",
    [
        "depth = 2 if device == 'cuda' else 1",
        "if name in ('cpu', 'mps'): pass",
        "if weight.device.type != other: pass",
        "if weight.is_cuda: pass",
        "fast = isinstance(device, CudaDevice)",
        "match kind:\n    case 'cuda': pass",
    ],
)
def test_a_platform_test_is_seen(line: str) -> None:
    assert platform_tests(ast.parse(line))


def reads_environment(tree: ast.Module) -> bool:
    names = {*imports(tree), *attribute_chains(tree)}
    return any(name.startswith(("os.environ", "os.getenv", "os.putenv")) for name in names)


def test_only_the_config_takes_settings_from_the_environment() -> None:
    """`collect_env` looks at it to report it, and takes no setting from it."""
    readers = [name for name, tree in MODULES.items() if reads_environment(tree)]
    assert readers == ["collect_env", "config"]


def test_reading_the_environment_is_seen_however_it_is_written() -> None:
    for text in (
        "import os\nos.environ['X']",
        "from os import environ",
        "import os\nos.getenv('X')",
    ):
        assert reads_environment(ast.parse(text))


def test_nothing_is_global() -> None:
    for module, tree in MODULES.items():
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)], module


def mutable_at_module_level(tree: ast.Module) -> list[str]:
    """Names that look like state: lower-case module names bound to a list, dict or set."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            literal = isinstance(
                node.value,
                ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp,
            )
            call = isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
            made = call and node.value.func.id in {"dict", "list", "set", "deque", "defaultdict"}
            if literal or made:
                found += [name for name in names if not name.isupper() and name != "__all__"]
    return found


def test_no_module_keeps_mutable_state() -> None:
    for module, tree in MODULES.items():
        assert mutable_at_module_level(tree) == [], module


def test_mutable_module_state_is_seen() -> None:
    text = "import os\ncache = {}\nseen: set[int] = set()\nTABLE = {1: 2}\n__all__ = ['x']"
    assert mutable_at_module_level(ast.parse(text)) == ["cache", "seen"]


def swallowed_errors(tree: ast.Module) -> list[int]:
    """Lines of `except Exception:` (or broader) whose body does nothing."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"}
            if broad and all(isinstance(line, ast.Pass | ast.Continue) for line in node.body):
                found.append(node.lineno)
    return found


def test_no_error_is_swallowed() -> None:
    for module, tree in MODULES.items():
        assert swallowed_errors(tree) == [], module


def test_a_swallowed_error_is_seen() -> None:
    assert swallowed_errors(ast.parse("try:\n    f()\nexcept Exception:\n    pass")) == [3]


def test_the_core_imports_without_the_server_packages() -> None:
    """Offline use and the GPU checks run where only torch and transformers are installed."""
    absent = ["fastapi", "starlette", "uvicorn", "uvloop", "httptools", "prometheus_client"]
    absent += ["pydantic", "cyclopts", "zmq", "msgspec"]
    server_side = {"api", "bench", "cli", "commands", "flags", "http_protocol"}
    server_side |= {"server", "serving"}
    lazily_imported = {"link.ipc", "simulate.flags"}
    lazily_imported |= {"engine.process.child", "engine.process.process_client"}
    core = [
        f"serve.{name}".removesuffix(".__init__")
        for name in MODULES
        if part_of(name) not in server_side and name not in lazily_imported
    ]
    code = f"""
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
for module in {core!r}:
    importlib.import_module(module)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
