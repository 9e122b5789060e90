"""GGUF files, written here as llama.cpp's converter does, against the models they came from."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import AutoConfig

from serve.checkpoint.gguf_header import GGUFArray
from serve.errors import ConfigError
from serve.models.families import read_spec
from serve.models.rope import llama3_frequencies
from serve.models.spec import Llama3Scaling
from serve.models.weights.checkpoint import open_checkpoint
from serve.models.weights.footprint import read_footprint
from serve.models.weights.gguf_config import as_transformers_config, make_gguf_config
from serve.models.weights.gguf_file import read_gguf_model
from tests.checkpoint import gguf_bytes
from tests.tiny_models import PagedRun, full_logits, load, make_config, make_model, random_tokens

TOKENS = random_tokens(19, seed=7)
QUANTIZABLE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # whole blocks of 32

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def _gguf_name(hf_name: str, architecture: str) -> str:
    stem, suffix = hf_name.rsplit(".", 1)
    names = NAMES | GEMMA_NAMES if architecture == "gemma3" else NAMES
    if stem in names:
        return f"{names[stem]}.{suffix}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{names[part]}.{suffix}"


def _permuted(weight: Tensor, num_heads: int) -> Tensor:
    """llama.cpp's order: the two halves of each head interleaved."""
    halves = weight.unflatten(0, (num_heads, 2, -1))
    return halves.transpose(1, 2).reshape(weight.shape)


