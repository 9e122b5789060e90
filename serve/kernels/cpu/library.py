"""The C++ functions of `api.h` as typed Python calls, and the compute threads they share."""

from __future__ import annotations

import ctypes
import os
import weakref
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from serve.kernels.cpu.build import load_library


class Cache(ctypes.Structure):
    """`ServeCache`: one layer's keys and values."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
    )


class Batch(ctypes.Structure):
    """`ServeBatch`: the raggedness of one step."""

    _fields_ = (
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("table_stride", c_int64),
        ("num_requests", c_int64),
    )


class Attention(ctypes.Structure):
    """`ServeAttention`: what differs between attention layers."""

    _fields_ = (
        ("num_heads", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
    )


class Linear(ctypes.Structure):
    """`ServeLinear`: one packed product."""

    _fields_ = (
        ("storage", c_int32),
        ("in_size", c_int64),
        ("out_size", c_int64),
        ("weights", c_void_p),
        ("bias", c_void_p),
    )


class Layer(ctypes.Structure):
    """`ServeLayer`: one decoder layer."""

    _fields_ = (
        *((name, Linear) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("before_attention", "query", "key", "after_attention")),
        *((name, c_void_p) for name in ("before_mlp", "after_mlp")),
        ("window", c_int64),
        ("rope", c_int64),
    )


class Decoder(ctypes.Structure):
    """`ServeDecoder`: all layers and what they share."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("final_norm", c_void_p),
        *((name, c_int64) for name in ("num_layers", "hidden", "intermediate")),
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim")),
        ("activation", c_int32),
        *((name, c_float) for name in ("eps", "scale", "softcap")),
    )


class RopeTable(ctypes.Structure):
    """`ServeRope`: one kind of rotary embedding, for this step."""

    _fields_ = (("cos_sin", c_void_p), ("positions", c_void_p), ("rotary_dim", c_int64))


class Step(ctypes.Structure):
    """`ServeStep`: what a step hands to the decoder."""

    _fields_ = (
        ("batch", POINTER(Batch)),
        ("slots", c_void_p),
        ("keys", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
        ("ropes", POINTER(RopeTable)),
        ("block_size", c_int64),
        ("num_tokens", c_int64),
        ("residual", c_void_p),
        ("wanted", c_void_p),
        ("num_wanted", c_int64),
        ("out", c_void_p),
    )


class Scores(ctypes.Structure):
    """`ServeScores`: where scores of tokens go."""

    _fields_ = tuple(
        (name, c_void_p) for name in ("logprobs", "ranks", "top_token_ids", "top_logprobs")
    )


class Library:
    """The functions of `api.h` and `sampling.h`; each runs on these threads and returns when done.

    Calls release the interpreter lock, but one pool serves one caller at a time.
    """

    def __init__(self, num_threads: int | None, cache_dir: Path | None) -> None:
        functions = load_library(cache_dir)
        self.build = Path(functions._name).stem  # of the instruction set and the sources
        ints, pointers = [c_int64], [c_void_p]
        create = functions.serve_pool_create
        create.argtypes, create.restype = [c_int32], c_void_p
        destroy = functions.serve_pool_destroy
        destroy.argtypes, destroy.restype = pointers, None

        # The threads are not pinned to cores. With server and load generator on the same two cores,
        # pinning gained 5 % in medians of seven runs that spread by 15 %, and a pinned thread must
        # wait when the server's front, a client or another container wants its core.
        self.num_threads = num_threads or len(os.sched_getaffinity(0))
        self.pool: int = create(self.num_threads)
        weakref.finalize(self, destroy, self.pool)

        self.advise_huge_pages = functions.serve_advise_huge_pages
        self.advise_huge_pages.argtypes = [c_void_p, c_int64]
        self.advise_huge_pages.restype = None
        self.pack_blocks = functions.serve_pack_blocks
        self.pack_blocks.argtypes = [c_void_p, c_int32, c_void_p, *ints * 3, c_void_p]
        self.pack_blocks.restype = c_int32
        self.linear = functions.serve_linear
        self.linear.argtypes = [c_void_p, c_int32, c_void_p, *ints * 3, *pointers * 3]
        self.rms_norm = functions.serve_rms_norm
        self.rms_norm.argtypes = [
            *(c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_float),
            *(c_int64, c_int64, c_void_p, c_void_p),
        ]
        self.rotate = functions.serve_rotate
        self.rotate.argtypes = [*pointers * 2, *ints * 5, *pointers * 2]
        self.gated_act = functions.serve_gated_act
        self.gated_act.argtypes = [*pointers * 2, c_int32, *ints * 2, c_void_p]
        self.write_kv = functions.serve_write_kv
        self.write_kv.argtypes = [
            *(c_void_p, POINTER(Cache), c_void_p, c_void_p),
            *(c_int64, c_int64, c_void_p, c_int64),
        ]
        self.attend = functions.serve_attend
        self.attend.argtypes = [
            *(c_void_p, POINTER(Cache), POINTER(Batch), POINTER(Attention)),
            *(c_void_p, c_int64, c_void_p),
        ]
        for function in (self.linear, self.rms_norm, self.rotate, self.gated_act):
            function.restype = None
        self.decode = functions.serve_decode
        self.decode.argtypes = [c_void_p, POINTER(Decoder), POINTER(Step)]
        for function in (self.write_kv, self.attend, self.decode):
            function.restype = None
        self.argmax = functions.serve_argmax
        self.argmax.argtypes = [*pointers * 2, *ints * 2, c_void_p]
        self.draw = functions.serve_draw
        self.draw.argtypes = [*pointers * 2, *ints * 2, c_void_p, c_int64, *pointers * 2]
        self.penalize = functions.serve_penalize
        self.penalize.argtypes = [*pointers * 2, *ints * 2, *pointers * 3]
        self.mask = functions.serve_mask
        self.mask.argtypes = [*pointers * 2, c_int64, *pointers * 2, c_int64]
        self.score = functions.serve_score
        self.score.argtypes = [*pointers * 2, *ints * 2, c_void_p, c_int64, POINTER(Scores)]
        for function in (self.argmax, self.draw, self.penalize, self.mask, self.score):
            function.restype = None


def as_rows(x: Tensor) -> Tensor:
    """x as the kernels read it: fp32, contiguous. Other dtypes are a bug of the caller."""
    assert x.dtype is torch.float32, f"the cpu kernels compute in float32, not {x.dtype}"
    return x.contiguous()
