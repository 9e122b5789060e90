"""Any other causal LM: transformers' own model, with its attention replaced by ours.

transformers looks attention up by name in a registry (AttentionInterface). Under our name it calls
`_paged_attention`, which finds the step's context among the keyword arguments that models pass
down, so one call over all requests' tokens [1, T] runs against the paged cache.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as hf_logging

from serve.errors import ConfigError
from serve.kernels.base import AttentionBackend, ForwardContext, Kernels
from serve.models.base import LayerCache
from serve.models.rope import KINDS, scaled_max_position
from serve.models.weights.checkpoint import Checkpoint

_ATTENTION = "serve_paged"


class TransformersModel:
    """A CausalModel around a loaded transformers model."""

    needs_prompt_lens = False
    # Served only up to the length where angles would change: see `_max_position`.
    prompt_limits: Sequence[tuple[int, bool]] = ()

    def __init__(self, hf_model: Any, kernels: Kernels, max_position: int) -> None:
        self.vocab_size = int(hf_model.config.get_text_config().vocab_size)
        self.max_position = max_position
        self.num_parameters = sum(p.numel() for p in hf_model.parameters())
        self._base = hf_model.base_model
        self._head = _without_base(hf_model)
        self._backend = kernels.attention
        shapes = self._measure_caches()
        self.cache_layers = list(shapes.values())
        self._cache_index = {layer: index for index, layer in enumerate(shapes)}

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] int64 → [T or S, hidden]."""
        step = _Step(self._backend, ctx, self._cache_index)
        hidden = self._run_base(token_ids, ctx.positions, step)
        return hidden if ctx.logits_indices is None else hidden[ctx.logits_indices]

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] → [S, vocab] fp32, through whatever the model does after its layers."""
        # The ids only tell the model the shape; the base that would read them is not there.
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        output = self._head(input_ids=ids, use_cache=False, serve_hidden=hidden[None])
        logits: Tensor = output.logits[0].float()
        return logits

    def _run_base(self, token_ids: Tensor, positions: Tensor, step: _Step | _Probe) -> Tensor:
        output = self._base(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            serve_step=step,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _measure_caches(self) -> dict[int, LayerCache]:
        """Run one token to see which layers attend, and with which KV shapes."""
        probe = _Probe()
        device = next(self._base.parameters()).device
        token = torch.zeros(1, dtype=torch.long, device=device)
        with torch.inference_mode():
            self._run_base(token, token, probe)
        return dict(sorted(probe.shapes.items()))


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
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        index, meta = self._cache_index[layer], self._ctx.attention
        kv, kv_scales = self._ctx.kv[index], self._ctx.scales_of(index)
        self._backend.write_kv(key, value, kv, meta.slot_mapping, kv_scales)
        return self._backend.attend(
            query,
            kv,
            meta,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            kv_scales=kv_scales,
        )


class _Probe:
    """Stands in for a step while shapes are measured; a lone token attends to its own value."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerCache] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        if key.shape != value.shape or key.shape[2] != query.shape[2]:
            raise ConfigError(
                f"attention with keys {list(key.shape[1:])} and values {list(value.shape[1:])} "
                "cannot be served: heads must have one size"
            )
        self.shapes[layer] = LayerCache(num_kv_heads=key.shape[1], head_dim=key.shape[2])
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def _paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    serve_step: _Step | _Probe,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: [1, heads, T, head_dim] → [1, T, heads, head_dim].

    Causality is the backend's affair: no mask function is registered under our name, so
    `attention_mask` is None.
    """
    assert attention_mask is None
    attended = serve_step.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return attended[None], None


class _GivenHidden(nn.Module):
    """Takes the place of a causal LM's base model and returns the hidden states it is handed."""

    def forward(self, *_: Any, serve_hidden: Tensor, **__: Any) -> _BaseOutput:
        return _BaseOutput(serve_hidden)


class _BaseOutput:
    """A base model's output of which only the hidden states are known; the rest (cross attentions,
    router logits, whatever a model has) is None."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def _without_base(hf_model: Any) -> Any:
    """The model's head alone, with any scaling or capping of logits its forward applies."""
    head = copy.copy(hf_model)
    head._modules = {**hf_model._modules, hf_model.base_model_prefix: _GivenHidden()}
    return head