def write_gguf(
    file: Path,
    hf_model: Any,
    architecture: str,
    kind: Kind = Kind.F32,
    settings: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    **split: Any,
) -> None:
    """Write a model as llama.cpp would; `settings` are added under the architecture's prefix.
    `split` are GGUFWriter's options for a model in several parts."""
    config = hf_model.config
    writer = gguf.GGUFWriter(file, architecture, **split)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_token_list([f"token{i}" for i in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
    for name, value in (settings or {}).items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        add[type(value)](f"{architecture}.{name}", value)
    tied = config.tie_word_embeddings
    for name, parameter in hf_model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        value = parameter
        if architecture == "llama" and "q_proj" in name:
            value = _permuted(value, config.num_attention_heads)
        if architecture == "llama" and "k_proj" in name:
            value = _permuted(value, config.num_key_value_heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        data = value.numpy()
        own = kind if data.ndim > 1 else Kind.F32
        writer.add_tensor(
            _gguf_name(name, architecture), gguf.quants.quantize(data, own), raw_dtype=own
        )
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _logits(file: Path) -> Tensor:
    return PagedRun(load(file), [TOKENS]).run([[6], [1]])[0]


@pytest.mark.parametrize(
    ("architecture", "model_type", "config", "settings"),
    [
        ("llama", "llama", {}, {"rope.freq_base": 10000.0}),
        ("llama", "llama", {"tie_word_embeddings": True}, {}),
        ("qwen2", "qwen2", {}, {}),
        ("qwen3", "qwen3", {}, {}),
        (
            "gemma3",
            "gemma3_text",
            {"sliding_window_pattern": 6, "query_pre_attn_scalar": 8, "num_hidden_layers": 7},
            {"rope.freq_base": 1e6, "attention.sliding_window": 4},
        ),
    ],
)
def test_every_architecture_gives_the_logits_of_the_model_it_was_made_from(
    tmp_path: Path,
    architecture: str,
    model_type: str,
    config: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    hf_model = make_model(make_config(model_type, **config))
    write_gguf(tmp_path / "m.gguf", hf_model, architecture, settings=settings)

    assert (_logits(tmp_path / "m.gguf") - full_logits(hf_model, TOKENS)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1])
def test_quantized_weights_count_as_what_they_stand_for(tmp_path: Path, kind: Kind) -> None:
    hf_model = make_model(make_config("llama", **QUANTIZABLE))
    write_gguf(tmp_path / "m.gguf", hf_model, "llama", kind)
    for parameter in hf_model.parameters():
        if parameter.ndim > 1:
            stored = gguf.quants.dequantize(
                gguf.quants.quantize(parameter.detach().numpy(), kind), kind
            )
            parameter.data = torch.from_numpy(np.array(stored))

    # q and k are quantized in llama.cpp's row order, which moves whole rows and so no values.
    assert (_logits(tmp_path / "m.gguf") - full_logits(hf_model, TOKENS)).abs().max() < 1e-4


def test_what_the_file_says_is_in_the_config(tmp_path: Path) -> None:
    hf_model = make_model(make_config("llama"))
    write_gguf(tmp_path / "m.gguf", hf_model, "llama", Kind.F16, {"rope.freq_base": 5000.0})

    checkpoint = open_checkpoint(tmp_path / "m.gguf", "auto")

    config = checkpoint.hf_config
    assert checkpoint.format == "gguf"
    assert checkpoint.dtype == torch.float16
    assert config.vocab_size == 97
    assert config.eos_token_id == 2
    assert config.max_position_embeddings == 64
    assert config.rope_parameters == {"rope_theta": 5000.0, "rope_type": "default"}
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("settings", "rope"),
    [
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 2.0,
                "rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_ops_15_rope_scaling_in_a_gguf_file_is_not_dropped(
    tmp_path: Path, settings: dict[str, Any], rope: dict[str, Any]
) -> None:
    hf_model = make_model(make_config("qwen2", rope_parameters={"rope_theta": 10000.0, **rope}))
    write_gguf(tmp_path / "m.gguf", hf_model, "qwen2", settings=settings)

    assert (_logits(tmp_path / "m.gguf") - full_logits(hf_model, TOKENS)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 4.0}, 4.0),  # the key of old files
        ({"rope.scale_linear": 4.0, "rope.scaling.factor": 2.0}, 2.0),
        ({"rope.scale_linear": 4.0, "rope.scaling.factor": 0.0}, 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
        ({"rope.scaling.type": "linear"}, 1.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, 1.0),
        ({"rope.scaling.factor": 0.0}, 1.0),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 0.0}, 1.0),
    ],
)
def test_mdl_41_a_rope_factor_without_a_type_is_linear_and_0_means_none(
    tmp_path: Path, settings: dict[str, Any], factor: float
) -> None:
    rope = {"rope_theta": 10000.0, "rope_type": "linear", "factor": factor}
    hf_model = make_model(make_config("llama", rope_parameters=rope))
    write_gguf(tmp_path / "m.gguf", hf_model, "llama", settings=settings)

    ours = load(tmp_path / "m.gguf")

    logits = PagedRun(ours, [TOKENS]).run([[6], [1]])[0]
    assert (logits - full_logits(hf_model, TOKENS)).abs().max() < 1e-4
    assert ours.max_position == 64 * factor


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -2.0, 0.5])
def test_mdl_41_an_impossible_rope_factor_is_refused(tmp_path: Path, factor: float) -> None:
    settings = {"rope.scaling.factor": factor}
    write_gguf(tmp_path / "m.gguf", make_model(make_config("llama")), "llama", settings=settings)

    with pytest.raises(ConfigError, match=r"m\.gguf.*factor must be at least 1 and finite"):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize("first_is_small", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_mdl_42_a_split_model_equals_the_whole_one(
    tmp_path: Path, first_is_small: bool, tied: bool
) -> None:
    hf_model = make_model(make_config("llama", tie_word_embeddings=tied))
    options = {"split_max_tensors": 5, "small_first_shard": first_is_small}
    write_gguf(tmp_path / "x.gguf", hf_model, "llama", Kind.F16, **options)
    parts = sorted(tmp_path.glob("x-*.gguf"))
    write_gguf(tmp_path / "whole.gguf", hf_model, "llama", Kind.F16)

    checkpoint = open_checkpoint(parts[0], "auto")

    assert len(parts) > 5
    assert checkpoint.files == tuple(parts)
    whole = open_checkpoint(tmp_path / "whole.gguf", "auto")
    assert checkpoint.hf_config.to_dict() == whole.hf_config.to_dict()
    assert checkpoint.tensor_names() == whole.tensor_names()
    assert torch.equal(_logits(parts[0]), _logits(tmp_path / "whole.gguf"))
    footprints = [
        read_footprint(
            open_checkpoint(path, "dummy"),
            dtype=torch.float32,
            compute_dtype=torch.float32,
            is_packed=True,
            impl="auto",
        )
        for path in (parts[0], tmp_path / "whole.gguf")
    ]
    assert footprints[0] == footprints[1]

    parts[3].unlink()
    for load_format in ("auto", "dummy"):
        with pytest.raises(ConfigError, match=f"{parts[3].name}: this part is missing"):
            open_checkpoint(parts[0], load_format)
    with pytest.raises(ConfigError, match=f"name its first part, {parts[0].name}"):
        open_checkpoint(parts[1], "auto")


def test_mdl_42_a_cut_part_is_named(tmp_path: Path) -> None:
    hf_model = make_model(make_config("llama"))
    write_gguf(tmp_path / "x.gguf", hf_model, "llama", split_max_tensors=9)
    *_, last = sorted(tmp_path.glob("x-*.gguf"))
    last.write_bytes(last.read_bytes()[:-64])

    with pytest.raises(ConfigError, match=f"{last.name}: the file is cut short"):
        open_checkpoint(tmp_path, "auto")


def _divisors(scaling: Llama3Scaling, head_dim: int) -> np.ndarray:
    plain = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2) / head_dim)
    return (plain / llama3_frequencies(plain, scaling)).numpy().astype(np.float32)


