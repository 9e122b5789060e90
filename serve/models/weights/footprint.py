"""What a model takes up, read from its config alone: nothing is loaded, nothing is allocated.

torch's meta device gives every tensor its shape without memory, so the model that is measured is
the model that would be served.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from serve.errors import ConfigError
from serve.models.base import LayerCache
from serve.models.families import read_spec
from serve.models.rope import table_peak_bytes
from serve.models.spec import DecoderSpec
from serve.models.weights.checkpoint import Checkpoint
from serve.models.weights.gguf_file import read_gguf_model
from serve.models.weights.gguf_names import hf_name
from serve.models.weights.parameters import EMBEDDING, DecoderParameters, allocate

_META = torch.device("meta")
_SCALED_BLOCK = 2 / 32  # a 16-bit scale, or offset, for 32 values
_PACKED_BYTES = {
    "F16": 2.0,
    "BF16": 2.0,
    "Q8_0": 1.0 + _SCALED_BLOCK,
    "Q4_0": 0.5 + 2 * _SCALED_BLOCK,
    "Q4_1": 0.5 + 2 * _SCALED_BLOCK,
}
"""Per weight on a CPU, by GGUF kind; the values of all others take 32 bits."""

_SCALE_BYTES = 4  # one per output, for int8

SizeOf = Callable[[tuple[int, int], Sequence[str]], float]
"""Bytes of a matrix [out, in] that is stacked from tensors of these checkpoint names."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of a model in one serving dtype on one kind of device."""

    num_parameters: int
    weight_bytes: int
    cache_layers: tuple[LayerCache, ...]  # one per attention layer
    windows: tuple[int | None, ...]  # of those layers; None: attends to everything before
    max_position: int
    vocab_size: int
    hidden_size: int
    widest_bytes: int  # of the largest values between two layers' parts, per token
    widened: tuple[str, ...] = ()  # kinds of GGUF blocks whose values take 32 bits each on a CPU
    kept: tuple[str, ...] = ()  # how a CPU keeps float32 matrices, if narrower: "4 bits as Q4_1"

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """One KV block in all layers: keys and values."""
        values = sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.cache_layers)
        return values * block_size * dtype.itemsize


def read_footprint(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    is_packed: bool,
    impl: str,
    quantization: str | None = None,
) -> Footprint:
    """Measure a model whose weights are in `dtype`, and all else in `compute_dtype`.

    `is_packed`: matrices are kept in the narrowest form that loses nothing, or quantized, as the
    kernels for CPUs do. `checkpoint` may be a dummy. Raises ConfigError as loading it would.
    """
    spec = read_spec(checkpoint.hf_config, checkpoint.path) if impl != "transformers" else None
    if spec is None and impl == "native":
        raise ConfigError(f"{checkpoint.path}: our decoder does not know this kind of model")
    if spec is None:
        return _of_transformers(checkpoint, compute_dtype)
    parameters = allocate(spec, dtype, _META)
    if not is_packed:
        targets = parameters.by_name().values()
        weight_bytes = sum(target.numel() * target.dtype.itemsize for target in targets)
        return _of_decoder(spec, parameters, weight_bytes, compute_dtype)
    kinds = _gguf_kinds(checkpoint) if dtype is torch.float32 else {}
    itemsize = min(checkpoint.dtype.itemsize, dtype.itemsize)
    table_itemsize = itemsize
    if kinds and kinds.get(EMBEDDING) not in ("F16", "BF16"):
        table_itemsize = dtype.itemsize
    if quantization is not None:
        weight_bytes = _packed_bytes(parameters, _int8_bytes, table_itemsize)
        return _of_decoder(spec, parameters, weight_bytes, compute_dtype)
    weight_bytes = _packed_bytes(parameters, _lossless_bytes(kinds, itemsize), table_itemsize)
    footprint = _of_decoder(spec, parameters, weight_bytes, compute_dtype)
    widened = set(kinds.values()) - _PACKED_BYTES.keys() - {"F32"}
    kept = {_in_bits(kind) for kind in kinds.values() if kind in _PACKED_BYTES}
    if not kinds and checkpoint.dtype.itemsize < dtype.itemsize:
        kept = {f"{8 * checkpoint.dtype.itemsize} bits"}
    return replace(footprint, widened=tuple(sorted(widened)), kept=tuple(sorted(kept)))


