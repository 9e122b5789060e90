"""Which kernels run on a device: decided once, with the reason as a sentence for the log."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from serve.errors import ConfigError
from serve.kernels import reference
from serve.kernels.base import BackendLimits, Kernels

_INVARIANT = "; batch-invariant: a token's bits do not depend on what shares its step"


def select_kernels(
    device_type: str,
    override: str,
    *,
    dtype: torch.dtype,
    head_dims: set[int],
    block_size: int,
    num_threads: int | None = None,
    batch_invariant: bool = False,
    cache_dtype: torch.dtype | None = None,
    quantization: str | None = None,
) -> tuple[Kernels, str]:
    """The kernels for a device ("cpu" or "cuda") and one sentence that says why these.

    `override` is the user's choice (`--attention-backend`), or "auto"; `cache_dtype` is the KV
    cache's, if it is not `dtype`; `quantization` is of the weights. Raises ConfigError when the
    choice cannot serve this device, dtypes, head dims or block size, or not batch-invariantly.
    """
    check_quantization(quantization, device_type, override)
    candidates: dict[str, Callable[[], Kernels]] = {
        "cpu": lambda: _cpu(device_type, num_threads, quantization),
        "triton": lambda: _triton(device_type, batch_invariant),
        "flashinfer": lambda: _flashinfer(device_type, batch_invariant),
        "reference": lambda: _reference(device_type, batch_invariant),
    }
    invariant = _INVARIANT if batch_invariant else ""
    if device_type == "cuda" and override != "reference":
        _check_toolchain()
    if override != "auto" and override not in candidates:
        raise ConfigError(
            f"--attention-backend {override}: no such backend; choose from auto, "
            + ", ".join(sorted(candidates))
        )
    if override != "auto":
        kernels = candidates[override]()
        _check(kernels, dtype, head_dims, block_size, cache_dtype)
        why = f"{kernels.name} kernels, because --attention-backend asks for them"
        return kernels, why + invariant

    preferred = "triton" if device_type == "cuda" else "cpu"
    try:
        kernels = candidates[preferred]()
        _check(kernels, dtype, head_dims, block_size, cache_dtype)
    except ConfigError as reason:
        if quantization is not None:
            raise
        kernels = candidates["reference"]()
        return kernels, f"reference kernels (plain torch, slower), because {reason}" + invariant
    return kernels, f"{kernels.name} kernels, the fastest for device {device_type}" + invariant


def check_quantization(quantization: str | None, device_type: str, override: str) -> None:
    """Raises ConfigError where no kernels have it."""
    if quantization is not None and (device_type != "cpu" or override not in ("auto", "cpu")):
        raise ConfigError(
            f"--quantization {quantization}: only the cpu kernels have it; use --device cpu "
            "without another --attention-backend, or leave it out"
        )


def _cpu(device_type: str, num_threads: int | None, quantization: str | None) -> Kernels:
    if device_type != "cpu":
        raise ConfigError(f"the cpu kernels cannot run on device {device_type}")
    factory = _load("serve.kernels.cpu", "cpu_kernels")
    kernels: Kernels = factory(num_threads=num_threads, quantization=quantization)
    return kernels


def _reference(device_type: str, batch_invariant: bool) -> Kernels:
    if batch_invariant and device_type != "cpu":
        raise ConfigError(
            "--batch-invariant: the reference kernels multiply matrices by torch, whose rounding "
            f"on device {device_type} depends on the batch; choose --attention-backend triton"
        )
    return reference.kernels() if device_type == "cpu" else reference.kernels(reference.pack_linear)


def _triton(device_type: str, batch_invariant: bool) -> Kernels:
    if device_type != "cuda":
        raise ConfigError(
            f"the triton kernels need a GPU, and the device is {device_type}; "
            "choose --attention-backend reference"
        )
    factory = _load("serve.kernels.triton", "triton_kernels")
    kernels: Kernels = factory(batch_invariant=batch_invariant)
    return kernels


def _flashinfer(device_type: str, batch_invariant: bool) -> Kernels:
    if device_type != "cuda":
        raise ConfigError(
            f"the flashinfer kernels need a GPU, and the device is {device_type}; "
            "choose --attention-backend reference"
        )
    if batch_invariant:
        raise ConfigError(
            "--batch-invariant: FlashInfer's results depend on the batch; choose "
            "--attention-backend triton"
        )
    kernels: Kernels = _load("serve.kernels.triton", "flashinfer_kernels")()
    return kernels


def _check_toolchain() -> None:
    """A GPU whose kernels cannot be compiled is refused: plain torch would be many times slower,
    and what is missing is easily installed. Where there is no Triton there is nothing to check."""
    try:
        toolchain = importlib.import_module("serve.kernels.triton.toolchain")
    except ImportError:
        return
    toolchain.check_toolchain()


def _load(module_name: str, name: str) -> Callable[..., Kernels]:
    """Import lazily: triton needs a GPU machine's packages, the cpu kernels a compiler."""
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{module_name} cannot be imported ({error})") from error
    factory: Callable[..., Kernels] | None = getattr(module, name, None)
    if factory is None:
        raise ConfigError(f"{module_name} has no kernels in this installation")
    return factory


def _check(
    kernels: Kernels,
    dtype: torch.dtype,
    head_dims: set[int],
    block_size: int,
    cache_dtype: torch.dtype | None,
) -> None:
    """Raises ConfigError naming what the backend cannot do."""
    limits: BackendLimits = kernels.attention.limits
    dtype_name = _name(dtype)
    if cache_dtype not in (None, dtype) and _name(cache_dtype) not in limits.cache_dtypes:
        raise ConfigError(
            f"the {kernels.name} kernels keep keys and values as the model computes them, not in "
            f"{_name(cache_dtype)} (--kv-cache-dtype); choose --attention-backend reference, or "
            "triton on a GPU"
        )
    if limits.dtypes is not None and dtype_name not in limits.dtypes:
        raise ConfigError(
            f"the {kernels.name} kernels do not support dtype {dtype_name} "
            f"(they do: {', '.join(limits.dtypes)})"
        )
    if limits.head_dims is not None and not head_dims <= set(limits.head_dims):
        unknown = sorted(head_dims - set(limits.head_dims))
        raise ConfigError(f"the {kernels.name} kernels do not support head size {unknown}")
    if limits.block_sizes is not None and block_size not in limits.block_sizes:
        raise ConfigError(
            f"the {kernels.name} kernels do not support --block-size {block_size} "
            f"(they do: {', '.join(map(str, limits.block_sizes))})"
        )


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
