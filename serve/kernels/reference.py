"""What every kernel computes, in plain torch: the tests' oracle and a backend for any device.

Written for clarity first. Sums in fp32 are arranged so that one token's result does not depend on
which requests share its step nor on how its prompt was cut into chunks: attention runs request by
request on tiles of fixed size, and linear layers use a matrix product whose rows do not depend on
their number. On the CPUs tried that holds bit for bit, which lets tests compare whole runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels.base import (
    AttentionBackend,
    AttentionMetadata,
    BackendLimits,
    HeadNorms,
    Kernels,
    PackedLinear,
    PackLinearFn,
    PrepareHeadsFn,
    RmsNormFn,
    RotaryFn,
)
from serve.kernels.stored import StoredMatrix, dequantize, stack

E4M3_LARGEST = 448.0

_ROW_TILE = 16  # BLAS picks other code, with other rounding, for fewer rows or columns than this
_KEY_TILE = 128  # and cuts sums of more terms than this at places of its own choice


class ReferenceAttention:
    """Gathers each request's blocks, then softmax(scale * q k^T) v.

    Cache layout: [2, num_blocks, block_size, num_kv_heads, head_dim].
    """

    name = "reference"
    limits = BackendLimits(cache_dtypes=("float8_e4m3fn",))

    def kv_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_dim)

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        kv: Tensor,
        slot_mapping: Tensor,
        kv_scales: Tensor | None = None,
    ) -> None:
        slots = _movable(kv).view(2, -1, *kv.shape[3:])
        for half, heads in enumerate((key, value)):
            if kv_scales is not None:
                heads = to_e4m3(heads, kv_scales[half, :, None])
            slots[half].index_copy_(0, slot_mapping, _movable(heads.to(kv.dtype)))

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        output = torch.zeros_like(query)
        attend_one = partial(_attend_one, scale=scale, window=window, softcap=softcap, sinks=sinks)
        start = 0
        for row, query_len in enumerate(meta.query_lens_host):
            tokens = slice(start, start + query_len)
            seq_len = meta.seq_lens_host[row]
            key, value = self.gather(kv, meta.block_table[row], seq_len, kv_scales)
            output[tokens] = attend_one(query[tokens].float(), key, value)
            start += query_len
        return output

    def gather(
        self, kv: Tensor, block_ids: Tensor, seq_len: int, kv_scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One request's keys and values, fp32 [num_kv_heads, seq_len, head_dim] each."""
        num_blocks = -(-seq_len // kv.shape[2])
        blocks = _movable(kv)[:, block_ids[:num_blocks].long()].view(kv.dtype)
        tokens = blocks.flatten(1, 2)[:, :seq_len].float()
        key, value = tokens.transpose(1, 2)
        if kv_scales is not None:
            key, value = key * kv_scales[0, :, None, None], value * kv_scales[1, :, None, None]
        return key, value


def to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale in eight bits: the nearest e4m3, at most 448 away from zero."""
    return (x.float() / scale).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)


def _movable(cache: Tensor) -> Tensor:
    """The same memory in a dtype that torch indexes; it knows e4m3 only to convert it."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def _attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One request: fp32 query [L, num_heads, head_dim] at the last L of the S positions of key and
    value [num_kv_heads, S, head_dim]. Returns [L, num_heads, head_dim]."""
    query_len, num_heads, head_dim = query.shape
    num_kv_heads, seq_len, _ = key.shape
    group = num_heads // num_kv_heads
    key, value = _pad_rows(key), _pad_rows(value)

    # The query heads that share a KV head are rows of one product: [num_kv_heads, L * group, …].
    rows = query.view(query_len, num_kv_heads, group, head_dim).transpose(0, 1)
    scores = _pad_rows(rows.reshape(num_kv_heads, -1, head_dim)) @ key.transpose(1, 2)
    scores = scores[:, : query_len * group].view(num_kv_heads, query_len, group, -1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = _hidden(query_len, seq_len, key.shape[1], window, query.device)
    scores = scores.masked_fill(hidden[:, None, :], float("-inf"))
    weights = _softmax(scores, sinks).view(num_kv_heads, query_len * group, -1)

    weights = _pad_rows(weights)
    output = torch.zeros(num_kv_heads, weights.shape[1], head_dim, device=query.device)
    for start in range(0, key.shape[1], _KEY_TILE):
        tile = slice(start, start + _KEY_TILE)
        output += weights[:, :, tile] @ value[:, tile]
    output = output[:, : query_len * group].view(num_kv_heads, query_len, group, head_dim)
    return output.transpose(0, 1).reshape(query_len, num_heads, head_dim)


def _pad_rows(matrices: Tensor) -> Tensor:
    """[…, n, m] with zero rows added up to a multiple of the tile."""
    return F.pad(matrices, (0, 0, 0, -matrices.shape[-2] % _ROW_TILE))


def _hidden(
    query_len: int, seq_len: int, padded_len: int, window: int | None, device: torch.device
) -> Tensor:
    """[query_len, padded_len]: which positions a token must not see."""
    query_position = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    key_position = torch.arange(padded_len, device=device)[None, :]
    hidden = key_position > query_position
    if window is not None:
        hidden |= key_position <= query_position - window
    return hidden


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dim of [num_kv_heads, L, group, S]; a sink only enlarges the denominator."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sink = sinks.float().view(scores.shape[0], 1, scores.shape[2], 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary(query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim]; cos, sin [T, 1, rotary_dim / 2] fp32."""
    half = cos.shape[-1]
    first, second, rest = x.float().tensor_split((half, 2 * half), dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(rotated, dim=-1).to(x.dtype)


def prepare_heads_by_parts(
    rms_norm: RmsNormFn, rotary: RotaryFn, attention: AttentionBackend
) -> PrepareHeadsFn:
    """The steps from projection to attention, one operation after another."""

    def prepare_heads(
        heads: Tensor,
        num_heads: int,
        norms: HeadNorms | None,
        rope: tuple[Tensor, Tensor],
        kv: Tensor,
        slot_mapping: Tensor,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        num_kv_heads = (heads.shape[1] - num_heads) // 2
        query, key, value = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if norms is not None:
            query = rms_norm(query, norms.query, norms.eps)
            key = rms_norm(key, norms.key, norms.eps)
        query, key = rotary(query, key, *rope)
        attention.write_kv(key, value, kv, slot_mapping, kv_scales)
        return query

    return prepare_heads


def gated_act(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    raise ValueError(f"unknown activation {activation!r}; known: silu, gelu_tanh")


def pack_linear(parts: Sequence[StoredMatrix], bias: Tensor | None) -> PackedLinear:
    """A linear layer as torch multiplies."""
    return partial(F.linear, weight=dequantize(stack(parts)), bias=bias)


def pack_invariant_linear(parts: Sequence[StoredMatrix], bias: Tensor | None) -> PackedLinear:
    """A linear layer on a CPU, in fp32, with rows whose results do not depend on their number.

    oneDNN's own weight layout is the faster way where its rows are invariant, and padding to whole
    row tiles the other. 16-bit products are emulated on most CPUs, so there 16-bit weights are
    widened.
    """
    weight = dequantize(stack(parts))
    weight, bias = weight.float(), None if bias is None else bias.float()
    multiply = _onednn_linear if _onednn_rows_are_invariant() else _linear_of_row_tiles
    if multiply is _onednn_linear:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: multiply(x.float(), weight, bias).to(x.dtype)


def _onednn_linear(x: Tensor, packed_weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed_weight, bias, "none", [], "")
    return result


def _linear_of_row_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, its rows invariant because there are never fewer than a row tile."""
    num_rows = x.shape[0]
    return F.linear(F.pad(x, (0, 0, 0, max(0, _ROW_TILE - num_rows))), weight, bias)[:num_rows]


@cache
def _onednn_rows_are_invariant() -> bool:
    """Tried out, because releases differ: oneDNN 3.12 (torch 2.13) packs for its batched matmul,
    whose rows are; 3.10 (torch 2.11) leaves the weights as they are and sums 1 to 3 rows left over
    from groups of six in another order."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight, x = torch.rand(2, 64, 64, generator=torch.Generator().manual_seed(0))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    whole = _onednn_linear(x, packed, None)
    return all(torch.equal(_onednn_linear(x[:n], packed, None), whole[:n]) for n in range(1, 64))


def copy_blocks(src: Tensor, dst: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    src, dst = _movable(src), _movable(dst)
    # Indexing makes a copy of the source blocks, so src and dst may be one tensor.
    blocks = src[:, src_ids.to(src.device)].to(dst.device)
    dst.index_copy_(1, dst_ids.to(dst.device), blocks)


def kernels(pack: PackLinearFn = pack_invariant_linear) -> Kernels:
    """The reference operations; on a GPU with `pack_linear`."""
    attention = ReferenceAttention()
    return Kernels(
        name="reference",
        attention=attention,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rotary=rotary,
        gated_act=gated_act,
        pack_linear=pack,
        copy_blocks=copy_blocks,
        prepare_heads=prepare_heads_by_parts(rms_norm, rotary, attention),
    )
