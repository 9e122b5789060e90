"""Every kernel on the device, against exact arithmetic or its torch twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_machine import Machine
from serve.kernels import reference
from serve.kernels.base import HeadNorms
from serve.kernels.stored import Dense
from serve.kernels.triton import sampling, triton_kernels
from serve.worker.sampling.noise import gumbel, noise_keys, token_hashes
from tests.kernels.ragged import Options, Shape, make_step, relative_error

BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
MIX = [(1, 1), (1, 75), (1, 1500), (3, 3), (19, 83), (130, 700)]
SMALL_MIX = [(1, 40), (19, 33)]


@dataclass(frozen=True)
class Check:
    """‖out - exact‖ / ‖exact‖ of one kernel in one form; 0 where bits must be equal."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # False for NaN, too

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "passed": self.passed}


def run(machine: Machine) -> Iterator[Check]:
    """All checks, the dtype that is served most first; one that raises fails with an infinite
    error, and its message as its name."""
    gpu = machine.device.type != "cpu"
    dtypes = [torch.bfloat16, torch.float16, torch.float32]  # the tests try them all
    for section in (copy_checks, sampling_checks):
        yield from _guarded(section, machine, torch.float32)
    for dtype in dtypes if gpu else [torch.float32]:
        for section in (layer_checks, head_checks, attention_checks):
            yield from _guarded(section, machine, dtype)
    if gpu:
        yield from _guarded(invariance_checks, machine, torch.bfloat16)


Section = Callable[[Machine, torch.dtype], Iterator[Check]]


def _guarded(section: Section, machine: Machine, dtype: torch.dtype) -> Iterator[Check]:
    try:
        yield from section(machine, dtype)
    except Exception as error:  # a kernel that cannot be launched must not hide the others
        yield Check(f"{section.__name__} {dtype} stopped: {error!r}"[:500], float("inf"), 0.0)


def attention_checks(machine: Machine, dtype: torch.dtype) -> Iterator[Check]:
    """All head sizes, then every option, over mixed steps and pure decodes. The other dtypes run
    the same code, so they try one head size only: most of the time here goes into compiling."""
    backend = triton_kernels().attention
    gpu = machine.device.type != "cpu"
    mix = MIX if gpu else SMALL_MIX
    sinks = torch.randn(6, device=machine.device)
    forms = [(f"head_dim {d}", {"head_dim": d}, Options()) for d in (128, 64, 80, 96, 256)]
    forms += [(f"block size {b}", {"block_size": b}, Options()) for b in (8, 32, 64)]
    forms += [
        ("e4m3 cache", {"e4m3": True}, Options()),
        ("window", {}, Options(window=50)),
        ("softcap", {}, Options(softcap=20.0)),
        ("sinks", {}, Options(sinks=sinks)),
        ("one KV head", {"num_kv_heads": 1}, Options()),
    ]
    few = [forms[0], ("e4m3 cache", {"e4m3": True}, Options())]
    for name, changes, options in forms if dtype == torch.bfloat16 else few:
        shape = Shape(
            **{"num_heads": 6, "num_kv_heads": 2, **changes},
            dtype=dtype,
            device=str(machine.device),
        )
        for kind, lens in (("mixed", mix), ("decode", [(1, seq_len) for _, seq_len in mix])):
            step = make_step(backend, shape, lens)
            error = relative_error(step.attend(backend, options), step.exact(options))
            yield Check(f"{kind} attention {dtype} {name}", error, BOUNDS[dtype])


def layer_checks(machine: Machine, dtype: torch.dtype) -> Iterator[Check]:
    """Norms, rotary, activation and the invariant linear layer, against fp64."""
    kernels = triton_kernels(batch_invariant=True)
    bound = BOUNDS[dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=machine.device).to(dtype)

    x, residual, weight = normal(37, 1000), normal(37, 1000), normal(1000)
    yield _check(
        f"rms_norm {dtype}", kernels.rms_norm(x, weight, 1e-5), exact_norm(x, weight), bound
    )
    out, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    yield _check(f"add_rms_norm {dtype}", out, exact_norm(total, weight), bound)
    yield _check(f"add_rms_norm sum {dtype}", total, x + residual, 0.0)
    for activation in ("silu", "gelu_tanh"):
        out = kernels.gated_act(x, activation)
        exact = reference.gated_act(x.double(), activation)
        yield _check(f"{activation} {dtype}", out, exact, bound)
    query, key = normal(37, 8, 64), normal(37, 2, 64)
    table = torch.rand(100, 48, device=machine.device)
    positions = torch.arange(37, device=machine.device) * 2
    exact_heads = reference.rotary(query.double(), key.double(), table, positions)
    for name, out, exact in zip(
        ("query", "key"), kernels.rotary(query, key, table, positions), exact_heads, strict=True
    ):
        yield _check(f"rotary {name} {dtype}", out, exact, bound)
    linear_weight, bias = normal(300, 1000), normal(300)
    exact = x.double() @ linear_weight.double().T + bias.double()
    linear = kernels.pack_linear([Dense(linear_weight)], bias)
    yield _check(f"invariant linear {dtype}", linear(x), exact, bound)


