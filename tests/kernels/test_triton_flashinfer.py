"""FlashInfer as an attention backend, against a stub that computes what FlashInfer documents."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from serve.errors import ConfigError
from serve.kernels.select import select_kernels
from serve.kernels.triton import flashinfer, triton_kernels
from serve.kernels.triton.flashinfer import FlashInferAttention
from tests.kernels.ragged import Options, Shape, exact_attention, make_step, relative_error


class Wrapper:
    """BatchPrefillWithPagedKVCacheWrapper, in plain torch, of the arguments that are given."""

    made: ClassVar[list[Wrapper]] = []

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert (workspace.dtype, kv_layout) == (torch.uint8, "HND")
        self.plans: list[dict[str, Any]] = []
        Wrapper.made.append(self)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **named: Any,
    ) -> None:
        for index in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert index.dtype == torch.int32
        self.plans.append({k: v for k, v in locals().items() if k not in ("self", "named")} | named)

    def run(self, query: Tensor, kv: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        plan = self.plans[-1]
        assert query.shape[1:] == (plan["num_qo_heads"], plan["head_dim_qk"])
        assert kv[0].shape[1:] == (plan["num_kv_heads"], plan["page_size"], plan["head_dim_qk"])
        assert plan["causal"]
        window = None if plan["window_left"] < 0 else plan["window_left"] + 1
        options = Options(plan["sm_scale"], window, plan["logits_soft_cap"])
        rows = zip(
            plan["qo_indptr"].unfold(0, 2, 1).tolist(),
            plan["paged_kv_indptr"].unfold(0, 2, 1).tolist(),
            plan["paged_kv_last_page_len"].tolist(),
            strict=True,
        )
        for (start, end), (first, last), tail in rows:
            pages = plan["paged_kv_indices"][first:last].long()
            length = (last - first - 1) * plan["page_size"] + tail
            key, value = (
                half[pages].transpose(1, 2).flatten(0, 1)[:length].double() for half in kv
            )
            out[start:end] = exact_attention(query[start:end].double(), key, value, options)
        return out


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FlashInferAttention:
    Wrapper.made.clear()
    stub = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper, __version__="0.6")
    monkeypatch.setitem(sys.modules, "flashinfer", stub)
    monkeypatch.setattr(flashinfer, "LONG_PROMPTS", 20)
    attention: Any = triton_kernels().attention
    return FlashInferAttention(attention)


@pytest.mark.parametrize(
    "options",
    [Options(), Options(window=15), Options(softcap=9.0)],
    ids=["plain", "window", "softcap"],
)
def test_long_prompts_are_flashinfers_and_single_tokens_are_tritons(
    backend: FlashInferAttention, options: Options
) -> None:
    shape = Shape(num_heads=4, num_kv_heads=2, dtype=torch.float16)
    step = make_step(backend, shape, [(1, 40), (1, 3), (19, 48), (30, 30)])
    for _ in range(3):  # layers
        out = step.attend(backend, options)
        assert relative_error(out, step.exact(options)) < 1e-3
    (made,) = Wrapper.made
    (plan,) = made.plans
    assert plan["qo_indptr"].tolist() == [0, 19, 49]
    assert plan["paged_kv_indptr"].tolist() == [0, 3, 5]
    assert plan["paged_kv_last_page_len"].tolist() == [16, 14]
    assert plan["window_left"] == (-1 if options.window is None else options.window - 1)
    assert (plan["q_data_type"], plan["kv_data_type"]) == (torch.float16, torch.float16)

    step = make_step(backend, shape, [(25, 30)], seed=1)
    assert relative_error(step.attend(backend, Options()), step.exact(Options())) < 1e-3
    step.attend(backend, Options(window=7))
    assert len(made.plans) == 3, "each step, and each kind of layer"


@pytest.mark.parametrize("kind", ["short", "sinks", "e4m3"])
def test_what_flashinfer_is_not_used_for_stays_tritons(
    backend: FlashInferAttention, kind: str
) -> None:
    lens = [(1, 9), (19, 19)] if kind == "short" else [(1, 9), (30, 30)]
    options = Options(sinks=torch.zeros(4)) if kind == "sinks" else Options()
    step = make_step(backend, Shape(dtype=torch.float16, e4m3=kind == "e4m3"), lens)
    assert relative_error(step.attend(backend, options), step.exact(options)) < 1e-3
    assert not Wrapper.made


def test_a_recorded_step_never_meets_it() -> None:
    from serve.worker.graphs import mixed_sizes

    assert max(size.prompt_tokens for size in mixed_sizes([256])) <= flashinfer.LONG_PROMPTS


def test_it_is_chosen_by_name_only_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {"dtype": torch.bfloat16, "head_dims": {128}, "block_size": 16}
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="pip install flashinfer-python"):
        select_kernels("cuda", "flashinfer", **asked)
    with pytest.raises(ConfigError, match="need a GPU"):
        select_kernels("cpu", "flashinfer", **asked)
    with pytest.raises(ConfigError, match="--batch-invariant"):
        select_kernels("cuda", "flashinfer", batch_invariant=True, **asked)
    stub = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper, __version__="0.6")
    monkeypatch.setitem(sys.modules, "flashinfer", stub)
    kernels, why = select_kernels("cuda", "flashinfer", **asked)
    assert kernels.name == kernels.attention.name == "flashinfer"
    assert kernels.build.endswith("flashinfer 0.6")
    assert why.startswith("flashinfer kernels")
    assert select_kernels("cuda", "auto", **asked)[0].name == "triton"
