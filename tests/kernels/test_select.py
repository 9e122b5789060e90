"""Which kernels are chosen, and the sentence that says why."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from serve.errors import ConfigError
from serve.kernels import cpu, reference, select
from serve.kernels.base import BackendLimits, Kernels
from serve.kernels.select import select_kernels

ANY: dict[str, Any] = {"dtype": torch.float32, "head_dims": {64}, "block_size": 16}


class LimitedAttention(reference.ReferenceAttention):
    """Stands for kernels that can do less than the reference."""

    name = "limited"
    limits = BackendLimits(dtypes=("float32",), head_dims=(64,), block_sizes=(16, 32))


def limited_kernels(num_threads: int | None = None, quantization: str | None = None) -> Kernels:
    return dataclasses.replace(reference.kernels(), name="cpu", attention=LimitedAttention())


def no_compiler(num_threads: int | None = None, quantization: str | None = None) -> Kernels:
    raise ConfigError("there is no C++ compiler")


def test_the_devices_own_kernels_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_kernels", limited_kernels)

    kernels, why = select_kernels("cpu", "auto", **ANY)

    assert kernels.attention.name == "limited"
    assert why == "cpu kernels, the fastest for device cpu"


def test_threads_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []

    def record(num_threads: int | None = None, quantization: str | None = None) -> Kernels:
        seen.append(num_threads)
        return limited_kernels()

    monkeypatch.setattr(cpu, "cpu_kernels", record)

    select_kernels("cpu", "auto", num_threads=3, **ANY)

    assert seen == [3]


def test_without_a_compiler_the_reference_runs_and_the_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "cpu_kernels", no_compiler)

    kernels, why = select_kernels("cpu", "auto", **ANY)

    assert kernels.name == "reference"
    assert "no C++ compiler" in why


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"dtype": torch.bfloat16}, "dtype bfloat16"),
        ({"head_dims": {64, 80}}, r"head size \[80\]"),
        ({"block_size": 8}, "block-size 8"),
    ],
)
def test_kernels_that_cannot_serve_the_model_are_passed_over_or_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], complaint: str
) -> None:
    monkeypatch.setattr(cpu, "cpu_kernels", limited_kernels)

    kernels, why = select_kernels("cpu", "auto", **ANY | asked)

    assert kernels.name == "reference"
    assert complaint.strip("r").replace("\\", "") in why
    with pytest.raises(ConfigError, match=complaint):
        select_kernels("cpu", "cpu", **ANY | asked)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_users_choice_is_taken(device: str) -> None:
    kernels, why = select_kernels(device, "reference", **ANY)

    assert kernels.name == "reference"
    assert "--attention-backend" in why


@pytest.mark.parametrize(
    ("device", "override", "complaint"),
    [
        ("cpu", "triton", "need a GPU"),
        ("cuda", "cpu", "cannot run on device cuda"),
        ("cpu", "flash", "no such backend"),
    ],
)
def test_an_impossible_choice_is_refused(device: str, override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        select_kernels(device, override, **ANY)


def test_a_package_that_cannot_be_imported_is_a_reason() -> None:
    with pytest.raises(ConfigError, match="nonesuch cannot be imported"):
        select._load("serve.kernels.nonesuch", "kernels")


def test_batch_invariance_is_asked_of_the_kernels_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def record(*, batch_invariant: bool) -> Kernels:
        seen.append(batch_invariant)
        return dataclasses.replace(reference.kernels(), name="triton")

    monkeypatch.setattr(select, "_load", lambda module, name: record)

    _, why = select_kernels("cuda", "auto", batch_invariant=True, **ANY)
    assert "batch-invariant" in why
    _, why = select_kernels("cuda", "auto", **ANY)
    assert "batch-invariant" not in why
    assert seen == [True, False]


def test_cpu_kernels_are_batch_invariant_as_they_are() -> None:
    kernels, why = select_kernels("cpu", "reference", batch_invariant=True, **ANY)
    assert kernels.name == "reference"
    assert "batch-invariant" in why


@pytest.mark.parametrize("override", ["auto", "reference"])
def test_batch_invariance_never_falls_back_to_products_that_are_not(
    override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_triton(module: str, name: str) -> Any:
        raise ConfigError("there is no triton")

    monkeypatch.setattr(select, "_load", no_triton)

    with pytest.raises(ConfigError, match=r"--batch-invariant: .*--attention-backend triton"):
        select_kernels("cuda", override, batch_invariant=True, **ANY)


def test_the_cpu_kernels_refuse_an_eight_bit_cache_by_name_and_auto_takes_the_reference() -> None:
    narrow = {**ANY, "cache_dtype": torch.float8_e4m3fn}

    kernels, why = select_kernels("cpu", "auto", **narrow)

    assert kernels.name == "reference"
    assert "not in float8_e4m3fn (--kv-cache-dtype)" in why
    with pytest.raises(ConfigError, match=r"the cpu kernels keep .* --attention-backend reference"):
        select_kernels("cpu", "cpu", **narrow)


def test_a_cache_in_the_models_own_dtype_is_no_extra_wish() -> None:
    same = {**ANY, "cache_dtype": torch.float32}

    assert (
        select_kernels("cpu", "auto", **same)[0].name
        == select_kernels("cpu", "auto", **ANY)[0].name
    )


@pytest.mark.parametrize(
    ("device_type", "override"),
    [("cuda", "auto"), ("cuda", "triton"), ("cpu", "reference"), ("cpu", "triton")],
)
def test_quantization_is_refused_where_it_would_be_ignored(device_type: str, override: str) -> None:
    with pytest.raises(ConfigError, match="--quantization int8: only the cpu kernels"):
        select_kernels(device_type, override, quantization="int8", **ANY)


def test_quantization_does_not_fall_back_on_kernels_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "cpu_kernels", no_compiler)

    with pytest.raises(ConfigError, match="no C"):
        select_kernels("cpu", "auto", quantization="int8", **ANY)


def test_quantization_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def record(num_threads: int | None = None, quantization: str | None = None) -> Kernels:
        seen.append(quantization)
        return limited_kernels()

    monkeypatch.setattr(cpu, "cpu_kernels", record)

    select_kernels("cpu", "auto", quantization="int8", **ANY)

    assert seen == ["int8"]
