"""Any other causal LM: transformers' own model over our paged cache.

It is loaded as it is and taken apart (`transformers_parts.py`). Its layers then run with our
attention or, where that would not compute the same, one request after another
(`transformers_batched.py`, `transformers_one_by_one.py`); `transformers_probe.py` finds out which.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as hf_logging

from serve.errors import ConfigError
from serve.kernels.base import ForwardContext, Kernels
from serve.models.base import LayerCache
from serve.models.rope import KINDS, scaled_max_position
from serve.models.transformers_batched import (
    PLAIN_ATTENTION,
    UnservableHeads,
    measure_attention,
    set_attention,
)
from serve.models.transformers_one_by_one import keeps_a_state, measure_caches
from serve.models.transformers_parts import take_apart
from serve.models.transformers_probe import find_way, in_one_line, probe_tokens
from serve.models.weights.checkpoint import Checkpoint

_LENGTH_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
)
_USUAL_LENGTH = 2048
"""For models that could go on for ever (BLOOM's alibi) and do not say how far they were trained."""

logger = logging.getLogger(__name__)


class TransformersModel:
    """A CausalModel around a loaded transformers model."""

    is_native = False
    needs_prompt_lens = False
    can_be_recorded = False
    # Served only up to the length where angles would change: see `_max_position`.
    prompt_limits: Sequence[tuple[int, bool]] = ()

    def __init__(
        self, hf_model: Any, kernels: Kernels, max_position: int, dtype: torch.dtype
    ) -> None:
        """Raises ConfigError for a model that computes something else over a paged cache."""
        self.vocab_size = int(hf_model.config.get_text_config().vocab_size)
        device = next(hf_model.parameters()).device
        token_ids = probe_tokens(self.vocab_size, device)
        parts = take_apart(hf_model, token_ids)
        self.max_position = min(max_position, parts.num_positions or max_position)
        self._head = parts.head
        self.way = find_way(hf_model, parts, kernels.attention, self.max_position, token_ids, dtype)
        self.attention = self.way.attention
        self.cache_layers = self.way.cache_layers

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] int64 → [T or S, hidden]."""
        hidden = self.way.run(token_ids, ctx)
        return hidden if ctx.logits_indices is None else hidden[ctx.logits_indices]

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] → [S, vocab] fp32, through whatever the model does after its layers."""
        return self._head(hidden)


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
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    checkpoint = checkpoint.for_transformers()
    # transformers notes the attention in the config it is given; ours is shared with others.
    config = copy.deepcopy(checkpoint.hf_config)
    # A table of missing and unexpected tensors, which we refuse in one line.
    logging.getLogger("transformers.modeling_utils").setLevel(logging.ERROR)
    _check_kind(checkpoint)
    try:
        hf_model = _load(checkpoint, config, compute_dtype, seed)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
        first_line = (str(error).strip() or "no reason given").splitlines()[0]
        raise ConfigError(
            f"{checkpoint.path}: transformers cannot load this model: {type(error).__name__}: "
            f"{first_line}"
        ) from error
    hf_model = hf_model.to(device).eval().requires_grad_(False)
    if compute_dtype is not dtype:
        for parameter in hf_model.parameters():
            parameter.copy_(parameter.to(dtype))
    try:
        return TransformersModel(hf_model, kernels, _max_position(config), compute_dtype)
    except UnservableHeads as error:
        raise ConfigError(
            f"{checkpoint.path}: {error}, which the {kernels.name} kernels cannot serve; use "
            "--attention-backend reference"
        ) from error
    except (ConfigError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise _refusal(checkpoint, in_one_line(error)) from error


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """What a model would be like."""

    num_parameters: int
    vocab_size: int
    max_position: int
    cache_layers: list[LayerCache]


def measure_transformers_model(checkpoint: Checkpoint) -> MeasuredModel:
    """The sizes of the model that `load_transformers_model` would load, from the config alone.

    It runs on the meta device, where tensors have shapes and no values. Raises ConfigError for
    what the config tells against it.
    """
    checkpoint = checkpoint.for_transformers()
    config = copy.deepcopy(checkpoint.hf_config)
    _check_kind(checkpoint)
    dummy = replace(checkpoint, format="dummy", files=())
    try:
        with torch.device("meta"):
            # The one dtype whose grouped products have shapes there.
            hf_model = _load(dummy, config, torch.bfloat16, seed=0).eval()
            layers = _measure_layers(hf_model)
    except Exception as error:  # models' code raises every kind
        raise ConfigError(
            f"{checkpoint.path}: a model of type {config.model_type!r} cannot be measured without "
            f"its weights: {in_one_line(error)}"
        ) from error
    return MeasuredModel(
        num_parameters=sum(p.numel() for p in hf_model.parameters()),
        vocab_size=int(config.get_text_config().vocab_size),
        max_position=_max_position(config),
        cache_layers=list(layers.values()),
    )


def _measure_layers(hf_model: Any) -> dict[int, LayerCache]:
    # A mask is given because without one some models look for padding among the ids.
    ids = torch.ones(1, 1, dtype=torch.long)
    try:
        return measure_attention(hf_model, input_ids=ids, attention_mask=ids)
    except Exception:  # as when it is loaded: then it runs request by request, if at all
        set_attention(hf_model, PLAIN_ATTENTION)
        return measure_caches(hf_model, input_ids=ids, attention_mask=ids)


def _check_kind(checkpoint: Checkpoint) -> None:
    """What a config alone says against a model. Raises ConfigError."""
    config = checkpoint.hf_config
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{checkpoint.path}: model type {config.model_type!r} is no causal language model"
        )
    MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # imports its code
    types = getattr(config.get_text_config(), "layer_types", None) or ()
    if stateful := sorted({kind for kind in types if keeps_a_state(kind)}):
        raise _refusal(
            checkpoint,
            f"its {stateful[0]} layers keep more than keys and values, and a paged cache no more",
        )


def _refusal(checkpoint: Checkpoint, reason: str) -> ConfigError:
    return ConfigError(
        f"{checkpoint.path}: model type {checkpoint.hf_config.model_type!r} cannot be served: "
        f"{reason}. docs/models.md lists the model types that can."
    )


def _load(checkpoint: Checkpoint, config: Any, dtype: torch.dtype, seed: int) -> Any:
    auto: Any = AutoModelForCausalLM  # its type hints leave out what is used here
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": PLAIN_ATTENTION}
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
    stated = (getattr(text, name, None) for name in _LENGTH_NAMES)
    position = next((length for length in stated if type(length) is int), None)
    if position is None:
        position = _USUAL_LENGTH
        logger.info("config.json states no context length; taking %d tokens", position)
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
