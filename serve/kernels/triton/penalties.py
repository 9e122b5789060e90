"""Penalties on tokens that were generated, or are in the prompt.

Shapes   logits [S, V], changed in place; controls [S, 3]: presence, frequency, repetition;
         generated [S, V] int32, in_prompt [S, V] bool.
Dtypes   fp32.
Grid     [S, V / 1024].
Bytes    reads 9 and writes 4 per logit. FLOPs: about 8 per logit.
Source   presence and frequency as OpenAI has them; repetition: CTRL (arXiv:1909.05858).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve.kernels.triton.launch import Launcher, cdiv

_TILE = 1024


@triton.jit
def penalize_kernel(
    logits_ptr,
    controls_ptr,
    generated_ptr,
    in_prompt_ptr,
    logits_stride,
    controls_stride,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = tokens < VOCAB
    presence = tl.load(controls_ptr + row * controls_stride)
    frequency = tl.load(controls_ptr + row * controls_stride + 1)
    repetition = tl.load(controls_ptr + row * controls_stride + 2)
    generated = tl.load(generated_ptr + row * VOCAB + tokens, mask=mask, other=0)
    in_prompt = tl.load(in_prompt_ptr + row * VOCAB + tokens, mask=mask, other=0)
    logit_ptrs = logits_ptr + row * logits_stride + tokens
    logit = tl.load(logit_ptrs, mask=mask, other=0.0)
    weakened = tl.where(logit > 0, logit / repetition, logit * repetition)
    logit = tl.where((generated > 0) | (in_prompt != 0), weakened, logit)
    written = (generated > 0).to(tl.float32)
    logit -= frequency * generated.to(tl.float32) + presence * written
    tl.store(logit_ptrs, logit, mask=mask)


_penalize = Launcher(penalize_kernel)


def penalize(logits: Tensor, controls: Tensor, generated: Tensor, in_prompt: Tensor) -> None:
    """Apply presence, frequency and repetition penalties (the columns of controls [S, 3]) in place.

    generated [S, V]: how often each token was sampled; in_prompt [S, V]: whether the prompt has it.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype == controls.dtype == torch.float32, (logits.dtype, controls.dtype)
    assert logits.stride(1) == controls.stride(1) == 1, (logits.stride(), controls.stride())
    assert controls.shape == (num_rows, 3), (controls.shape, logits.shape)
    for counts in (generated, in_prompt):
        assert counts.shape == logits.shape, (counts.shape, logits.shape)
        assert counts.is_contiguous(), counts.stride()
    if num_rows:
        _penalize(
            (num_rows, cdiv(vocab_size, _TILE), 1),
            (logits, controls, generated, in_prompt),
            (logits.stride(0), controls.stride(0)),
            (),
            (vocab_size, _TILE),
            num_warps=4,
        )
