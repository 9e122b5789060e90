"""Loading: tied embeddings, dtypes, and one clear line for every way a folder can be broken."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve.errors import ConfigError
from serve.kernels import reference
from serve.models.registry import build_model, head_dims
from serve.models.weights.checkpoint import open_checkpoint
from tests.tiny_models import PagedRun, full_logits, load, random_tokens, save_model

TOKENS = random_tokens(11, seed=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path)
    return tmp_path


def _edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def _edit_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _shard(folder: Path) -> list[Path]:
    """Split model.safetensors into two files with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {}
    for file, part in zip(files, (names[::2], names[1::2]), strict=True):
        save_file({n: weights[n] for n in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return [folder / file for file in files]


def _logits(folder: Path) -> Tensor:
    return PagedRun(load(folder, "native"), [TOKENS]).run([])[0]


def test_a_sharded_checkpoint_equals_a_single_file(folder: Path) -> None:
    expected = _logits(folder)

    _shard(folder)

    assert torch.equal(_logits(folder), expected)


# --- tied embeddings -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["tied", "tied with a redundant head", "head only", "untied"])
def test_ops_14_every_form_of_tied_and_untied_embeddings_equals_transformers(
    tmp_path: Path, form: str
) -> None:
    hf_model = save_model(tmp_path, tie_word_embeddings=form != "untied")
    if form == "tied with a redundant head":
        _edit_weights(
            tmp_path,
            lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}),
        )
    if form == "head only":
        _edit_weights(
            tmp_path, lambda w: w.update({"lm_head.weight": w.pop("model.embed_tokens.weight")})
        )

    assert (_logits(tmp_path) - full_logits(hf_model, TOKENS)).abs().max() < 1e-4


