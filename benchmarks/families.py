"""Which of transformers' causal families run here, and how: `python -m benchmarks.families`.

Every family of transformers' AutoModelForCausalLM is built tiny with random weights, saved, loaded
as a user's model would be, and run over the paged cache beside others; it must then say the tokens
that transformers' own generate says. What comes out is the table of docs/models.md.
"""

from __future__ import annotations

import argparse
import itertools
import re
import tempfile
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as hf_logging

from serve.errors import ConfigError
from serve.models.decoder import DecoderModel
from serve.models.transformers_model import TransformersModel
from serve.models.transformers_one_by_one import OneByOne
from tests.tiny_models import MIXED_SCHEDULE, PagedRun, full_logits, load, random_tokens

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))

_HEADS, _LAYERS, _VOCAB, _NEW_TOKENS = 4, 4, 97, 8
_SIZES: Sequence[tuple[int, str]] = (
    (
        1,
        "bos_token_id decoder_start_token_id n_shared_experts moe_num_shared_experts n_group "
        "topk_group num_expert_groups mamba_n_groups mamba_ngroups n_groups n_mamba_heads "
        "first_k_dense_replace num_dense_layers",
    ),
    (
        2,
        "eos_token_id type_vocab_size num_key_value_heads num_kv_heads num_global_key_value_heads "
        "num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts zero_expert_num "
        "mamba_expand altup_num_inputs index_n_heads linear_num_key_heads num_kv_shared_layers",
    ),
    (
        _HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
        "mamba_num_heads mamba_n_heads linear_num_value_heads linear_num_heads num_experts "
        "num_local_experts n_routed_experts moe_num_experts rotary_dim laurel_rank index_topk",
    ),
    (
        _LAYERS,
        "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers "
        "num_decoder_layers num_encoder_layers",
    ),
    (5, "sliding_window attention_window window_size"),
    (6, "local_attention attention_chunk_size"),
    (
        8,
        "head_dim attention_head_dim global_head_dim kv_channels qk_nope_head_dim qk_rope_head_dim "
        "v_head_dim mamba_d_state state_size ssm_state_size mamba_dt_rank chunk_size "
        "mamba_chunk_size "
        "linear_key_head_dim linear_value_head_dim linear_head_dim hidden_size_per_layer_input "
        "index_head_dim",
    ),
    (
        16,
        "q_lora_rank kv_lora_rank qk_head_dim mamba_d_head mamba_head_dim mamba_headdim "
        "query_pre_attn_scalar",
    ),
    (
        24,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "expert_ffn_hidden_size",
    ),
    (
        32,
        "hidden_size d_model n_embd embed_dim embedding_size dim word_embed_proj_dim emb_dim "
        "hidden_dim n_hidden lru_width",
    ),
    (
        48,
        "intermediate_size ffn_dim n_inner d_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size "
        "d_inner inner_dim dim_ff ffn_intermediate_size dense_intermediate_size "
        "intermediate_size_mlp",
    ),
    (
        64,
        "max_position_embeddings n_positions max_seq_len n_ctx max_sequence_length seq_length "
        "mamba_d_ssm",
    ),
    (_VOCAB, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
)
_TINY: Mapping[str, Any] = {
    **{name: size for size, names in _SIZES for name in names.split()},
    "pad_token_id": 0,
    "is_decoder": True,
}
"""Small values under the names that configs use, whatever they are a config of."""

_OWN: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"full_attn_idxs": [1, 3]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""What else a family needs to be small, or to be itself when small."""


class NotTiny(Exception):
    """transformers builds no small model of this family out of sizes alone."""


def tiny_config(model_type: str, **settings: Any) -> Any:
    """A small config of a family. Raises what transformers raises."""
    config_class = CONFIG_MAPPING[model_type]
    usual = config_class()
    values = _tiny_values(usual)
    for name in config_class.sub_configs:
        if (part := getattr(usual, name, None)) is not None:
            values[name] = {"model_type": part.model_type, **_tiny_values(part)}
    return config_class(**{**values, **_OWN.get(model_type, {}), **settings})


def _tiny_values(usual: Any) -> dict[str, Any]:
    names = {*usual.to_dict(), *usual.attribute_map}
    values = {name: size for name, size in _TINY.items() if name in names}
    for alias, name in usual.attribute_map.items():
        if name in values:
            values.pop(alias, None)
    if "kv_lora_rank" in names:  # latent attention has no groups
        values["num_key_value_heads"] = _HEADS
    kinds = list(dict.fromkeys(getattr(usual, "layer_types", None) or ()))
    if len(kinds) > 1 and "layer_types" in usual.to_dict():
        values["layer_types"] = list(itertools.islice(itertools.cycle(kinds), _LAYERS))
    return values


def tiny_model(model_type: str, **settings: Any) -> Any:
    """A small model of a family with random weights in fp32, so large that every part shows in the
    logits. Raises NotTiny."""
    try:
        config = tiny_config(model_type, **settings)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.inference_mode():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(0.3 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
            model(input_ids=torch.tensor([[5, 4, 9]]))
    except Exception as error:  # configs' validators and models' code raise every kind
        raise NotTiny(f"{type(error).__name__}: {_first_line(error)}") from error
    return model


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one family."""

    model_type: str
    way: str
    note: str = ""


NATIVE, BATCHED, ONE_BY_ONE = "our decoder", "transformers'", "transformers', one by one"
REFUSED, NOT_TINY = "refused", "cannot be made tiny"
WAYS = (NATIVE, BATCHED, ONE_BY_ONE, REFUSED, NOT_TINY)


class WrongTokens(Exception):
    """A family was accepted and computes something else than transformers does."""


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread: for matrices as small as these, several only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def try_family(model_type: str) -> Row:
    """Build, save, load and run one family. Raises WrongTokens."""
    try:
        hf_model = tiny_model(model_type)
    except NotTiny as error:
        return Row(model_type, NOT_TINY, _short(str(error)))
    with tempfile.TemporaryDirectory() as folder:
        hf_model.save_pretrained(folder)
        try:
            model = load(Path(folder))
        except ConfigError as error:
            return Row(model_type, REFUSED, _reason(error, folder))
    prompts = [random_tokens(length, seed=length) for length in (9, 12, 10)]
    texts = [_generate(hf_model, prompt) for prompt in prompts]
    note = ""
    if not _says(prompts, texts, [full_logits(hf_model, text) for text in texts]):
        note = "as its forward says; transformers' generate says something else"
        texts = [_continue_by_forward(hf_model, prompt) for prompt in prompts]
    if not _says(prompts, texts, PagedRun(model, texts).run(MIXED_SCHEDULE)):
        raise WrongTokens(f"{model_type} is served, with other tokens than transformers'")
    if isinstance(model, DecoderModel):
        return Row(model_type, NATIVE, note)
    assert isinstance(model, TransformersModel)
    return Row(model_type, ONE_BY_ONE if isinstance(model.way, OneByOne) else BATCHED, note)


def _says(
    prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], logits: Sequence[Tensor]
) -> bool:
    """Whether greedy search by these logits [len(text), vocab] continues the prompts so."""
    return all(
        own[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == list(text[len(prompt) :])
        for prompt, text, own in zip(prompts, texts, logits, strict=True)
    )


def _generate(hf_model: Any, prompt: Sequence[int]) -> list[int]:
    hf_model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=_NEW_TOKENS, pad_token_id=0
    )
    tokens = hf_model.generate(torch.tensor([prompt]))
    return [int(token) for token in tokens[0]]


