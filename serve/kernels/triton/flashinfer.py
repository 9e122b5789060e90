"""FlashInfer's attention for long prompts, over the cache and beside the kernels of this package.

Where FlashInfer is installed (`pip install flashinfer-python`) and `--attention-backend flashinfer`
asks for it, prompts of more tokens than a recorded step holds are attended by its prefill kernels,
which use what Hopper and Blackwell have that Triton does not reach. Everything else stays: single
tokens, short prompts (a recorded step must not plan on the host), e4m3 caches and attention sinks.
The cache's halves are FlashInfer's pages as they are: [pages, num_kv_heads, page_size, head_dim].

Tested by shapes, against a stub of FlashInfer's interface (0.2 to 0.7): no card has run it yet.
Source   FlashInfer (arXiv:2501.01005).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from serve.errors import ConfigError
from serve.kernels.base import AttentionMetadata, BackendLimits
from serve.kernels.triton.backend import TritonAttention

LONG_PROMPTS = 256
"""Prompt tokens of a step up to which it may be a recorded one."""
_WORKSPACE_BYTES = 128 << 20


class FlashInferAttention:
    """An AttentionBackend: FlashInfer's for long prompts, `triton` for the rest."""

    name = "flashinfer"
    limits = BackendLimits(
        dtypes=("float16", "bfloat16"),
        head_dims=(64, 128, 256),
        block_sizes=TritonAttention.limits.block_sizes,
        cache_dtypes=TritonAttention.limits.cache_dtypes,
    )

    def __init__(self, triton: TritonAttention) -> None:
        """Raises ConfigError if FlashInfer is not installed."""
        self._triton = triton
        self.library = _import_flashinfer()
        self._prefill: Any = None  # with its workspace; made for the first step that needs it
        self._meta: AttentionMetadata | None = None  # of the step that is planned
        self._planned: tuple[object, ...] = ()  # and of which layers of it
        self._singles: AttentionMetadata | None = None  # the step's single tokens
        self.kv_shape = triton.kv_shape
        self.write_kv = triton.write_kv
        self.prepare_heads = triton.prepare_heads

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of this step's tokens over their requests' blocks."""
        singles = meta.num_decode_rows
        long_prompts = query.shape[0] - singles > LONG_PROMPTS
        if not long_prompts or sinks is not None or kv_scales is not None:
            return self._triton.attend(
                query,
                kv,
                meta,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                kv_scales=kv_scales,
            )
        self._plan(query, kv, meta, scale, window, softcap)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._prefill.run(query[singles:], (kv[0], kv[1]), out=out[singles:])
        if self._singles is not None:
            out[:singles] = self._triton.attend(
                query[:singles], kv, self._singles, scale=scale, window=window, softcap=softcap
            )
        return out

    def _plan(
        self,
        query: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Tell FlashInfer of the step's prompts, unless the layer before was told the same."""
        layer = (query.shape[1:], kv.shape[2:], scale, window, softcap)
        if meta is self._meta and layer == self._planned:
            return
        if meta is not self._meta:
            self._singles = _singles_of(meta)
        self._meta, self._planned = meta, layer
        if self._prefill is None:
            workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
            make = self.library.BatchPrefillWithPagedKVCacheWrapper
            self._prefill = make(workspace, kv_layout="HND")
        page_size, first = kv.shape[3], meta.num_decode_rows
        seq_lens = meta.seq_lens_host[first:]
        pages = [-(-seq_len // page_size) for seq_len in seq_lens]
        table = meta.block_table[first:]
        self._prefill.plan(
            _starts(meta.query_lens_host[first:]),
            _starts(pages),
            torch.cat([row[:count] for row, count in zip(table, pages, strict=True)]),
            torch.tensor([(n - 1) % page_size + 1 for n in seq_lens], dtype=torch.int32),
            query.shape[1],
            kv.shape[2],
            query.shape[2],
            page_size,
            causal=True,
            sm_scale=scale,
            window_left=-1 if window is None else window - 1,
            logits_soft_cap=softcap,
            q_data_type=query.dtype,
            kv_data_type=kv.dtype,
        )


def _singles_of(meta: AttentionMetadata) -> AttentionMetadata | None:
    """A step's requests with a single token as a step of their own, if there are any."""
    count = meta.num_decode_rows
    if count == 0:
        return None
    return AttentionMetadata(
        query_start_loc=meta.query_start_loc[: count + 1],
        seq_lens=meta.seq_lens[:count],
        block_table=meta.block_table[:count],
        slot_mapping=meta.slot_mapping[:count],
        num_decode_rows=count,
        max_query_len=1,
        max_seq_len=max(meta.seq_lens_host[:count]),
        query_lens_host=meta.query_lens_host[:count],
        seq_lens_host=meta.seq_lens_host[:count],
    )


def _starts(lengths: Sequence[int]) -> Tensor:
    """[R+1] int32 in host memory, where FlashInfer plans."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _import_flashinfer() -> Any:
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(
            f"--attention-backend flashinfer: it cannot be imported ({error}). "
            "pip install flashinfer-python, or use --attention-backend triton."
        ) from error
