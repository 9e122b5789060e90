"""What is simulated: a workload, a machine, and what counts as good."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from serve.config import Count, EngineConfig
from serve.errors import ConfigError
from serve.simulate.cost import LinearCost
from serve.simulate.executor import VOCAB_SIZE
from serve.simulate.figures import Targets
from serve.simulate.workload import SimRequest, Synthetic, draw, read_workload
from serve.worker.executor import WorkerInfo
from serve.worker.startup.cache_size import size_cache, token_budget


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """Which requests."""

    workload: Path | None = None
    """JSONL file with arrival, prompt_len and output_len per line; a trace of serve will do. Left
    out: requests are drawn as the flags below say."""
    num_requests: int = 200
    """How many requests are drawn."""
    rate: float = 4.0
    """Mean arrivals per second (Poisson); 0: all at the start."""
    prompt_len: str = "lognormal:512:0.8"
    """Tokens per prompt: 512, uniform:100:900, lognormal:MEDIAN:SIGMA, or 128@0.8+4096@0.2."""
    output_len: str = "lognormal:192:0.6"
    """Tokens per answer, in the same notation."""
    prefix_len: int = 0
    """Tokens in front of each prompt that it shares with others."""
    num_prefixes: int = 1
    """How many such beginnings there are."""
    workload_seed: int = 0
    """Seeds the drawing."""

    def __post_init__(self) -> None:
        for name in ("num_requests", "num_prefixes"):
            _require(getattr(self, name) >= 1, name, "at least 1")
        _require(0 <= self.rate < math.inf, "rate", "0 or more")
        _require(self.prefix_len >= 0, "prefix_len", "0 or more")

    def requests(self) -> list[SimRequest]:
        """In order of arrival. Raises ConfigError."""
        if self.workload is not None:
            return read_workload(self.workload)
        synthetic = Synthetic(
            num_requests=self.num_requests,
            rate=self.rate,
            prompt_len=self.prompt_len,
            output_len=self.output_len,
            prefix_len=self.prefix_len,
            num_prefixes=self.num_prefixes,
            seed=self.workload_seed,
        )
        return draw(synthetic)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineConfig:
    """What steps cost. The defaults are calculated, not measured: an 8-billion-parameter model with
    grouped-query attention in 16 bits, on a GPU of 400 TFLOP/s and 2.5 TB/s behind PCIe 5."""

    fit_trace: Path | None = None
    """Fit the costs to the steps of a recorded trace (serve --trace-file) instead."""
    step_ms: float = 6.5
    """Any step: reading the weights, and the engine's own work."""
    chunk_token_us: float = 40.0
    """Each prompt token."""
    chunk_pair_ns: float = 1.3
    """Each pair of a prompt token and an earlier one: attention is quadratic."""
    decode_us: float = 40.0
    """Each request that gets one token."""
    context_token_ns: float = 52.0
    """Each token of KV that those read."""
    swap_gb_per_s: float = 25.0
    """Copy rate between device and host memory, in 10^9 bytes per second."""
    kv_bytes_per_token: Count = Count(131_072)  # noqa: RUF009 (immutable)
    """KV of one token; `serve-llm plan` tells a model's."""
    context_len: Count = Count(32_768)  # noqa: RUF009 (immutable)
    """Longest prompt plus answer of the model."""

    def __post_init__(self) -> None:
        for name in ("step_ms", "chunk_token_us", "chunk_pair_ns", "decode_us", "context_token_ns"):
            _require(0 <= getattr(self, name) < math.inf, name, "0 or more")
        for name in ("swap_gb_per_s", "kv_bytes_per_token", "context_len"):
            _require(0 < getattr(self, name) < math.inf, name, "above 0")

    def cost(self, block_size: int) -> LinearCost:
        """The costs by these numbers."""
        return LinearCost(
            step_s=self.step_ms * 1e-3,
            chunk_token_s=self.chunk_token_us * 1e-6,
            chunk_pair_s=self.chunk_pair_ns * 1e-9,
            decode_s=self.decode_us * 1e-6,
            context_token_s=self.context_token_ns * 1e-9,
            block_copy_s=block_size * self.kv_bytes_per_token / (self.swap_gb_per_s * 1e9),
        )

    def sizes(self, config: EngineConfig) -> WorkerInfo:
        """What an engine with these settings would have. Raises ConfigError as it would."""
        size = size_cache(
            config,
            block_bytes=config.cache.block_size * self.kv_bytes_per_token,
            model_max_len=self.context_len,
            device_free_bytes=_UNLIMITED,
            host_total_bytes=_UNLIMITED,
            measure_cache_bytes=lambda: _DEFAULT_POOL_BYTES,
        )
        budget = token_budget(config.scheduler, _DEFAULT_BUDGET, size.max_model_len)
        return WorkerInfo(
            num_blocks=size.num_blocks,
            num_host_blocks=size.num_host_blocks,
            vocab_size=VOCAB_SIZE,
            max_model_len=size.max_model_len,
            max_num_batched_tokens=budget,
            device="simulated",
            dtype="none",
            attention_backend="none",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """What counts as good service."""

    target_ttft_ms: float = 2000.0
    """Longest time to first token of a good request."""
    target_tpot_ms: float = 100.0
    """Longest mean time per later token of a good request."""

    def targets(self) -> Targets:
        """In seconds."""
        return Targets(ttft_s=self.target_ttft_ms / 1e3, tpot_s=self.target_tpot_ms / 1e3)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine configuration, and the settings in which it differs from the others."""

    engine: EngineConfig
    settings: dict[str, str]


_UNLIMITED = 1 << 60
_DEFAULT_POOL_BYTES = 50 << 30  # what such a model leaves of 80 GiB
_DEFAULT_BUDGET = 8192


def _require(condition: bool, field_name: str, accepted: str) -> None:
    if not condition:
        raise ConfigError(f"--{field_name.replace('_', '-')} must be {accepted}.")