def test_ops_14_a_head_that_differs_from_its_tied_embedding_is_used_as_transformers_does(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    save_model(tmp_path, tie_word_embeddings=True)
    _edit_weights(tmp_path, lambda w: w.update({"lm_head.weight": torch.randn(97, 32)}))

    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")

    assert (_logits(tmp_path) - full_logits(hf_model, TOKENS)).abs().max() < 1e-4


def test_ops_14_an_untied_model_without_a_head_is_refused(folder: Path) -> None:
    _edit_weights(folder, lambda w: w.__delitem__("lm_head.weight"))

    with pytest.raises(ConfigError, match=r"lm_head\.weight is missing"):
        load(folder)


# --- broken folders ------------------------------------------------------------------------------


def _cut_tail(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def _flip_header(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[8:16] = bytes(255 - byte for byte in content[8:16])
    file.write_bytes(content)


def _huge_header(file: Path) -> None:
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [_cut_tail, _flip_header, _huge_header, _empty])
@pytest.mark.parametrize("sharded", [False, True])
def test_ops_13_a_damaged_weight_file_is_named_before_anything_is_loaded(
    folder: Path, damage: Callable[[Path], None], sharded: bool
) -> None:
    file = _shard(folder)[1] if sharded else folder / "model.safetensors"
    damage(file)

    with pytest.raises(ConfigError) as caught:
        open_checkpoint(folder, "auto")

    assert str(file) in str(caught.value)
    assert "download it again" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ops_13_a_missing_shard_is_named(folder: Path) -> None:
    missing = _shard(folder)[0]
    missing.unlink()

    with pytest.raises(ConfigError, match=f"{missing.name}: the file is missing"):
        open_checkpoint(folder, "auto")


@pytest.mark.parametrize(
    "name",
    [
        "../model-00001-of-00002.safetensors",
        "../../model.safetensors",
        "a/../../model.safetensors",
        "/etc/hostname",
        "a\nb",
        "a\0b",
        "a" * 5000,
    ],
)
def test_sec_51_an_index_that_leads_out_of_its_folder_is_named(folder: Path, name: str) -> None:
    (folder / "sub").mkdir()
    shutil.copy(folder / "config.json", folder / "sub")
    weights = {"weight_map": {"lm_head.weight": name}}
    (folder / "sub" / "model.safetensors.index.json").write_text(json.dumps(weights))

    with pytest.raises(ConfigError, match=r"index\.json: it names .*not a file of") as caught:
        open_checkpoint(folder / "sub", "auto")

    assert "\n" not in str(caught.value)


def test_a_part_that_is_a_link_may_lie_anywhere(folder: Path, tmp_path_factory: Any) -> None:
    """As in a hub cache."""
    elsewhere = tmp_path_factory.mktemp("blobs")
    for file in _shard(folder):
        file.rename(elsewhere / file.name)
        file.symlink_to(elsewhere / file.name)

    assert _logits(folder).isfinite().all()


def test_mdl_44_the_single_file_comes_before_an_index_and_that_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _logits(folder)
    whole = (folder / "model.safetensors").read_bytes()
    shards = _shard(folder)
    _edit = load_file(shards[0])
    save_file({n: t + 1 for n, t in _edit.items()}, shards[0], metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(whole)

    assert torch.equal(_logits(folder), expected)
    (warning,) = {r.getMessage() for r in caplog.records if r.levelname == "WARNING"}
    assert "model.safetensors is read" in warning
    assert "index.json beside it" in warning
    assert "\n" not in warning


def _directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _fifo(file: Path) -> None:
    """Opening one waits for a writer, for ever."""
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("put_there", [_directory, _fifo])
def test_ops_13_a_weight_file_that_is_no_file_is_named(
    folder: Path, put_there: Callable[[Path], None]
) -> None:
    put_there(folder / "model.safetensors")

    with pytest.raises(ConfigError, match=r"model\.safetensors: not a file"):
        open_checkpoint(folder, "auto")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"weight_map": 3}',
        "{}",
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": null}}',
        '{"weight_map": {"a": ["b"]}}',
        "[" * 100_000,
    ],
)
def test_ops_13_a_damaged_index_is_named(folder: Path, content: str) -> None:
    _shard(folder)
    (folder / "model.safetensors.index.json").write_text(content)

    with pytest.raises(ConfigError, match=r"index\.json: not a readable index"):
        open_checkpoint(folder, "auto")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{not json", "not valid JSON"),
        ("", "not valid JSON"),
        ("[1]", "no model_type"),
        ("[" * 100_000, "not valid JSON"),
        ('{"model_type": 5}', "no model_type"),
        ('{"hidden_size": 3}', "no model_type"),
        ('{"model_type": "nonesuch"}', "'nonesuch'"),
        ('{"model_type": "llama", "hidden_size": "many"}', "hidden_size is 'many'"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}', "gptq"),
        ('{"model_type": "llama", "quantization_config": {"bits": 4}}', "an unknown method"),
        ('{"model_type": "llama", "quantization_config": "awq"}', "an unknown method"),
    ],
)
def test_ops_13_a_bad_config_is_named(folder: Path, content: str, complaint: str) -> None:
    (folder / "config.json").write_text(content)

    with pytest.raises(ConfigError, match=complaint) as caught:
        open_checkpoint(folder, "auto")

    assert str(folder / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), torch.float32), (float("-inf"), torch.float32), (1e6, torch.float16)],
)
def test_numbers_that_the_serving_dtype_cannot_hold_are_refused(
    folder: Path, value: float, dtype: torch.dtype
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    _edit_weights(folder, lambda w: w[name].__setitem__((3, 4), value))

    with pytest.raises(ConfigError, match=f"{name} has numbers that are not finite"):
        build_model(
            open_checkpoint(folder, "auto"),
            kernels=reference.kernels(),
            dtype=dtype,
            device=torch.device("cpu"),
            impl="auto",
            seed=0,
        )


SIZES_OF_A_CONFIG = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
]


@pytest.mark.parametrize("name", SIZES_OF_A_CONFIG)
@pytest.mark.parametrize("value", [0, -1, 2.5, "many", True])
def test_ops_13_an_impossible_size_in_the_config_is_named(
    folder: Path, name: str, value: object
) -> None:
    _edit_config(folder, **{name: value})

    with pytest.raises(ConfigError, match=name) as caught:
        open_checkpoint(folder, "auto")

    assert str(folder / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SIZES_OF_A_CONFIG)
def test_sec_49_an_absurd_size_in_the_config_is_named(folder: Path, name: str) -> None:
    for value in (2**62, [16, 2**62]):
        _edit_config(folder, **{name: value})
        for load_format in ("auto", "dummy"):
            with pytest.raises(ConfigError, match=rf"config\.json: {name} is {2**62}, and at most"):
                open_checkpoint(folder, load_format)