def _continue_by_forward(hf_model: Any, prompt: Sequence[int]) -> list[int]:
    text = list(prompt)
    for _ in range(_NEW_TOKENS):
        text.append(int(full_logits(hf_model, text)[-1].argmax()))
    return text


def _reason(error: ConfigError, folder: str) -> str:
    text = str(error).removeprefix(f"{folder}: ").partition(" docs/models.md")[0]
    return _short(text.partition("cannot be served: ")[2] or text)


def _short(text: str) -> str:
    """Without figures, which the next machine rounds otherwise."""
    text = re.sub(r".* for validator '\w+': ", "", text)
    text = re.sub(r" \([^()]*\d[^()]*\)", "", text).rstrip(".").replace("|", "/").replace("`", "")
    return textwrap.shorten(text, 160, placeholder=" …")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])


_BEGIN = "<!-- written by python -m benchmarks.families -->\n"


def documented(text: str) -> tuple[str, dict[str, Row]]:
    """The version of transformers, and the rows, that the document's table is of."""
    _, _, table = text.partition(_BEGIN)
    version = re.search(r"transformers (\S+):", table)
    rows = (
        Row(*(cell.strip() for cell in line[1:-1].replace("`", "").split("|")))
        for line in table.splitlines()
        if line.startswith("| `")
    )
    return version[1] if version else "", {row.model_type: row for row in rows}


def with_table(text: str, rows: Sequence[Row]) -> str:
    """The document with another table."""
    counts = Counter(row.way for row in rows)
    summary = ", ".join(f"{counts[way]} {way}" for way in WAYS)
    lines = [f"| `{row.model_type}` | {row.way} | {row.note} |" for row in rows]
    return "\n".join(
        [
            text.partition(_BEGIN)[0] + _BEGIN,
            f"transformers {transformers.__version__}: {summary}.\n",
            "| model type | runs as | |",
            "|---|---|---|",
            *lines,
            "",
        ]
    )


def main() -> None:
    """Try the families that are named, or all and write the document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model_types", nargs="*", choices=[[], *FAMILIES], metavar="MODEL_TYPE")
    named = parser.parse_args().model_types
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    rows = []
    for model_type in named or FAMILIES:
        rows.append(row := try_family(model_type))
        print(f"{row.model_type}: {row.way}{row.note and ': '}{row.note}", flush=True)
    if not named:
        DOCUMENT.write_text(with_table(DOCUMENT.read_text("utf-8"), rows), "utf-8")


if __name__ == "__main__":
    main()
