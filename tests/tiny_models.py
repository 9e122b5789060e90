"""Small random models of real families, made by transformers, and steps over a paged cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from serve.kernels import reference
from serve.kernels.base import AttentionMetadata, ForwardContext
from serve.models.base import CausalModel
from serve.models.registry import build_model
from serve.models.weights.checkpoint import open_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"head_dim": None},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 4, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
}
"""Model types our decoder knows, with the settings that make them differ."""

OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "n_inner": 48},
    "phi3": {"head_dim": None, "sliding_window": 7},
    "starcoder2": {"head_dim": None, "sliding_window": None},
}
"""Model types that run as transformers' models."""


def make_config(model_type: str, **settings: Any) -> Any:
    """A tiny transformers config."""
    own = {**FAMILIES, **OTHERS}[model_type]
    sizes = {"vocab_size": SIZES["vocab_size"]} if model_type == "gpt2" else SIZES
    values = {k: v for k, v in {**sizes, **own, **settings}.items() if v is not None}
    return AutoConfig.for_model(model_type, **values)


def make_model(config: Any, seed: int = 0) -> Any:
    """A transformers model with random weights in fp32, biases and norms random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim > 1 else 0.1
            noise = torch.randn_like(parameter) * spread
            parameter.copy_(noise + (parameter if "norm" in name or "ln_" in name else 0))
    return model.eval()


def save_model(folder: Path, model_type: str = "llama", **settings: Any) -> Any:
    """Write a tiny model to a folder; returns the transformers model."""
    model = make_model(make_config(model_type, **settings))
    model.save_pretrained(folder)
    return model


def load(
    path: Path,
    impl: str = "auto",
    load_format: str = "auto",
    dtype: torch.dtype = torch.float32,
) -> CausalModel:
    """Our model from a folder or file: weights in `dtype`, fp32, CPU, reference kernels."""
    return build_model(
        open_checkpoint(path, load_format),
        kernels=reference.kernels(),
        dtype=dtype,
        compute_dtype=torch.float32,
        device=torch.device("cpu"),
        impl=impl,
        seed=0,
    )


def full_logits(hf_model: Any, token_ids: Sequence[int]) -> Tensor:
    """transformers' logits [T, vocab] of one sequence in a single forward pass."""
    with torch.inference_mode():
        logits: Tensor = hf_model(torch.tensor([list(token_ids)])).logits[0]
    return logits


@dataclass(frozen=True)
class Share:
    """One request's part of a step: the next `num_tokens` of its tokens."""

    request: int
    num_tokens: int


class PagedRun:
    """Several sequences over one paged cache, stepped in any shares."""

    def __init__(
        self, model: CausalModel, sequences: Sequence[Sequence[int]], block_size: int = 4
    ) -> None:
        self.model = model
        self.sequences = [list(sequence) for sequence in sequences]
        self.done = [0] * len(sequences)
        self.logits: list[list[Tensor]] = [[] for _ in sequences]
        self.block_size = block_size
        self.tables = self._scattered_tables()
        num_blocks = 1 + sum(map(len, self.tables))
        # NaN in every slot: reading one that was not written spoils the logits.
        self.kv = [
            torch.full((2, num_blocks, block_size, c.num_kv_heads, c.head_dim), float("nan"))
            for c in model.cache_layers
        ]
        self.kv_scales: list[Tensor] | None = None  # of a cache in eight bits

    def _scattered_tables(self) -> list[list[int]]:
        """Blocks dealt in turn, from the highest, so that no request's blocks are neighbours."""
        sizes = [-(-len(s) // self.block_size) for s in self.sequences]
        tables: list[list[int]] = [[] for _ in sizes]
        free = sum(sizes)
        for turn in range(max(sizes)):
            for table, size in zip(tables, sizes, strict=True):
                if turn < size:
                    table.append(free)
                    free -= 1
        return tables

    def step(self, shares: Sequence[Share]) -> None:
        """Run one step and keep each token's logits."""
        ordered = sorted(shares, key=lambda share: share.num_tokens != 1)
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        prompt_lens: list[int] = []
        for share in ordered:
            start = self.done[share.request]
            end = start + share.num_tokens
            token_ids += self.sequences[share.request][start:end]
            positions += range(start, end)
            prompt_lens += [len(self.sequences[share.request])] * share.num_tokens
            table = self.tables[share.request]
            slots += [
                table[p // self.block_size] * self.block_size + p % self.block_size
                for p in range(start, end)
            ]
            self.done[share.request] = end
        context = ForwardContext(
            kv=self.kv,
            attention=self._metadata(ordered, slots),
            positions=torch.tensor(positions),
            prompt_lens=torch.tensor(prompt_lens),
            kv_scales=self.kv_scales,
        )
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(torch.tensor(token_ids), context))
        at = 0
        for share in ordered:
            self.logits[share.request].append(logits[at : at + share.num_tokens])
            at += share.num_tokens

    def _metadata(self, shares: Sequence[Share], slots: list[int]) -> AttentionMetadata:
        query_lens = [share.num_tokens for share in shares]
        seq_lens = [self.done[share.request] for share in shares]
        width = max(len(self.tables[share.request]) for share in shares)
        tables = [
            self.tables[s.request] + [0] * (width - len(self.tables[s.request])) for s in shares
        ]
        return AttentionMetadata(
            query_start_loc=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            num_decode_rows=query_lens.count(1),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
        )

    def run(self, schedule: Sequence[Sequence[int]]) -> list[Tensor]:
        """Each row of the schedule is one step: tokens per request, 0 for none. What is left over
        runs in one last step. Returns every sequence's logits [len, vocab]."""
        for row in schedule:
            self.step([Share(request, n) for request, n in enumerate(row) if n])
        rest = [len(s) - done for s, done in zip(self.sequences, self.done, strict=True)]
        if any(rest):
            self.step([Share(request, n) for request, n in enumerate(rest) if n])
        return [torch.cat(parts) for parts in self.logits]


MIXED_SCHEDULE = [[5, 0, 7], [1, 6, 7], [1, 1, 1], [4, 1, 1], [1, 1, 0], [1, 5, 1]]
"""Chunks and decodes of three sequences, mixed in every step."""


def random_tokens(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SIZES["vocab_size"], (length,), generator=generator).tolist()