@pytest.mark.parametrize("window", [0, -4])
def test_ops_13_a_window_that_sees_nothing_is_refused(tmp_path: Path, window: int) -> None:
    save_model(tmp_path, "mistral")
    _edit_config(tmp_path, sliding_window=window)

    with pytest.raises(ConfigError, match=f"sliding_window is {window} and must be positive"):
        load(tmp_path)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int32, torch.bool, torch.complex64]
)
def test_a_tensor_without_floating_point_numbers_is_refused(
    folder: Path, dtype: torch.dtype
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    _edit_weights(folder, lambda w: w.update({name: torch.ones(48, 32, dtype=dtype)}))

    with pytest.raises(ConfigError, match=f"{name} holds {str(dtype)[6:]} numbers"):
        load(folder)


def test_ops_13_missing_things_are_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: no such file or folder"):
        open_checkpoint(folder / "nowhere", "auto")

    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="the folder has no weights"):
        open_checkpoint(folder, "auto")

    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="convert the model to safetensors"):
        open_checkpoint(folder, "auto")

    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: the file is missing"):
        open_checkpoint(folder, "auto")

    with pytest.raises(ConfigError, match="needs"):
        open_checkpoint(folder, "gguf")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), r"up_proj\.weight is missing"),
        (
            lambda w: [w.pop(n) for n in list(w) if n.startswith("model.layers.2.")],
            r"model\.layers\.2\.\S+ and 8 more are missing",
        ),
        (
            lambda w: w.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}),
            r"q_norm\.weight has no place in this llama model",
        ),
        (
            lambda w: w.update({"model.layers.1.self_attn.k_proj.weight": torch.ones(8, 32)}),
            r"k_proj\.weight has shape \[8, 32\], but the config asks for \[16, 32\]",
        ),
    ],
)
def test_missing_unused_and_misshapen_tensors_are_named(
    folder: Path, change: Callable[[dict[str, Tensor]], None], complaint: str
) -> None:
    _edit_weights(folder, change)

    with pytest.raises(ConfigError, match=complaint) as caught:
        load(folder)

    assert str(folder) in str(caught.value)


def test_more_layers_in_the_config_than_in_the_weights_is_an_error(folder: Path) -> None:
    _edit_config(folder, num_hidden_layers=4)

    with pytest.raises(ConfigError, match=r"model\.layers\.3\."):
        load(folder)


def test_stored_rotary_frequencies_of_old_checkpoints_are_left_aside(folder: Path) -> None:
    expected = _logits(folder)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _edit_weights(folder, lambda w: w.update({name: torch.zeros(4)}))

    assert torch.equal(_logits(folder), expected)


# --- dtypes and formats --------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_mdl_03_half_precision_checkpoints_give_fp32_logits_on_a_cpu(
    tmp_path: Path, stored: torch.dtype
) -> None:
    from transformers import AutoModelForCausalLM

    save_model(tmp_path)
    _edit_weights(tmp_path, lambda w: w.update({n: t.to(stored) for n, t in w.items()}))
    _edit_config(tmp_path, dtype=str(stored).removeprefix("torch."))
    hf_model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )

    assert open_checkpoint(tmp_path, "auto").dtype == stored
    assert (_logits(tmp_path) - full_logits(hf_model, TOKENS)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_mdl_03_half_precision_itself_works_on_a_cpu(
    tmp_path: Path, dtype: torch.dtype, model_type: str
) -> None:
    hf_model = save_model(tmp_path, model_type)
    model = build_model(
        open_checkpoint(tmp_path, "auto"),
        kernels=reference.kernels(),
        dtype=dtype,
        device=torch.device("cpu"),
        impl="native",
        seed=0,
    )
    run = PagedRun(model, [TOKENS])
    run.kv = [kv.to(dtype) for kv in run.kv]

    logits = run.run([])[0]

    expected = full_logits(hf_model, TOKENS)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_the_dtype_is_read_from_the_weights_when_the_config_has_none(folder: Path) -> None:
    _edit_weights(folder, lambda w: w.update({n: t.half() for n, t in w.items()}))
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))

    assert open_checkpoint(folder, "auto").dtype == torch.float16


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_dummy_weights_need_the_config_alone_and_depend_on_the_seed(
    tmp_path: Path, model_type: str
) -> None:
    save_model(tmp_path / "whole", model_type)
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "bare")

    models = [
        build_model(
            open_checkpoint(tmp_path / "bare", "dummy"),
            kernels=reference.kernels(),
            dtype=torch.float32,
            device=torch.device("cpu"),
            impl="auto",
            seed=seed,
        )
        for seed in (0, 0, 1)
    ]

    first, again, other = (PagedRun(model, [TOKENS]).run([])[0] for model in models)
    assert first.isfinite().all()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_native_is_refused_where_our_decoder_does_not_know_the_model(tmp_path: Path) -> None:
    save_model(tmp_path, hidden_act="relu")

    with pytest.raises(ConfigError, match="--model-impl transformers"):
        load(tmp_path, "native")
    assert load(tmp_path, "auto").vocab_size == 97


def test_head_sizes_are_known_before_the_model_is_built(folder: Path) -> None:
    assert head_dims(open_checkpoint(folder, "auto")) == {8}