def test_ops_15_llama_3_frequencies_stored_as_divisors_are_understood(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    hf_model = make_model(make_config("llama", head_dim=64, rope_parameters=rope))
    divisors = _divisors(Llama3Scaling(8.0, 1.0, 4.0, 8192), 64)
    write_gguf(tmp_path / "m.gguf", hf_model, "llama", extra={"rope_freqs.weight": divisors})

    assert (_logits(tmp_path / "m.gguf") - full_logits(hf_model, TOKENS)).abs().max() < 1e-4


def test_ops_15_divisors_of_another_kind_are_refused(tmp_path: Path) -> None:
    hf_model = make_model(make_config("llama"))
    divisors = np.array([1.0, 3.0, 2.0, 8.0], dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", hf_model, "llama", extra={"rope_freqs.weight": divisors})

    with pytest.raises(ConfigError, match="RoPE divisors"):
        open_checkpoint(tmp_path / "m.gguf", "auto")


def test_ops_15_an_unknown_rope_kind_in_a_gguf_file_is_refused(tmp_path: Path) -> None:
    hf_model = make_model(make_config("llama"))
    write_gguf(tmp_path / "m.gguf", hf_model, "llama", settings={"rope.scaling.type": "spiral"})

    with pytest.raises(ConfigError, match="'spiral'"):
        open_checkpoint(tmp_path / "m.gguf", "auto")


@pytest.mark.parametrize(
    ("architecture", "settings", "complaint"),
    [
        ("mamba", {}, "'mamba' cannot be served"),
        ("llama", {"expert_count": 8}, "'llama with experts' cannot be served"),
        ("llama", {"attention.key_length": 16}, "part of a head"),
    ],
)
def test_files_that_cannot_be_served_are_refused_by_name(
    tmp_path: Path, architecture: str, settings: dict[str, Any], complaint: str
) -> None:
    hf_model = make_model(make_config("llama"))
    write_gguf(tmp_path / "m.gguf", hf_model, architecture, settings=settings)

    with pytest.raises(ConfigError, match=complaint) as caught:
        open_checkpoint(tmp_path / "m.gguf", "auto")

    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"attention.head_count": 0}, "settings cannot be used"),
        ({"attention.head_count_kv": 0}, "num_key_value_heads is 0"),
        ({"block_count": "two"}, "num_hidden_layers"),
        ({"context_length": 0}, "max_position_embeddings is 0"),
        ({"rope.freq_base": "large"}, "settings cannot be used"),
    ],
)
def test_ops_13_impossible_settings_of_a_gguf_file_are_one_clear_line(
    tmp_path: Path, settings: dict[str, Any], complaint: str
) -> None:
    write_gguf(tmp_path / "m.gguf", make_model(make_config("llama")), "llama", settings=settings)

    with pytest.raises(ConfigError, match=complaint) as caught:
        open_checkpoint(tmp_path / "m.gguf", "auto")

    assert "m.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_quantization_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.attn_rot_embd.weight": np.zeros(3, dtype=np.int32)}
    write_gguf(tmp_path / "m.gguf", make_model(make_config("llama")), "llama", extra=extra)

    with pytest.raises(ConfigError, match=r"attn_rot_embd\.weight is quantized as I32"):
        load(tmp_path / "m.gguf")


def test_ops_13_a_header_of_arrays_in_arrays_is_refused(tmp_path: Path) -> None:
    key = struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    nested = key + struct.pack("<IQ", 9, 1) * 5000
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + nested)

    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        open_checkpoint(tmp_path / "m.gguf", "auto")


def test_a_tensor_nobody_knows_is_refused(tmp_path: Path) -> None:
    hf_model = make_model(make_config("llama"))
    extra = {"blk.0.attn_rot_embd.weight": np.zeros(3, dtype=np.float32)}
    write_gguf(tmp_path / "m.gguf", hf_model, "llama", extra=extra)

    with pytest.raises(ConfigError, match=r"blk\.0\.attn_rot_embd\.weight has no place"):
        load(tmp_path / "m.gguf")


