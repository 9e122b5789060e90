"""Sizes that a config may name, under every family's name for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve.checkpoint.sizes import LIMITS, check_sizes
from serve.errors import ConfigError

FILE = Path("config.json")


@pytest.mark.parametrize("name", LIMITS)
def test_sec_49_every_size_has_a_least_and_a_most(name: str) -> None:
    least, most = LIMITS[name]
    for value in (least, most, None, [least, most], [None, most]):
        check_sizes(FILE, {name: value})
    for wrong in (least - 1, -(2**40), 2.0, 1e9, "8", True, {}):
        with pytest.raises(ConfigError, match=f"^config.json: {name} is .* must be"):
            check_sizes(FILE, {name: wrong})
    for large in (most + 1, 10**9 * most, [least, most + 1]):
        with pytest.raises(ConfigError, match=f"{name} is .* at most {most} can"):
            check_sizes(FILE, {name: large})


@pytest.mark.parametrize(
    "wrap",
    [
        lambda c: {"text_config": c},
        lambda c: {"thinker_config": {"text_config": c}},
        lambda c: {"decoder": c},
    ],
)
def test_sec_49_parts_of_a_config_are_checked_too(wrap: Any) -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers is 1000000000, and at most"):
        check_sizes(FILE, wrap({"num_hidden_layers": 10**9}))
    check_sizes(FILE, wrap({"num_hidden_layers": 80, "quantization_config": {"bits": -1}}))


def test_what_published_models_have_passes() -> None:
    check_sizes(
        FILE,
        {
            "vocab_size": 1_000_000,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "hidden_size": 16_384,
            "intermediate_size": 53_248,
            "n_routed_experts": 768,
            "max_position_embeddings": 10_485_760,
            "num_local_experts": 0,
            "q_lora_rank": None,
        },
    )