def head_checks(machine: Machine, dtype: torch.dtype) -> Iterator[Check]:
    """Head norms, rotation and cache write in one launch, against the single kernels' bits."""
    kernels = triton_kernels()
    device = machine.device
    assert kernels.prepare_heads is not None
    parts = reference.prepare_heads_by_parts(kernels.rms_norm, kernels.rotary, kernels.attention)
    heads = torch.randn(37, 14, 128, device=device).to(dtype)
    weights = torch.rand(2, 128, device=device) + 0.5
    rope = torch.rand(100, 128, device=device), torch.arange(37, device=device) * 2
    slots = torch.randperm(96, device=device)[:37]
    scales = torch.rand(2, 2, device=device) * 0.02 + 0.005
    for name, norms, kv_scales in (
        ("rope", None, None),
        ("norms and rope", HeadNorms(weights[0], weights[1], 1e-6), None),
        ("e4m3 cache", None, scales),
    ):
        stored = dtype if kv_scales is None else torch.float8_e4m3fn
        shape = kernels.attention.kv_shape(6, 16, 2, 128)
        caches = [torch.zeros(shape, device=device).to(stored) for _ in range(2)]
        single = parts(heads.clone(), 10, norms, rope, caches[0], slots, kv_scales)
        fused = kernels.prepare_heads(heads, 10, norms, rope, caches[1], slots, kv_scales)
        yield _check(f"heads, {name} {dtype}: queries", fused, single, BOUNDS[dtype])
        kept, expected = (cache.float() for cache in (caches[1], caches[0]))
        # One step of e4m3 is an eighth: a key may be rounded to either side of an edge.
        yield _check(f"heads, {name} {dtype}: cache", kept, expected, BOUNDS[dtype])


def copy_checks(machine: Machine, dtype: torch.dtype) -> Iterator[Check]:
    """Within the device, and a round trip through host memory."""
    copy_blocks = triton_kernels().copy_blocks
    cache = torch.randn(6, 6, 2, 16, 64, device=machine.device)  # of three layers
    host = torch.empty(6, 4, 2, 16, 64, pin_memory=machine.device.type != "cpu")
    before = cache.clone()
    copy_blocks(cache, host, torch.tensor([4, 1]), torch.tensor([0, 3]))
    copy_blocks(host, cache, torch.tensor([0, 3]), torch.tensor([2, 5]))
    yield _check("swap round trip", cache[:, [2, 5]], before[:, [4, 1]], 0.0)
    copy_blocks(cache, cache, torch.tensor([0, 1]), torch.tensor([1, 2]))
    yield _check("chained copy", cache[:, [1, 2]], before[:, [0, 1]], 0.0)


def sampling_checks(machine: Machine, dtype: torch.dtype) -> Iterator[Check]:
    """Plain draws against the sampler's noise, greedy against argmax."""
    rows, vocab = (64, 128_256) if machine.device.type != "cpu" else (2, 1100)
    logits = torch.randn(rows, vocab, device=machine.device) * 3
    keys = torch.from_numpy(noise_keys(np.arange(rows), np.full(rows, 5))).to(machine.device)
    noise = gumbel(token_hashes(vocab, machine.device), keys)
    for name, temperature, expected in (
        ("draw", 1.0, (logits + noise).argmax(-1)),
        ("greedy draw", 0.0, logits.argmax(-1)),
    ):
        controls = torch.tensor([[temperature, vocab, 2.0, 0.0]] * rows, device=machine.device)
        drawn = sampling.draw(logits, controls, keys)
        yield Check(name, float((drawn != expected).double().mean()), 0.0)
    controls = torch.tensor([[1.0, 50, 0.9, 0.0]] * rows, device=machine.device)
    drawn = sampling.draw(logits, controls, keys)
    better = (logits > logits.gather(1, drawn[:, None])).sum(-1)
    yield Check("top_k draw", float((better >= 50).double().mean()), 0.0)


def invariance_checks(machine: Machine, dtype: torch.dtype) -> Iterator[Check]:
    """Bit-equal results alone and in company, in batch-invariant mode."""
    kernels = triton_kernels(batch_invariant=True)
    weight = torch.randn(4096, 4096, device=machine.device).to(dtype)
    x = torch.randn(200, 4096, device=machine.device).to(dtype)
    linear = kernels.pack_linear([Dense(weight)], None)
    yield _check("linear alone and in company", linear(x[77:78]), linear(x)[77:78], 0.0)
    shape = Shape(
        num_heads=32, num_kv_heads=8, head_dim=128, dtype=dtype, device=str(machine.device)
    )
    whole = make_step(kernels.attention, shape, [(700, 700)])
    together = whole.attend(kernels.attention, Options())
    for start, end in ((0, 300), (300, 699), (699, 700)):
        alone = whole.part(start, end).attend(kernels.attention, Options())
        yield _check(f"attention chunk {start}:{end}", alone, together[start:end], 0.0)


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def _check(name: str, out: Tensor, exact: Tensor, bound: float) -> Check:
    return Check(name, relative_error(out, exact.double()), bound)
