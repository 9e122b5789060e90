"""What sizes a model's settings may name: checked before anything is built from them, since a
billion layers take all memory before the first weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from serve.errors import ConfigError

_LAYERS = (1, 2**10)
_HEADS = (1, 2**14)
_WIDTH = (1, 2**20)
_INNER = (1, 2**24)
_POSITIONS = (1, 2**31)
_EXPERTS = (0, 2**13)  # 0: a dense variant of the family
_LOW_RANK = (0, 2**20)

LIMITS: Final[Mapping[str, tuple[int, int]]] = {
    "vocab_size": (1, 2**22),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), _LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "num_nextn_predict_layers"), (0, 2**10)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_kv_heads"), _HEADS),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim", "d_kv"), _WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size"), _WIDTH),
    **dict.fromkeys(("v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), _LOW_RANK),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "rotary_dim"), _LOW_RANK),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size"), _INNER),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), (0, 2**24)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _EXPERTS),
    **dict.fromkeys(("n_shared_experts", "moe_num_experts", "num_experts_per_tok"), _EXPERTS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), _POSITIONS),
    **dict.fromkeys(("max_seq_len", "max_sequence_length"), _POSITIONS),
}
"""Key → the least and the most, of every model family's name for it. Twice and more of what
published models have."""


def check_sizes(file: Path, config: Mapping[str, Any]) -> None:
    """Raises ConfigError, naming `file`, the key and its limits. Some models have a list, one value
    for each layer; null, and what is left out, become the model type's default."""
    for section in _sections(config):
        for name in LIMITS.keys() & section.keys():
            value = section[name]
            for each in value if isinstance(value, list) else [value]:
                if each is not None:
                    _check(file, name, each)


def _sections(config: Mapping[str, Any], depth: int = 3) -> Iterator[Mapping[str, Any]]:
    """The config itself and those of its parts, such as a multimodal model's decoder."""
    yield config
    for name, value in config.items():
        is_part = name.endswith("_config") or name in ("decoder", "encoder")
        if depth and is_part and isinstance(value, Mapping):
            yield from _sections(value, depth - 1)


def _check(file: Path, name: str, value: object) -> None:
    least, most = LIMITS[name]
    if type(value) is not int or value < least:
        kind = "a positive whole number" if least else "a whole number, 0 or more"
        raise ConfigError(f"{file}: {name} is {repr(value)[:100]} and must be {kind}")
    if value > most:
        raise ConfigError(f"{file}: {name} is {value}, and at most {most} can be served")
