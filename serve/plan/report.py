"""A plan as tables for people and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from serve.plan.capacity import Capacity
from serve.plan.suggestions import Suggestion


def as_json(capacity: Capacity, suggestions: list[Suggestion]) -> dict[str, Any]:
    """Plain values; sizes in bytes, lengths in tokens."""
    values = asdict(capacity)
    values["footprint"]["cache_layers"] = [asdict(x) for x in capacity.footprint.cache_layers]
    return {
        **values,
        "kv_bytes_per_token": capacity.kv_bytes_per_token,
        "suggestions": [asdict(suggestion) for suggestion in suggestions],
    }


def print_plan(capacity: Capacity, suggestions: list[Suggestion], console: Console) -> None:
    """What takes memory, what that is enough for, and which flags suit it."""
    footprint = capacity.footprint
    console.print(
        f"[bold]{capacity.model}[/]: {capacity.model_type}, {_count(footprint.num_parameters)} "
        f"parameters, context {footprint.max_position:,} tokens"
    )
    for line in _layer_lines(capacity):
        console.print(line)
    console.print(_memory_table(capacity))
    if capacity.float32_kept:
        kept = " and ".join(capacity.float32_kept)
        console.print(
            f"weights in float32: matrices are kept in {kept}, like in the file, and widened as "
            "they are read, which loses nothing; a 16-bit dtype rounds each value to 16 bits.\n"
        )
    if capacity.cache is None:
        console.print(
            f"[bold]It does not fit[/]: at least {_size(capacity.needed_bytes)} are needed, and "
            f"{_size(capacity.usable_bytes)} may be used."
        )
    else:
        console.print(_fit_table(capacity))
    for suggestion in suggestions:
        console.print(f"suggested: [bold]{suggestion.flag}[/]\n  {suggestion.reason}")


def _layer_lines(capacity: Capacity) -> list[str]:
    """KV of each kind of layer."""
    kinds = Counter(zip(capacity.footprint.cache_layers, capacity.footprint.windows, strict=True))
    itemsize = capacity.kv_bytes_per_token // sum(
        2 * layer.num_kv_heads * layer.head_dim for layer in capacity.footprint.cache_layers
    )
    lines = []
    for (layer, window), count in kinds.items():
        each = 2 * layer.num_kv_heads * layer.head_dim * itemsize
        line = (
            f"  {count} layers with {layer.num_kv_heads} KV heads of {layer.head_dim}: "
            f"{_size(each)} per token and layer"
        )
        if window is not None:
            line += f"; they see {window:,} tokens back, but the cache keeps all"
        lines.append(line)
    return lines


def _memory_table(capacity: Capacity) -> Table:
    table = _table("memory", "")
    for dtype, size in capacity.weight_bytes_by_dtype.items():
        chosen = dtype == capacity.dtype
        table.add_row(f"weights in {dtype}", _size(size), style="bold" if chosen else "dim")
    if capacity.dtype not in capacity.weight_bytes_by_dtype:
        size = capacity.footprint.weight_bytes
        table.add_row(f"weights in {capacity.dtype}", _size(size), style="bold")
    table.add_row("largest step, estimated", _size(capacity.step_bytes))
    if capacity.context_bytes:
        table.add_row("CUDA context, estimated", _size(capacity.context_bytes))
    table.add_row("KV per token", _size(capacity.kv_bytes_per_token))
    table.add_row(f"KV block of {capacity.block_size} tokens", _size(capacity.block_bytes))
    if capacity.cache is not None:
        num_blocks = capacity.cache.num_blocks
        table.add_row(f"KV pool, {num_blocks:,} blocks", _size(num_blocks * capacity.block_bytes))
        if num_host_blocks := capacity.cache.num_host_blocks:
            size = num_host_blocks * capacity.block_bytes
            table.add_row(f"swap space, {num_host_blocks:,} blocks", _size(size))
    where = f"{capacity.device} memory"
    table.add_row(f"{where}, of which may be used", _size(capacity.usable_bytes))
    table.add_row(where, _size(capacity.memory_bytes))
    return table


def _fit_table(capacity: Capacity) -> Table:
    assert capacity.cache is not None
    table = _table("prompt + answer", "blocks each", "requests at once")
    for fit in capacity.fits:
        at_once = f"{fit.num_requests:,}"
        if fit.length > capacity.cache.max_model_len:
            at_once = f"longer than {capacity.cache.max_model_len:,}"
        elif fit.num_requests > capacity.max_num_seqs:
            at_once += f" (--max-num-seqs {capacity.max_num_seqs:,})"
        table.add_row(f"{fit.length:,}", f"{fit.num_blocks:,}", at_once)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} B"


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"