def test_ops_13_every_truncation_of_a_gguf_file_is_one_clear_line(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, make_model(make_config("llama")), "llama", Kind.F16)
    content = whole.read_bytes()
    cut = tmp_path / "cut.gguf"

    for length in [0, 3, 4, 12, 30, *range(40, len(content) - 1, len(content) // 60)]:
        cut.write_bytes(content[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf.*download it again") as caught:
            open_checkpoint(cut, "auto")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (gguf_bytes.tensor("t", 8, 0), "'t' has a dimension of 0"),
        (gguf_bytes.tensor("t", 8, kind=999), "999 is not a valid"),
        (gguf_bytes.tensor("t", 8, 3, kind=8), "'t' does not fill its blocks"),
        (gguf_bytes.tensor("t", 2**62, 2**62), "the file is cut short"),
        (gguf_bytes.tensor("t", 8, offset=2**62), "the file is cut short"),
    ],
)
def test_sec_51_impossible_tensors_are_one_clear_line(
    tmp_path: Path, entry: bytes, complaint: str
) -> None:
    file = gguf_bytes.write(tmp_path / "m.gguf", tensors=[entry], data=bytes(99))

    with pytest.raises(ConfigError, match=complaint) as caught:
        open_checkpoint(file, "auto")

    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"GGUF" + b"\xff" * 60, b"PK\x03\x04" * 20, b"GGUF" * 20])
def test_ops_13_something_else_called_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)

    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        open_checkpoint(tmp_path / "m.gguf", "auto")


def test_a_folder_with_one_gguf_file_means_that_file(tmp_path: Path) -> None:
    hf_model = make_model(make_config("llama"))
    write_gguf(tmp_path / "m.gguf", hf_model, "llama")

    assert open_checkpoint(tmp_path, "auto").path == tmp_path / "m.gguf"
    assert open_checkpoint(tmp_path, "dummy").format == "dummy"
    with pytest.raises(ConfigError, match="asks for safetensors"):
        open_checkpoint(tmp_path / "m.gguf", "safetensors")

    write_gguf(tmp_path / "n.gguf", hf_model, "llama")
    with pytest.raises(ConfigError, match=r"several \.gguf files \(m\.gguf, n\.gguf\)"):
        open_checkpoint(tmp_path, "auto")


def test_a_gguf_file_can_run_as_transformers_model(tmp_path: Path) -> None:
    hf_model = make_model(make_config("llama", tie_word_embeddings=True))
    write_gguf(tmp_path / "m.gguf", hf_model, "llama")

    found = PagedRun(load(tmp_path / "m.gguf", "transformers"), [TOKENS]).run([])[0]

    assert (found - full_logits(hf_model, TOKENS)).abs().max() < 1e-4


def test_the_header_reader_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, make_model(make_config("llama", **QUANTIZABLE)), "llama", Kind.Q8_0)
    theirs = gguf.GGUFReader(file)

    ours = read_gguf_model(file)

    assert {t.name: (t.shape, t.kind, t.start) for t in ours.tensors} == {
        t.name: (tuple(map(int, t.shape[::-1])), t.tensor_type, t.data_offset)
        for t in theirs.tensors
    }
    for name, value in ours.settings.items():
        read = value.read() if isinstance(value, GGUFArray) else value
        assert read == theirs.fields[name].contents()


@pytest.mark.parametrize("windowed", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_the_config_says_what_transformers_class_would_say(
    tmp_path: Path, model_type: str, windowed: bool
) -> None:
    values: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    }
    if model_type == "gemma3_text":
        rope = values.pop("rope_parameters")
        values["rope_parameters"] = {"full_attention": rope, "sliding_attention": rope}
        values["query_pre_attn_scalar"] = 16
    if windowed and model_type != "llama":
        values["sliding_window"] = 4

    ours = make_gguf_config(tmp_path, model_type, values)

    theirs = as_transformers_config(ours)
    made_by_them = AutoConfig.for_model(model_type, **values)
    assert theirs.to_dict() == made_by_them.to_dict()
    assert {name: getattr(made_by_them, name) for name in vars(ours)} == vars(ours)
    assert read_spec(ours, tmp_path) == read_spec(made_by_them, tmp_path)


def test_a_gguf_models_config_is_made_without_transformers(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_model(make_config("llama")), "llama")
    code = f"""
import sys
from pathlib import Path
from serve.models.registry import read_spec
from serve.models.weights.checkpoint import open_checkpoint
read_spec(open_checkpoint(Path({str(tmp_path)!r}) / "m.gguf", "auto").hf_config, Path())
sys.exit(bool({{"transformers", "torch.distributed.tensor"}} & sys.modules.keys()))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
