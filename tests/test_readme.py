"""The README is what a newcomer reads first: short, with a reading list that fits an hour."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

_ENTRY = re.compile(r"`([\w/]+\.py)`(?:\s+\((`[^)]*)\))?")


def reading_list() -> Iterator[tuple[Path, list[str]]]:
    """Files of the reading list in order, and of each the names that are to be read; none means
    all of it. A name without a folder lies in that of the file before it."""
    listed = README.partition("An hour's reading")[2].partition("\n## ")[0]
    folder = ROOT / "serve"
    for name, parts in _ENTRY.findall(listed):
        places = (folder / name, ROOT / "serve" / name, ROOT / name)
        (path,) = [place for place in dict.fromkeys(places) if place.is_file()]
        folder = path.parent
        yield path, [part.rpartition(".")[2] for part in re.findall(r"`([\w.]+)`", parts)]


def length_of(path: Path, names: list[str]) -> int:
    """Lines of a file, or of the classes and functions with these names."""
    text = path.read_text(encoding="utf-8")
    if not names:
        return text.count("\n")
    defined = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.end_lineno
    }
    return sum(defined[name] for name in names)


def test_the_readme_is_short() -> None:
    assert README.count("\n") < 250


def test_the_reading_list_exists_and_fits_an_hour() -> None:
    listed = list(reading_list())
    assert sum(len(names) or 1 for _, names in listed) <= 20
    assert 1_500 < sum(length_of(path, names) for path, names in listed) <= 2_800


def test_the_reading_list_closes_the_loop_of_a_step() -> None:
    read = {path.relative_to(ROOT / "serve").as_posix() for path, _ in reading_list()}
    assert read >= {
        "engine/core.py",
        "scheduler/scheduler.py",
        "scheduler/step_planner.py",
        "scheduler/plan_builder.py",
        "scheduler/step_results.py",
        "kv_cache/manager.py",
        "worker/model_runner.py",
        "worker/sampling/sampler.py",
        "models/layers.py",
    }
