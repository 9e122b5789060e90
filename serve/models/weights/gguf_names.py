"""What llama.cpp's converter does to a checkpoint, undone: settings, names and values.

Checked against transformers' own GGUF loader in the tests; unlike it, RoPE scaling is not dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from serve.errors import ConfigError
from serve.models.rope import llama3_frequencies
from serve.models.spec import Llama3Scaling
from serve.models.weights.gguf_file import GGUFModel, load_tensor

_MODEL_TYPES: Final = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
}
_TOP_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_DIVISORS: Final = "rope_freqs.weight"


def model_type(path: Path, settings: Mapping[str, Any]) -> str:
    """The Hugging Face model type of a file's architecture. Raises ConfigError."""
    architecture = settings.get("general.architecture")
    if architecture not in _MODEL_TYPES or settings.get(f"{architecture}.expert_count"):
        what = f"{architecture} with experts" if architecture in _MODEL_TYPES else architecture
        raise ConfigError(
            f"{path}: GGUF files of architecture {what!r} cannot be served; known are "
            f"{', '.join(_MODEL_TYPES)}. Use the model's safetensors folder instead"
        )
    return _MODEL_TYPES[architecture]


def hf_name(gguf_name: str, hf_model_type: str) -> str:
    """Checkpoint name of a tensor; unknown names come back as they are and the loader objects."""
    stem, _, suffix = gguf_name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    block, _, rest = stem.partition(".")
    index, _, part = rest.partition(".")
    names = _LAYER_NAMES
    if hf_model_type == "gemma3_text":
        names = names | _GEMMA_LAYER_NAMES
    if block != "blk" or part not in names:
        return gguf_name
    return f"model.layers.{index}.{names[part]}.{suffix}"


def hf_value(name: str, value: Tensor, config: Any) -> Tensor:
    """A tensor's value as the Hugging Face checkpoint has it; `name` is the Hugging Face name."""
    if config.model_type in ("llama", "mistral"):
        if ".q_proj." in name:
            return _unpermute(value, config.num_attention_heads)
        if ".k_proj." in name:
            return _unpermute(value, config.num_key_value_heads)
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        return value.float() - 1.0
    return value


def _unpermute(value: Tensor, num_heads: int) -> Tensor:
    """llama.cpp rotates neighbouring dimensions of a head, Hugging Face those half a head apart."""
    pairs = value.view(num_heads, value.shape[0] // num_heads // 2, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)


def config_values(model: GGUFModel) -> dict[str, Any]:
    """Keyword arguments of the transformers config class for a model. Raises ConfigError."""
    hf_model_type = model_type(model.path, model.settings)
    architecture = str(model.settings["general.architecture"])
    prefix = architecture + "."
    own = {k.removeprefix(prefix): v for k, v in model.settings.items() if k.startswith(prefix)}
    try:
        return _config_values(model, hf_model_type, own)
    except KeyError as error:
        raise ConfigError(f"{model.path}: the file lacks {architecture}.{error.args[0]}") from error
    except (TypeError, ValueError, ArithmeticError) as error:  # a text, a list or zero for a number
        raise ConfigError(
            f"{model.path}: its {architecture} settings cannot be used ({error}); download it "
            "again or use the model's safetensors folder"
        ) from error


def _config_values(model: GGUFModel, hf_model_type: str, own: Mapping[str, Any]) -> dict[str, Any]:
    num_heads, hidden = own["attention.head_count"], own["embedding_length"]
    head_dim = own.get("attention.key_length", hidden // num_heads)
    if own.get("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(f"{model.path}: rotation of part of a head is not supported")
    names = {tensor.name for tensor in model.tensors}
    vocab = next((t.shape[0] for t in model.tensors if t.name == "token_embd.weight"), None)
    values = {
        "vocab_size": own.get("vocab_size", vocab),
        "hidden_size": hidden,
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": own.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": own["attention.layer_norm_rms_epsilon"],
        "tie_word_embeddings": "output.weight" not in names,
    }
    if hf_model_type in ("llama", "qwen3"):
        values["attention_bias"] = "blk.0.attn_q.bias" in names
    if "attention.sliding_window" in own and hf_model_type != "llama":
        values["sliding_window"] = own["attention.sliding_window"]
    if hf_model_type == "gemma3_text":
        # As llama.cpp does: only the 27B model (62 layers) scales by hidden size per head.
        is_27b = own["block_count"] == 62
        values["query_pre_attn_scalar"] = hidden // num_heads if is_27b else head_dim
    for token in ("bos", "eos", "padding"):
        if (token_id := model.settings.get(f"tokenizer.ggml.{token}_token_id")) is not None:
            values[f"{token.removesuffix('ding')}_token_id"] = token_id
    return values | _rope_values(model, hf_model_type, own, head_dim)


def _rope_values(
    model: GGUFModel, hf_model_type: str, own: Mapping[str, Any], head_dim: int
) -> dict[str, Any]:
    theta = own.get("rope.freq_base", 10000.0)
    scaling = _scaling(model, own, float(theta), head_dim)
    if hf_model_type != "gemma3_text":
        return {"rope_parameters": {"rope_theta": theta, **scaling}}
    local = {"rope_type": "default", "rope_theta": own.get("rope.freq_base_swa", 10000.0)}
    full = {"rope_theta": theta, **scaling}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def _scaling(
    model: GGUFModel, own: Mapping[str, Any], theta: float, head_dim: int
) -> dict[str, Any]:
    # As llama.cpp has it: a factor without a type is linear, and a factor of 0 stands for none.
    kind = own.get("rope.scaling.type", "linear")
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 0.0)) or 1.0
    is_plain = kind == "none" or (kind == "linear" and factor == 1.0)
    divisors = next((t for t in model.tensors if t.name == ROPE_DIVISORS), None)
    if divisors is not None and not is_plain:
        raise ConfigError(
            f"{model.path}: {ROPE_DIVISORS} together with RoPE scaling {kind!r} by {factor} is not "
            "supported; use the model's safetensors folder"
        )
    if divisors is not None:
        return _llama3_scaling(model, load_tensor(divisors), theta, head_dim)
    if is_plain:
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = own.get("rope.scaling.original_context_length", own["context_length"])
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise ConfigError(f"{model.path}: RoPE kind {kind!r} is not supported in GGUF files")


def _llama3_scaling(
    model: GGUFModel, divisors: Tensor, theta: float, head_dim: int
) -> dict[str, Any]:
    """GGUF keeps Llama 3.1's frequencies as divisors; recover the parameters and check them."""
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    scaling = Llama3Scaling(float(divisors.max()), 1.0, 4.0, 8192)
    expected = plain / llama3_frequencies(plain, scaling)
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
        raise ConfigError(
            f"{model.path}: the RoPE divisors in {ROPE_DIVISORS} are not those of Llama 3.1's "
            "scaling; such files are not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }
