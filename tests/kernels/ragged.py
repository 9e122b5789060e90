"""Ragged attention steps with known answers, for any backend.

A case holds every request's keys and values in the open; `Step` lays them out in a backend's cache,
with NaN wherever a kernel must not look.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from serve.kernels.base import AttentionBackend, AttentionMetadata


@dataclass(frozen=True)
class Shape:
    """What a model and a cache fix."""

    num_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    e4m3: bool = False  # the cache, with scales of its own for every head


@dataclass(frozen=True)
class Options:
    """The optional parts of attention."""

    scale: float = 0.125
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def keywords(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("scale", "window", "softcap", "sinks")}


@dataclass(frozen=True)
class Step:
    """One step's tensors: R requests with (query_len, seq_len) each, single tokens first."""

    query: Tensor  # [T, num_heads, head_dim]
    keys: list[Tensor]  # per request [seq_len, num_kv_heads, head_dim]
    values: list[Tensor]
    kv: Tensor
    meta: AttentionMetadata
    kv_scales: Tensor | None = None

    def attend(self, backend: AttentionBackend, options: Options) -> Tensor:
        return backend.attend(
            self.query, self.kv, self.meta, **options.keywords(), kv_scales=self.kv_scales
        )

    def exact(self, options: Options) -> Tensor:
        """The answer in fp64, from the open keys and values, one request at a time."""
        parts = self.query.double().split(self.meta.query_lens_host)
        return torch.cat(
            [
                exact_attention(q, k.double(), v.double(), options)
                for q, k, v in zip(parts, self.keys, self.values, strict=True)
            ]
        )

    def part(self, start: int, end: int) -> Step:
        """The chunk of tokens [start, end) of a lone, whole prompt."""
        assert self.meta.query_lens_host == self.meta.seq_lens_host, "not a whole prompt"
        meta = metadata([end - start], [end], self.meta.block_table, self.meta.slot_mapping)
        keys, values = ([x[0][:end]] for x in (self.keys, self.values))
        return Step(self.query[start:end], keys, values, self.kv, meta, self.kv_scales)


def together(last: Step, first: Step) -> Step:
    """Both steps' requests as one step, the rows of `first` first."""
    num_blocks, width = first.kv.shape[1], max(s.meta.block_table.shape[1] for s in (first, last))
    tables = [
        torch.nn.functional.pad(table, (0, width - table.shape[1]))
        for table in (first.meta.block_table, last.meta.block_table + num_blocks)
    ]
    meta = metadata(
        first.meta.query_lens_host + last.meta.query_lens_host,
        first.meta.seq_lens_host + last.meta.seq_lens_host,
        torch.cat(tables),
        torch.cat([first.meta.slot_mapping, last.meta.slot_mapping]),
    )
    return Step(
        torch.cat([first.query, last.query]),
        first.keys + last.keys,
        first.values + last.values,
        torch.cat([first.kv, last.kv], dim=1),
        meta,
    )


def make_step(
    backend: AttentionBackend,
    shape: Shape,
    lens: list[tuple[int, int]],
    *,
    seed: int = 0,
    padding: int = 0,
) -> Step:
    """Random requests of (query_len, seq_len) in shuffled blocks. Slots that hold no token of
    theirs are NaN, the null block's too. `padding` widens the block table with null blocks."""
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64).to(
            shape.device, shape.dtype
        )

    scales = None
    if shape.e4m3:
        scales = torch.rand(2, shape.num_kv_heads, generator=random) * 0.02 + 0.005
        scales = scales.to(shape.device)
    block_counts = [-(-seq_len // shape.block_size) for _, seq_len in lens]
    num_blocks = sum(block_counts)
    kv = torch.full(
        backend.kv_shape(num_blocks + 3, shape.block_size, shape.num_kv_heads, shape.head_dim),
        float("nan"),
        dtype=shape.dtype,
        device=shape.device,
    ).to(torch.float8_e4m3fn if shape.e4m3 else shape.dtype)
    block_ids = torch.randperm(num_blocks + 2, generator=random)[:num_blocks] + 1
    table = torch.zeros(len(lens), max(block_counts) + padding, dtype=torch.int32)
    keys, values, new_slots = [], [], []
    for row, ((query_len, seq_len), own) in enumerate(
        zip(lens, block_ids.split(block_counts), strict=True)
    ):
        table[row, : len(own)] = own
        keys.append(normal(seq_len, shape.num_kv_heads, shape.head_dim))
        values.append(normal(seq_len, shape.num_kv_heads, shape.head_dim))
        positions = torch.arange(seq_len)
        slots = own[positions // shape.block_size] * shape.block_size
        slots += positions % shape.block_size
        slots = slots.to(shape.device)
        backend.write_kv(keys[-1], values[-1], kv, slots, scales)
        if scales is not None:
            keys[-1], values[-1] = e4m3(keys[-1], scales[0]), e4m3(values[-1], scales[1])
        new_slots.append(slots[seq_len - query_len :])
    query_lens = [query_len for query_len, _ in lens]
    meta = metadata(
        query_lens, [seq_len for _, seq_len in lens], table.to(shape.device), torch.cat(new_slots)
    )
    query = normal(sum(query_lens), shape.num_heads, shape.head_dim)
    return Step(query, keys, values, kv, meta, scales)


def e4m3(heads: Tensor, scale: Tensor) -> Tensor:
    """fp64 [T, H, D] after a stay in an e4m3 cache whose heads have these scales [H]: found by
    looking through all 126 numbers of each sign, not by a conversion."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = numbers.to(heads.device)
    x = heads.double() / scale.double()[:, None]
    above = torch.searchsorted(numbers, x.abs().contiguous()).clamp(1, 126)
    low, high = numbers[above - 1], numbers[above]
    middle = (low + high) / 2
    even_below = (above - 1) % 2 == 0
    down = (x.abs() < middle) | ((x.abs() == middle) & even_below)
    return torch.where(down, low, high) * x.sign() * scale.double()[:, None]


def metadata(
    query_lens: list[int], seq_lens: list[int], block_table: Tensor, slot_mapping: Tensor
) -> AttentionMetadata:
    device = block_table.device
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=block_table,
        slot_mapping=slot_mapping,
        num_decode_rows=sum(length == 1 for length in query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )


def exact_attention(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    """fp64 softmax(scale * q k^T) v of one request: query [L, H, D] ends at key's last position."""
    query_len, num_heads, _ = query.shape
    group = num_heads // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("lhd,shd->hls", query, key) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    positions = torch.arange(key.shape[0], device=key.device)
    distance = positions[key.shape[0] - query_len :, None] - positions
    visible = distance >= 0
    if options.window is not None:
        visible &= distance < options.window
    scores = scores.masked_fill(~visible, float("-inf"))
    if options.sinks is not None:
        sink = options.sinks.double()[:, None, None].expand(num_heads, query_len, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("hls,shd->lhd", weights, value)


def relative_error(out: Tensor, exact: Tensor) -> float:
    """‖out - exact‖ / ‖exact‖."""
    return float((out.double() - exact).norm() / exact.norm())
