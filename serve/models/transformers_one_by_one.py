"""Running a transformers model's layers over the paged cache, one request after another.

For models whose attention is code of their own (alibi biases, chunks): it stays as it is, and gets
each request's keys and values from a transformers Cache that keeps them in our blocks. Slower than
one call for all requests, by as many calls.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from serve.errors import ConfigError
from serve.kernels import reference
from serve.kernels.base import AttentionBackend, ForwardContext
from serve.models.base import LayerCache
from serve.models.transformers_batched import PLAIN_ATTENTION, padded, set_attention

_WITHOUT_CACHE = ("moe", "mlp")
"""Types of layers that do not attend; some releases count them among those with a state."""


class OneByOne:
    """The layers as they are. The cache has the reference kernels' layout, whatever attends.

    Raises ConfigError, and whatever the model's code raises, where that cannot be.
    """

    description = "one request after another, because its attention is code of its own"

    def __init__(self, hf_model: Any, base: Any) -> None:
        set_attention(hf_model, PLAIN_ATTENTION)
        self._blocks = reference.ReferenceAttention()
        self.attention: AttentionBackend = self._blocks
        self._base = base
        self._cache_argument = _cache_argument(base)
        device = next(base.parameters()).device
        shapes = measure_caches(base, input_ids=torch.zeros(1, 1, dtype=torch.long, device=device))
        self.cache_layers = list(shapes.values())
        self._cache_index = {layer: index for index, layer in enumerate(shapes)}

    def run(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] → [T, hidden]."""
        meta, parts, start = ctx.attention, [], 0
        for row, query_len in enumerate(meta.query_lens_host):
            share = slice(start, start + query_len)
            layers: Any = [
                _PagedLayer(self._blocks, ctx, self._cache_index.get(layer), row, share)
                for layer in range(max(self._cache_index) + 1)
            ]
            parts.append(self._run(token_ids[share], Cache(layers=layers)))
            start += query_len
        return torch.cat(parts)

    def _run(self, token_ids: Tensor, cache: Cache) -> Tensor:
        arguments = {self._cache_argument: cache}
        output = self._base(input_ids=token_ids[None], use_cache=True, **arguments)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


def measure_caches(module: Any, **arguments: Tensor) -> dict[int, LayerCache]:
    """Run a model, or its base, to see which layers keep keys and values, and of which shapes.

    Raises ConfigError, and whatever the model's code raises.
    """
    shapes: dict[int, LayerCache] = {}
    cache: Any = Cache(layer_class_to_replicate=DynamicLayer)
    cache.layer_class_to_replicate = lambda: _MeasuredLayer(len(cache.layers), shapes)
    with torch.inference_mode():
        module(use_cache=True, **{_cache_argument(module): cache}, **arguments)
    if not shapes:
        raise ConfigError("it keeps no keys and values in the cache that it is given")
    return dict(sorted(shapes.items()))


def _cache_argument(module: Any) -> str:
    """What its forward calls the cache; releases of transformers differ."""
    names = inspect.signature(module.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise ConfigError("it takes no cache of keys and values")


def keeps_a_state(layer_type: str) -> bool:
    """Whether a layer of this type, as configs name them, caches other things than keys and
    values: a recurrent state, the last inputs of a convolution, an index.

    Types of a model's own are known once its code has been imported.
    """
    classes = DYNAMIC_LAYER_TYPE_MAPPING
    plain = (DynamicLayer, DynamicSlidingWindowLayer, classes.get("dummy"))
    if layer_type in _WITHOUT_CACHE:
        return False
    return classes.get(layer_type, DynamicLayer) not in plain


class _MeasuredLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer's cache that notes the shapes that come."""

    def __init__(self, layer: int, shapes: dict[int, LayerCache]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layer = layer
        self._shapes = shapes

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._layer in self._shapes:
            raise ConfigError(f"layer {self._layer} attends more than once per token")
        head_dim = max(key_states.shape[-1], value_states.shape[-1])
        self._shapes[self._layer] = LayerCache(key_states.shape[1], head_dim)
        return super().update(key_states, value_states, *args, **kwargs)


class _PagedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's keys and values of one request, in the blocks of a step's cache.

    `share` are the request's tokens in the step; `index` is None for a layer without a cache.
    """

    def __init__(
        self,
        blocks: reference.ReferenceAttention,
        ctx: ForwardContext,
        index: int | None,
        row: int,
        share: slice,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self._blocks = blocks
        self._ctx = ctx
        self._index = index
        self._row = row
        self._share = share
        self._length: int = ctx.attention.seq_lens_host[row] - (share.stop - share.start)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store what is new [1, heads, T, head_dim]; returns all there is."""
        assert self._index is not None
        kv, scales = self._ctx.kv[self._index], self._ctx.scales_of(self._index)
        meta = self._ctx.attention
        key, value = (
            padded(new[0].transpose(0, 1), kv.shape[-1]) for new in (key_states, value_states)
        )
        self._blocks.write_kv(key, value, kv, meta.slot_mapping[self._share], scales)
        self._length += key_states.shape[2]
        keys, values = self._blocks.gather(kv, meta.block_table[self._row], self._length, scales)
        return (
            keys[None, :, :, : key_states.shape[-1]].to(key_states.dtype),
            values[None, :, :, : value_states.shape[-1]].to(value_states.dtype),
        )

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0
