"""Running a transformers model's layers over the paged cache, all requests' tokens at once.

transformers looks attention up by name in a registry (AttentionInterface). Under our name it calls
`_paged_attention`, which finds the step under way on the module that attends. Models that keep
everything else by position and token run so; which do, `transformers_probe.py` finds out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from serve.errors import ConfigError
from serve.kernels.base import AttentionBackend, ForwardContext
from serve.models.base import LayerCache

PLAIN_ATTENTION = "eager"
_PAGED_ATTENTION = "serve_paged"
_MEASURED_ATTENTION = "serve_measured"

SeesFn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Batch row, head, query and key positions, broadcast → whether the query sees the key."""


class UnservableHeads(ConfigError):
    """The attention kernels have no code for heads of this size."""


class Batched:
    """The layers with their attention replaced by `attention`. Changes `hf_model` for good.

    Raises ConfigError, and whatever the model's code raises, where that cannot be.
    """

    description = (
        "all requests at once: what shares a step may change the last bits of a result, and more "
        "than those with a mixture of experts"
    )

    def __init__(
        self, hf_model: Any, base: Any, attention: AttentionBackend, max_position: int
    ) -> None:
        self.attention = attention
        self._base = base
        self._steps = _wire(hf_model)
        shapes = self._measure(hf_model, max_position)
        set_attention(hf_model, _PAGED_ATTENTION)
        self.cache_layers = list(shapes.values())
        self._check_heads()
        self._cache_index = {layer: index for index, layer in enumerate(shapes)}

    def run(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] → [T, hidden]."""
        step = _Step(self.attention, ctx, self._cache_index)
        return self._run(token_ids, ctx.positions, step)

    def _check_heads(self) -> None:
        """The kernels were chosen by the config's word; the model's caches are what they get."""
        possible = self.attention.limits.head_dims
        for layer in self.cache_layers:
            if possible is not None and layer.head_dim not in possible:
                raise UnservableHeads(f"heads of size {layer.head_dim}")

    def _run(self, token_ids: Tensor, positions: Tensor, step: _Step | _Measurement) -> Tensor:
        self._steps.current = step
        output = self._base(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False
        )
        self._steps.current = None
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _measure(self, hf_model: Any, max_position: int) -> dict[int, LayerCache]:
        """Run one token to see which layers attend, with which KV shapes, and to what."""
        set_attention(hf_model, _MEASURED_ATTENTION)
        measurement = _Measurement(max_position)
        token = torch.zeros(1, dtype=torch.long, device=next(self._base.parameters()).device)
        with torch.inference_mode():
            self._run(token, token, measurement)
        return measurement.found()


def measure_attention(hf_model: Any, **arguments: Tensor) -> dict[int, LayerCache]:
    """The KV shapes that `Batched` would find, from a model on the meta device. Raises as it
    does."""
    steps = _wire(hf_model)
    set_attention(hf_model, _PAGED_ATTENTION)  # without masks, which have no values there
    steps.current = measurement = _Measurement(max_position=0)
    with torch.inference_mode():
        hf_model(use_cache=False, **arguments)
    return measurement.found()


def _wire(hf_model: Any) -> _Steps:
    """Make our attention known, and the step under way findable from every module."""
    AttentionInterface.register(_PAGED_ATTENTION, _paged_attention)
    AttentionInterface.register(_MEASURED_ATTENTION, _paged_attention)
    AttentionMaskInterface.register(_MEASURED_ATTENTION, _described_mask)
    steps = _Steps()
    for module in hf_model.modules():
        module.serve_steps = steps
    return steps


def set_attention(hf_model: Any, name: str) -> None:
    """Choose the attention of a model and of all its parts, which may have configs of their own."""
    for module in hf_model.modules():
        if (config := getattr(module, "config", None)) is not None:
            config._attn_implementation = name


class _Steps:
    """Where modules find the step under way."""

    current: _Step | _Measurement | None = None


class _Step:
    """One forward pass over the paged cache."""

    def __init__(
        self, backend: AttentionBackend, ctx: ForwardContext, cache_index: dict[int, int]
    ) -> None:
        self._backend = backend
        self._ctx = ctx
        self._cache_index = cache_index

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        # Causality is the backend's affair: no mask function is registered under our name.
        assert mask is None
        index, meta = self._cache_index[layer], self._ctx.attention
        kv, kv_scales = self._ctx.kv[index], self._ctx.scales_of(index)
        head_dim, value_dim = max(key.shape[-1], value.shape[-1]), value.shape[-1]
        key, value = padded(key, head_dim), padded(value, head_dim)
        self._backend.write_kv(key, value, kv, meta.slot_mapping, kv_scales)
        attended = self._backend.attend(
            padded(query, head_dim),
            kv,
            meta,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            kv_scales=kv_scales,
        )
        return attended[..., :value_dim]


class _Measurement:
    """Stands in for a step while shapes are measured; a lone token attends to its own value."""

    def __init__(self, max_position: int) -> None:
        self.shapes: dict[int, LayerCache] = {}
        self._max_position = max_position

    def found(self) -> dict[int, LayerCache]:
        """By layer, in order."""
        if not self.shapes:
            raise ConfigError("no layer uses transformers' attention interface")
        return dict(sorted(self.shapes.items()))

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        window: int | None,
        **_: Any,
    ) -> Tensor:
        if layer in self.shapes:
            raise ConfigError(f"layer {layer} attends more than once per token")
        if key.shape[0] != query.shape[0]:
            raise ConfigError(f"layer {layer} has {key.shape[0]} keys for {query.shape[0]} tokens")
        if mask is not None:
            check_mask(getattr(mask, "serve_sees", None), window, self._max_position, key.device)
        head_dim = max(key.shape[2], value.shape[2])
        self.shapes[layer] = LayerCache(num_kv_heads=key.shape[1], head_dim=head_dim)
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def _paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: [1, heads, T, head_dim] → [1, T, heads, head_dim]."""
    attended = module.serve_steps.current.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        attention_mask,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return attended[None], None


def padded(heads: Tensor, head_dim: int) -> Tensor:
    """Zeros up to head_dim; they change no product."""
    missing = head_dim - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads


def _described_mask(
    *, q_length: int, kv_length: int, mask_function: SeesFn, device: torch.device, **_: Any
) -> Tensor:
    """What a model takes for its attention mask while it is measured: nothing masked, and what the
    mask is made from."""
    mask = torch.zeros(1, 1, q_length, kv_length, device=device)
    mask.serve_sees = mask_function  # type: ignore[attr-defined]
    return mask


def check_mask(
    sees: SeesFn | None, window: int | None, max_position: int, device: torch.device
) -> None:
    """Raises ConfigError unless a token sees itself and all before it, or the last `window`: what
    the kernels compute. At the model's true lengths, which no probe of a few tokens reaches."""
    if sees is None:
        raise ConfigError("it masks attention by code of its own")
    reach = max_position if window is None else window
    edges = {0, 1, reach - 1, reach, reach + 1, 2 * reach, max_position // 2, max_position - 1}
    some = sorted(edge for edge in edges if 0 <= edge < max_position)
    queries = torch.tensor(some, device=device)[:, None]
    keys = torch.arange(max_position, device=device)[None, :]
    row = torch.zeros(1, 1, dtype=torch.long, device=device)
    expected = (keys <= queries) & (keys > queries - reach)
    if not torch.equal(sees(row, row, queries, keys).expand_as(expected), expected):
        raise ConfigError(
            "its attention is neither to all tokens before nor to a window of the last"
        )
