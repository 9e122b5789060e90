"""RoPE kinds against transformers, below and above the original context length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve.errors import ConfigError
from serve.models.families import read_spec
from serve.models.rope import KINDS, read_rope, scaled_max_position
from serve.models.spec import LinearScaling
from serve.models.weights.checkpoint import open_checkpoint
from tests.tiny_models import PagedRun, full_logits, load, random_tokens, save_model

ORIGINAL = 24
SHORT, LONG = random_tokens(ORIGINAL - 4, seed=5), random_tokens(2 * ORIGINAL - 3, seed=6)

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"factor": 2.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {
        "factor": 2.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 2.5, 3.0],
        "original_max_position_embeddings": ORIGINAL,
    },
}


def _write(folder: Path, kind: str, style: str, model_type: str = "llama") -> None:
    """A tiny model whose config.json names the kind in one of the three ways found in the wild."""
    save_model(folder, model_type, max_position_embeddings=ORIGINAL)
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters")
    if style == "rope_parameters":
        rope = {"rope_type": kind, "rope_theta": 500.0, **SCALINGS[kind]}
        config["rope_parameters"] = rope
    else:
        config["rope_theta"] = 500.0
        config["rope_scaling"] = {style: kind, **SCALINGS[kind]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", ["type", "rope_type", "rope_parameters"])
def test_ops_15_every_kind_and_spelling_equals_transformers(
    tmp_path: Path, kind: str, style: str
) -> None:
    from transformers import AutoModelForCausalLM

    _write(tmp_path, kind, style)
    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    model = load(tmp_path, "native")

    for tokens in (SHORT, LONG) if kind != "default" else (SHORT,):
        found = PagedRun(model, [tokens]).run([])[0]
        assert (found - full_logits(hf_model, tokens)).abs().max() < 1e-4
    assert bool(model.prompt_limits) == model.needs_prompt_lens == (kind in ("dynamic", "longrope"))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_chunks_and_neighbours_do_not_change_rotations_that_depend_on_length(
    tmp_path: Path, kind: str
) -> None:
    _write(tmp_path, kind, "rope_type")
    model = load(tmp_path)
    assert model.needs_prompt_lens
    assert model.prompt_limits == [(ORIGINAL, kind == "dynamic")]

    whole = [PagedRun(model, [tokens]).run([])[0] for tokens in (SHORT, LONG)]
    mixed = PagedRun(model, [SHORT, LONG]).run([[7, 3], [1, 20], [9, 1]])

    for expected, found in zip(whole, mixed, strict=True):
        assert (expected - found).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("kind", "claimed"),
    [("default", 24), ("linear", 48), ("dynamic", 48), ("llama3", 48), ("yarn", 48)],
)
def test_ops_15_the_context_length_counts_the_factor_in(
    tmp_path: Path, kind: str, claimed: int
) -> None:
    _write(tmp_path, kind, "type")

    assert load(tmp_path, load_format="dummy").max_position == claimed


def test_a_context_length_that_already_counts_the_factor_is_kept() -> None:
    for kind in ("llama3", "yarn", "longrope"):
        assert scaled_max_position({"rope_type": kind, **SCALINGS[kind]}, 48) == 48


@pytest.mark.parametrize("style", ["type", "rope_type", "rope_parameters"])
def test_ops_15_an_unknown_kind_is_refused_by_name(tmp_path: Path, style: str) -> None:
    save_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("rope_parameters")
    if style == "rope_parameters":
        config["rope_parameters"] = {"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0}
    else:
        config["rope_scaling"] = {style: "spiral", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ConfigError, match="'spiral'"):
        load(tmp_path)


def test_gemma3_scales_its_global_layers_only_and_keeps_its_context_length(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_model(tmp_path, "gemma3_text")
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("rope_parameters")
    scaling = {"rope_type": "linear", "factor": 8.0}
    config |= {"rope_theta": 900.0, "rope_local_base_freq": 100.0, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    model = load(tmp_path, "native")

    found = PagedRun(model, [LONG]).run([[10]])[0]

    assert (found - full_logits(hf_model, LONG)).abs().max() < 1e-4
    assert model.max_position == 64
    spec = read_spec(open_checkpoint(tmp_path, "auto").hf_config, tmp_path)
    assert spec is not None
    assert [layer.rope.scaling for layer in spec.layers] == [None, LinearScaling(8.0), None]


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({"rope_type": "linear"}, "lacks 'factor'"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be at least 1"),
        ({"rope_type": "linear", "factor": "two"}, "is wrong"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "needs 4 factors"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": 0}, "rope_theta must be a positive number"),
        ({"rope_theta": -1e4}, "rope_theta must be a positive number"),
        ({"rope_theta": float("nan")}, "rope_theta must be a positive number"),
    ],
)
def test_incomplete_or_impossible_settings_are_named(
    parameters: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_rope({"rope_theta": 1e4, **parameters}, head_dim=8, max_position=64)


def test_yarn_takes_its_less_common_settings_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    rope = {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    }
    save_model(tmp_path, rope_parameters=rope)
    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")

    found = PagedRun(load(tmp_path), [LONG]).run([])[0]

    assert (found - full_logits(hf_model, LONG)).abs().max() < 1e-4