def least_bytes(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    is_packed: bool,
    impl: str,
    quantization: str | None = None,
) -> int:
    """Memory without which the model cannot be built: its weights, and tables for its positions.

    Raises ConfigError as `read_footprint` does; what else is wrong with a model that transformers
    would run is left to loading it.
    """
    spec = read_spec(checkpoint.hf_config, checkpoint.path) if impl != "transformers" else None
    if spec is not None:
        weight_bytes = read_footprint(
            checkpoint,
            dtype=dtype,
            compute_dtype=compute_dtype,
            is_packed=is_packed,
            impl=impl,
            quantization=quantization,
        ).weight_bytes
        ropes = {layer.rope for layer in spec.layers}
        return weight_bytes + sum(table_peak_bytes(rope, spec.max_position) for rope in ropes)
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # it has no types
    try:
        with _META:
            model = auto.from_config(copy.deepcopy(checkpoint.for_transformers().hf_config))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return 0
    return dtype.itemsize * sum(int(parameter.numel()) for parameter in model.parameters())


def _of_decoder(
    spec: DecoderSpec, parameters: DecoderParameters, weight_bytes: int, dtype: torch.dtype
) -> Footprint:
    inner = 3 * spec.intermediate_size  # gate and up, and their product
    heads = 2 * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return Footprint(
        num_parameters=sum(tensor.numel() for tensor in parameters.by_name().values()),
        weight_bytes=weight_bytes,
        cache_layers=tuple(LayerCache(spec.num_kv_heads, spec.head_dim) for _ in spec.layers),
        windows=tuple(layer.window for layer in spec.layers),
        max_position=spec.max_position,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        widest_bytes=max(inner, heads) * dtype.itemsize,
    )


def _packed_bytes(parameters: DecoderParameters, size_of: SizeOf, table_itemsize: int) -> int:
    """The CPU's layout: matrices packed, and the embedding, of which rows are looked up, beside a
    head that is packed from it."""
    embedding = parameters.embedding
    size: float = embedding.numel() * table_itemsize
    others = [parameters.final_norm]
    matrices = [("", linear) for linear in (parameters.head,) if linear is not None]
    if parameters.head is None:
        size += size_of(embedding.shape, [EMBEDDING])
    for index, layer in enumerate(parameters.layers):
        linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
        matrices += [(f"model.layers.{index}.", linear) for linear in linears]
        others += layer.norms.values()
    for prefix, linear in matrices:
        size += size_of(linear.shape, [f"{prefix}{name}.weight" for name in linear.parts])
        if linear.bias is not None:
            others.append(linear.bias.float())
    return math.ceil(size) + sum(tensor.nbytes for tensor in others)


def _int8_bytes(shape: tuple[int, int], _: Sequence[str]) -> float:
    return math.prod(shape) + shape[0] * _SCALE_BYTES


def _gguf_kinds(checkpoint: Checkpoint) -> dict[str, str]:
    """How a GGUF file stores each tensor, by checkpoint name; empty for other formats."""
    if checkpoint.path.is_dir():
        return {}
    model_type = checkpoint.hf_config.model_type
    tensors = read_gguf_model(checkpoint.path).tensors
    return {hf_name(tensor.name, model_type): tensor.kind.name for tensor in tensors}


def _in_bits(kind: str) -> str:
    """Q4_1 → 4 bits as Q4_1"""
    return f"{kind.strip('BFQ').partition('_')[0]} bits as {kind}"


def _lossless_bytes(kinds: Mapping[str, str], itemsize: int) -> SizeOf:
    """The narrowest forms that lose nothing.

    Values that fit 16 bits are kept in 16 bits, and blocks are kept, if all parts of the matrix are
    of one kind.
    """
    if not kinds:
        return lambda shape, _: math.prod(shape) * itemsize

    def size_of(shape: tuple[int, int], names: Sequence[str]) -> float:
        found = {kinds.get(name, kinds[EMBEDDING]) for name in names}
        return math.prod(shape) * (_PACKED_BYTES.get(found.pop(), 4.0) if len(found) == 1 else 4.0)

    return size_of


def _of_transformers(checkpoint: Checkpoint, dtype: torch.dtype) -> Footprint:
    from serve.models.transformers_model import measure_transformers_model  # seconds to import

    model = measure_transformers_model(checkpoint)
    text = checkpoint.hf_config.get_text_config()
    hidden = int(text.hidden_size)
    stated = getattr(text, "intermediate_size", None) or 4 * hidden
    inner = max(stated) if isinstance(stated, list) else int(stated)  # some say it layer by layer
    return Footprint(
        num_parameters=model.num_parameters,
        weight_bytes=model.num_parameters * dtype.itemsize,
        cache_layers=tuple(model.cache_layers),
        windows=_windows(text, len(model.cache_layers)),
        max_position=model.max_position,
        vocab_size=model.vocab_size,
        hidden_size=hidden,
        widest_bytes=3 * max(inner, hidden) * dtype.itemsize,
    )


def _windows(text: Any, num_layers: int) -> tuple[int | None, ...]:
    """By the config's word; models that mean something else by it are served by their own code."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * num_layers
    return tuple(
        window if "sliding" in kind and window is not None and math.isfinite(window) else None
        for kind in kinds[:num_layers]
    )
