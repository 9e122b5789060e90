"""docs/models.md says of every causal family of transformers what becomes of it here."""

from __future__ import annotations

import pytest
import transformers

from benchmarks.families import (
    BATCHED,
    DOCUMENT,
    FAMILIES,
    ONE_BY_ONE,
    Row,
    documented,
    try_family,
    with_table,
)

VERSION, ROWS = documented(DOCUMENT.read_text("utf-8"))

# Learned positions with an offset, alibi, local attention, partial RoPE, soft caps, experts, …
HANDFUL = ("bloom", "falcon", "gemma2", "gpt2", "gpt_neo", "mamba", "mixtral", "mpt", "opt", "phi")

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about its own models


@pytest.mark.parametrize("model_type", HANDFUL)
def test_a_family_runs_as_the_table_says(model_type: str) -> None:
    assert try_family(model_type) == ROWS[model_type]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [f for f in FAMILIES if f not in HANDFUL])
def test_every_other_family_runs_as_the_table_says(model_type: str) -> None:
    row = try_family(model_type)

    assert row == ROWS.get(model_type), "run python -m benchmarks.families"


def test_the_table_has_every_family_of_the_transformers_it_is_of() -> None:
    if transformers.__version__ == VERSION:
        assert set(ROWS) == set(FAMILIES)
    assert sum(row.way in (BATCHED, ONE_BY_ONE) for row in ROWS.values()) > 100


def test_a_written_table_is_read_back() -> None:
    rows = [Row("opt", BATCHED), Row("mamba", "refused", "it keeps a state")]

    text = with_table(DOCUMENT.read_text("utf-8"), rows)

    assert documented(text) == (transformers.__version__, {row.model_type: row for row in rows})
    assert with_table(text, rows) == text
