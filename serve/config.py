"""Every setting, once: frozen dataclasses whose fields become command-line flags.

A field's docstring is its flag's help text, its default the only default. `None` and "auto" mean
"decided at start"; what was decided is logged and passed on as data (`EngineReady`, limits), never
written back here. This is the only file that reads the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    model: str | None = None
    """Folder, .gguf file or hub id; None is the default model."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Serving dtype. auto: the checkpoint's on CUDA, float32 on a CPU."""
    max_model_len: str = "auto"
    """Most tokens of prompt plus completion (8192, 8k, or auto: what model and KV pool allow)."""
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    """Our decoder, or transformers' model with our attention. auto prefers ours."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    """Where weights come from; dummy makes random ones from the config alone."""
    seed: int = 0
    """Seeds dummy weights and unseeded sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV pool. Names that speak of a GPU also govern the CPU's KV memory."""

    block_size: int = 16
    """Tokens per KV block."""
    gpu_memory_utilization: float = 0.9
    """Share of device memory the server may use (on a CPU: see kv_cache_memory_bytes)."""
    kv_cache_memory_bytes: int | None = None
    """Exact size of the KV pool in bytes; default: what the device leaves."""
    num_gpu_blocks_override: int | None = None
    """Exact number of usable KV blocks."""
    swap_space: float = 4.0
    """Host memory for swapped-out requests, in GiB; used when the preemption mode can swap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What runs in a step."""

    max_num_seqs: int = 256
    """Most requests running at once."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step; auto: 2048, or 8192 on GPUs of 70 GiB and more."""
    enable_chunked_prefill: bool = True
    """Split prompts across steps to share the budget with decodes; off: whole prompts only."""
    scheduler_delay_factor: float = 0.0
    """Wait this many times the last prompt step's duration before prefilling, to batch prompts."""
    preemption_mode: Literal["recompute", "swap", "auto"] = "recompute"
    """What happens to a preempted request's KV: dropped, or copied to host memory and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Where it runs."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: CUDA when there is one."""
    attention_backend: Literal["auto", "triton", "cpu", "reference"] = "auto"
    """Attention kernels; auto picks the fastest that works here and logs why."""
    cpu_threads: int | None = None
    """Compute threads of the CPU backend; default: one per physical core we may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything behind the front."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    served_model_name: tuple[str, ...] = ()
    """Names clients may use for the model; default: the model argument."""
    api_key: tuple[str, ...] = ()
    """Keys clients must send as a bearer token; SERVE_LLM_API_KEY (comma separated) adds more."""
    chat_template: str | None = None
    """Jinja file (or text) used instead of the model's own chat template."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto: sampling defaults come from the model's generation_config.json."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests may still take after SIGTERM."""
    disable_log_requests: bool = False
    """Do not log a line per request."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is logged."""
    metrics_prefix: str = "serve_llm_"
    """Prefix of every metric; "vllm:" gives vLLM's exact names."""


def api_keys_from_environment() -> tuple[str, ...]:
    """Keys in SERVE_LLM_API_KEY, comma separated."""
    return tuple(k.strip() for k in os.environ.get("SERVE_LLM_API_KEY", "").split(",") if k.strip())
