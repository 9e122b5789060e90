"""Checkpoint → model: our decoder where it knows the family, transformers' model otherwise."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from serve.errors import ConfigError
from serve.kernels.base import Kernels
from serve.models.base import CausalModel
from serve.models.decoder import DecoderModel
from serve.models.families import config_head_dim, read_spec
from serve.models.spec import DecoderSpec
from serve.models.weights.checkpoint import Checkpoint
from serve.models.weights.loader import load_parameters
from serve.models.weights.parameters import (
    EMBEDDING,
    HEAD,
    DecoderParameters,
    allocate,
    fill_randomly,
)

logger = logging.getLogger(__name__)


def build_model(
    checkpoint: Checkpoint,
    *,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    impl: str,
    seed: int,
    compute_dtype: torch.dtype | None = None,
) -> CausalModel:
    """Load a checkpoint in `dtype` on `device`.

    `compute_dtype` is that of activations, keys and values, if it is not `dtype`; `impl` is "auto",
    "native" (our decoder) or "transformers". `seed` makes dummy weights.
    Raises ConfigError.
    """
    compute_dtype = compute_dtype or dtype
    spec = read_spec(checkpoint.hf_config, checkpoint.path) if impl != "transformers" else None
    if spec is not None:
        parameters = _load(checkpoint, spec, dtype, device, seed)
        return DecoderModel(spec, parameters, kernels, compute_dtype)
    if impl == "native":
        raise ConfigError(
            f"{checkpoint.path}: our decoder does not know this variant of model type "
            f"{checkpoint.hf_config.model_type!r}; use --model-impl transformers or auto"
        )
    from serve.models.transformers_model import load_transformers_model  # seconds to import

    model = load_transformers_model(
        checkpoint,
        kernels=kernels,
        dtype=dtype,
        compute_dtype=compute_dtype,
        device=device,
        seed=seed,
    )
    logger.info(
        "model type %s runs as transformers' model, %s",
        checkpoint.hf_config.model_type,
        model.way.description,
    )
    return model


def head_dims(checkpoint: Checkpoint) -> set[int]:
    """Sizes of the attention heads a model will have, for choosing kernels. Raises ConfigError."""
    try:
        text = checkpoint.hf_config.get_text_config()
        # In releases that know of it, a model whose layers differ has a config for each.
        layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
        return {config_head_dim(layer) for layer in layers}
    except ConfigError as error:
        raise ConfigError(
            f"{checkpoint.path}: model type {checkpoint.hf_config.model_type!r} cannot be served: "
            f"{error}. docs/models.md lists the model types that can."
        ) from error


def _load(
    checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype, device: torch.device, seed: int
) -> DecoderParameters:
    if checkpoint.format != "dummy" and spec.tie_embeddings:
        return _load_tied(checkpoint, spec, dtype, device)
    parameters = allocate(spec, dtype, device)
    if checkpoint.format == "dummy":
        fill_randomly(parameters, spec, seed)
    else:
        load_parameters(parameters.by_name(), checkpoint)
    return parameters


def _load_tied(
    checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> DecoderParameters:
    """Tied checkpoints may store the shared matrix under either name, or under both."""
    stored = checkpoint.tensor_names()
    if not {EMBEDDING, HEAD} <= stored:
        parameters = allocate(spec, dtype, device)
        targets = parameters.by_name()
        if HEAD in stored:
            targets[HEAD] = targets.pop(EMBEDDING)
        load_parameters(targets, checkpoint)
        return parameters

    parameters = allocate(replace(spec, tie_embeddings=False), dtype, device)
    load_parameters(parameters.by_name(), checkpoint)
    assert parameters.head is not None
    if torch.equal(parameters.embedding.values(), parameters.head.parts["lm_head"].values()):
        return replace(parameters, head=None)
    logger.warning(
        "%s: the config ties %s to %s, but their values differ; both are used as stored",
        checkpoint.path,
        HEAD,
        EMBEDDING,
    )
    return parameters