def load_transformers_model(
    checkpoint: Checkpoint,
    *,
    kernels: Kernels,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> TransformersModel:
    """Load a checkpoint as transformers' model, its weights rounded to `dtype` and, because torch
    multiplies in one dtype only, kept in `compute_dtype`. Raises ConfigError."""
    AttentionInterface.register(_ATTENTION, _paged_attention)
    if not sys.stderr.isatty():
        hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # transformers notes the attention in the config it is given; ours is shared with others.
    config = copy.deepcopy(checkpoint.hf_config)
    config._attn_implementation = _ATTENTION
    # A table of missing and unexpected tensors, which we refuse in one line.
    logging.getLogger("transformers.modeling_utils").setLevel(logging.ERROR)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{checkpoint.path}: model type {config.model_type!r} is no causal language model"
        )
    try:
        hf_model = _load(checkpoint, config, compute_dtype, seed)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
        first_line = (str(error).strip() or "no reason given").splitlines()[0]
        raise ConfigError(
            f"{checkpoint.path}: transformers cannot load this model: {type(error).__name__}: "
            f"{first_line}"
        ) from error
    if not getattr(hf_model, "_supports_attention_backend", False):
        raise ConfigError(
            f"{checkpoint.path}: model type {config.model_type!r} computes attention in its own "
            "way, which cannot be served from a paged cache"
        )
    if hf_model.base_model is hf_model:
        raise ConfigError(
            f"{checkpoint.path}: {type(hf_model).__name__} has no separate base model"
        )
    hf_model = hf_model.to(device).eval().requires_grad_(False)
    if compute_dtype is not dtype:
        for parameter in hf_model.parameters():
            parameter.copy_(parameter.to(dtype))
    try:
        max_position = _max_position(config)
        model = TransformersModel(hf_model, kernels, max_position)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint.path}: {error}") from error
    except (TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"{checkpoint.path}: model type {config.model_type!r} does not run over a paged "
            f"cache: {error}"
        ) from error
    _check_heads(model, checkpoint, kernels)
    return model


def _check_heads(model: TransformersModel, checkpoint: Checkpoint, kernels: Kernels) -> None:
    """The kernels were chosen by the config's word; the model's caches are what they get."""
    if not model.cache_layers:
        raise ConfigError(f"{checkpoint.path}: no layer of this model uses our attention")
    possible = kernels.attention.limits.head_dims
    for layer in model.cache_layers:
        if possible is not None and layer.head_dim not in possible:
            raise ConfigError(
                f"{checkpoint.path}: heads of size {layer.head_dim}, which the {kernels.name} "
                "kernels cannot serve; use --attention-backend reference"
            )


def _load(checkpoint: Checkpoint, config: Any, dtype: torch.dtype, seed: int) -> Any:
    auto: Any = AutoModelForCausalLM  # its type hints leave out what is used here
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": _ATTENTION}
    if checkpoint.format == "dummy":
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return auto.from_config(config, **options)
    folder: Path | None = checkpoint.path
    if checkpoint.format == "gguf":
        auto = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # the auto class insists on a folder
        folder, options["state_dict"] = None, dict(checkpoint.tensors())
    hf_model, report = auto.from_pretrained(
        folder,
        config=config,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        **options,
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, report[problem])):
            raise ConfigError(
                f"{checkpoint.path}: {problem.replace('_keys', '')} tensors: {names[0]} "
                f"({len(names)} in all); config.json and weights do not belong together"
            )
    return hf_model


def _max_position(config: Any) -> int:
    """Context length. RoPE kinds that transformers recomputes per batch are served up to the
    length where they begin to change, since one request must not turn another's frequencies."""
    text = config.get_text_config()
    position = getattr(text, "max_position_embeddings", None)
    if position is None:
        raise ConfigError("max_position_embeddings is missing in its config.json")
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    lengths = []
    for rope in kinds:
        kind = rope.get("rope_type", "default")
        if kind in ("longrope", "dynamic"):
            lengths.append(int(rope.get("original_max_position_embeddings") or position))
        elif kind in KINDS:
            lengths.append(scaled_max_position(rope, position))
    return min(lengths, default=int(position))
