"""Every setting, once: frozen dataclasses whose fields become command-line flags.

A field's docstring is its flag's help text, its default the only default. `None` and "auto" mean
"decided at start"; what was decided is logged and passed on as data (`EngineReady`, limits), never
written back here. This is the only file that reads the environment.

Values that can never work are refused here, by flag name, so that the command line, a YAML file and
a Python caller get the same ConfigError.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Literal, Self

from serve.errors import ConfigError
from serve.speculative_config import SpeculativeConfig

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgt]|[KMGT](?:iB)?)?", re.ASCII)
_EXPONENT = {"k": 1, "m": 2, "g": 3, "t": 4}
MAX_RECEIVE_TIMEOUT_S = 30
_SECRETS = frozenset({"SERVE_LLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})


class Count(int):
    """A whole number that may be written with a suffix: 8k is 8000, 8K and 8KiB are 8192."""

    def __new__(cls, value: int | str) -> Self:
        """Raises ValueError for text that is no such number."""
        if isinstance(value, int):
            return super().__new__(cls, value)
        match = _COUNT.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"{value!r} is not a number such as 8192, 8k or 2GiB")
        number, suffix = match.groups()
        unit = 1
        if suffix:
            base = 1000 if suffix.islower() else 1024
            unit = base ** _EXPONENT[suffix[0].lower()]
        whole = Fraction(number) * unit
        if whole.denominator != 1:
            raise ValueError(f"{value!r} is not a whole number")
        return super().__new__(cls, whole.numerator)


def _require(condition: bool, flag: str, value: object, accepted: str) -> None:
    if not condition:
        raise ConfigError(f"--{flag} {value} is not possible: it must be {accepted}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    model: str | None = field(default=None, kw_only=False)
    """Folder, .gguf file or hub id; left out: SmolLM2-135M-Instruct, downloaded once."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Serving dtype. auto: the checkpoint's on CUDA, float32 on a CPU, whose arithmetic is always
    float32: there a 16-bit dtype is what weights are rounded to and kept in."""
    quantization: Literal["int8"] | None = None
    """int8: round the weights of linear layers to 8 bits with a scale per output (on a CPU)."""
    max_model_len: str = "auto"
    """Most tokens of prompt plus completion (8192, 8k, or auto: what model and KV pool allow)."""
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    """Our decoder, or transformers' model with our attention. auto prefers ours."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    """Where weights come from; dummy makes random ones from the config alone."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """Generated tokens' logprobs: of the model's own distribution, or of the one drawn from (after
    penalties, bias, temperature and filters). Prompt logprobs are raw in both."""
    seed: int = 0
    """Seeds dummy weights and unseeded sampling."""

    def __post_init__(self) -> None:
        try:
            asked = self.max_model_len_tokens()
        except ValueError as error:
            raise ConfigError(f"--max-model-len: {error}, nor auto.") from error
        _require(asked is None or asked >= 1, "max-model-len", asked, "at least 1")

    def max_model_len_tokens(self) -> int | None:
        """`max_model_len` as a number of tokens; None for auto."""
        return None if self.max_model_len == "auto" else Count(self.max_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV pool. Names that speak of a GPU also govern the CPU's KV memory."""

    block_size: int = 16
    """Tokens per KV block."""
    gpu_memory_utilization: float | None = None
    """Share of all device memory that may be in use. Default: 0.9 on a GPU; on a CPU the KV pool
    takes a quarter of what is free, at most 4 GiB."""
    kv_cache_memory_bytes: Count | None = None
    """Exact size of the KV pool in bytes (2GiB works too); default: what the device leaves."""
    num_gpu_blocks_override: int | None = None
    """Exact number of usable KV blocks."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    """Keys and values in the cache: as the model computes them, or in eight bits (fp8 is e4m3), for
    twice the tokens and half the reading; needs the triton or the reference kernels."""
    calculate_kv_scales: bool = False
    """With fp8, measure a scale for every KV head at start, where the checkpoint has none."""
    swap_space: float = 4.0
    """Host memory for swapped-out requests, in GiB; used when the preemption mode can swap."""
    enable_prefix_caching: bool = True
    """Keep the KV of past prompts while blocks are free, and reuse it for equal beginnings."""
    prefix_cache_file: str | None = None
    """Safetensors file that keeps the prefix cache while the server is down: written at its orderly
    end, read at its start if it fits model, dtype, block size and kernels. Pins are not kept."""
    max_pinned_share: float = 0.25
    """Most of the KV pool that pinned prefixes may take; what one request of --max-model-len needs
    is never pinned. 0: nothing can be pinned."""

    def __post_init__(self) -> None:
        _require(self.block_size >= 1, "block-size", self.block_size, "at least 1")
        share, pool, blocks = (
            self.gpu_memory_utilization,
            self.kv_cache_memory_bytes,
            self.num_gpu_blocks_override,
        )
        _require(
            share is None or 0 < share <= 1,
            "gpu-memory-utilization",
            share,
            "above 0 and at most 1",
        )
        _require(pool is None or pool > 0, "kv-cache-memory-bytes", pool, "above 0")
        _require(blocks is None or blocks >= 1, "num-gpu-blocks-override", blocks, "at least 1")
        pinned = self.max_pinned_share
        _require(0 <= pinned <= 1, "max-pinned-share", pinned, "between 0 and 1")
        if self.prefix_cache_file is not None and not self.enable_prefix_caching:
            raise ConfigError("--prefix-cache-file needs --enable-prefix-caching.")
        _require(self.swap_space >= 0, "swap-space", self.swap_space, "0 or more")
        narrow = self.kv_cache_dtype != "auto"
        _require(
            narrow or not self.calculate_kv_scales,
            "calculate-kv-scales",
            self.calculate_kv_scales,
            "used together with --kv-cache-dtype fp8",
        )


@dataclass(frozen=True, slots=True)
class Limit:
    """How a setting is one of `SchedulerLimits`: under which name, in which unit (as a multiple of
    the limit's), and whether it may change while the engine runs."""

    name: str | None = None  # the setting's own
    unit: float = 1
    is_live: bool = True


def _limit(name: str | None = None, *, unit: float = 1, is_live: bool = True) -> dict[str, Limit]:
    """The metadata of a setting that is a limit of the scheduler's."""
    return {"limit": Limit(name, unit, is_live)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What runs in a step. Those with a `_limit` are `SchedulerLimits`, too."""

    max_num_seqs: int = field(default=256, metadata=_limit())
    """Most requests running at once."""
    max_num_batched_tokens: Count | None = field(default=None, metadata=_limit())
    """Token budget of a step; auto: 2048, or 8192 on GPUs of 70 GiB and more, 256 on a CPU, and no
    less than max-num-seqs."""
    enable_chunked_prefill: bool = field(default=True, metadata=_limit(is_live=False))
    """Split prompts across steps to share the budget with decodes; off: whole prompts only."""
    long_prefill_token_threshold: int = field(default=0, metadata=_limit())
    """Most prompt tokens one request gets in a step; longer prompts are long. 0: no such limit."""
    max_num_partial_prefills: int | None = field(default=None, metadata=_limit())
    """Most prompts that may be begun and not finished at once; default: no limit."""
    max_long_partial_prefills: int | None = field(default=None, metadata=_limit())
    """Most long ones among them, so that shorter prompts pass by; default: no limit."""
    fair_prefill: bool = field(default=True, metadata=_limit())
    """Let short prompts pass one that has begun and lacks 16 times as many tokens or more; it keeps
    half of each step's prompt tokens. Off: strictly one prompt after the other."""
    scheduler_delay_factor: float = field(default=0.0, metadata=_limit("delay_factor"))
    """Wait this many times the last prompt step's duration before prefilling, to batch prompts."""
    preemption_mode: Literal["recompute", "swap", "auto"] = field(
        default="recompute", metadata=_limit()
    )
    """What happens to a preempted request's KV: dropped, or copied to host memory and back; auto
    takes for each victim what costs less here, as measured."""
    preemption_victim: Literal["last-admitted", "least-progress", "most-blocks", "cheapest"] = (
        field(default="last-admitted", metadata=_limit())
    )
    """Which of the least urgent running requests is preempted for its elders."""
    thrash_guard: bool = field(default=True, metadata=_limit())
    """Leave blocks free when letting requests in: more of them after preemptions, and more for
    requests that were preempted before. Off: whatever fits is let in."""
    scheduling_policy: Literal["fcfs", "priority", "fair"] = field(
        default="fcfs", metadata=_limit("policy")
    )
    """fcfs: first come, first served; priority: lower priority first, urgent work may preempt;
    fair: clients (by API key if there are several, else by the field user) get equal shares."""
    priority_aging_time: float = field(default=60.0, metadata=_limit("priority_aging_s"))
    """With the priority policy: a request counts as one level more urgent than one that comes so
    many seconds later, so that nothing starves. 0: never."""
    async_scheduling: Literal["auto", "on", "off"] = "auto"
    """Launch a step before the last one's tokens are known, so that the device never waits for
    Python; auto: on CUDA."""
    max_num_queued_reqs: int | None = field(default=None, metadata=_limit())
    """Refuse requests (429) while this many wait that cannot start at once; default: no limit."""
    max_num_queued_tokens: int | None = field(default=None, metadata=_limit())
    """Refuse requests (429) whose prompt would make more tokens wait; default: no limit."""
    target_itl_ms: float | None = field(default=None, metadata=_limit("target_itl_s", unit=1e-3))
    """Inter-token latency to hold, in ms: prefill gets what measured step times leave of it, but at
    least 16 tokens a step; the log says when they take too long. Default: the whole budget."""
    step_order: Literal["decode-first", "prefill-first"] = field(
        default="decode-first", metadata=_limit()
    )
    """decode-first: prompts take what decodes leave of a step; prefill-first: no decodes in steps
    that have prompts (the first vLLM's way: better first-token, worse inter-token latency)."""
    max_queue_time: float | None = field(
        default=None, metadata=_limit("max_queue_time_s", is_live=False)
    )
    """Seconds a request may wait for its first step; then it is refused (503). Default: for ever;
    a request's own timeout (field or header) is refused with 504."""
    speculative_config: str | None = None
    """Guess tokens and verify several in a step, with the same answers: JSON with vLLM's keys, such
    as {"method": "ngram"}; docs/speculation.md."""
    trace_file: str | None = None
    """JSONL file to which every step and every ended request is written; `simulate` reads it."""

    def __post_init__(self) -> None:
        budget, delay = self.max_num_batched_tokens, self.scheduler_delay_factor
        _require(self.max_num_seqs >= 1, "max-num-seqs", self.max_num_seqs, "at least 1")
        _require(budget is None or budget >= 1, "max-num-batched-tokens", budget, "at least 1")
        _require(delay >= 0, "scheduler-delay-factor", delay, "0 or more")
        aging = self.priority_aging_time
        _require(aging >= 0, "priority-aging-time", aging, "0 or more")
        target = self.target_itl_ms
        _require(target is None or target > 0, "target-itl-ms", target, "above 0")
        if target is not None and not self.enable_chunked_prefill:
            raise ConfigError("--target-itl-ms needs chunked prefill: whole prompts cannot yield.")
        queue_time = self.max_queue_time
        _require(queue_time is None or queue_time > 0, "max-queue-time", queue_time, "above 0")
        threshold = self.long_prefill_token_threshold
        _require(threshold >= 0, "long-prefill-token-threshold", threshold, "0 or more")
        for name in (
            "max_num_queued_reqs",
            "max_num_queued_tokens",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
        ):
            limit = getattr(self, name)
            _require(limit is None or limit >= 1, name.replace("_", "-"), limit, "at least 1")
        if self.speculation() is not None and self.async_scheduling == "on":
            raise ConfigError(
                "--speculative-config needs --async-scheduling auto or off: "
                "what follows a token cannot be guessed before it is known."
            )

    def speculation(self) -> SpeculativeConfig | None:
        """How tokens are guessed; None: they are not. Raises ConfigError."""
        text = self.speculative_config
        return None if text is None else SpeculativeConfig.read(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Where it runs."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: CUDA when there is one."""
    attention_backend: Literal["auto", "triton", "flashinfer", "cpu", "reference"] = "auto"
    """Attention kernels; auto picks the fastest that works here and logs why. flashinfer: triton
    with FlashInfer, if that is installed, for long prompts."""
    batch_invariant: bool = False
    """A request's tokens are the same bit for bit whatever shares its steps and however it is cut
    or preempted; slower on a GPU, free on a CPU."""
    enforce_eager: bool = False
    """Launch each kernel by itself; without it, decode steps on CUDA replay recorded graphs."""
    cudagraph_capture_sizes: tuple[int, ...] = ()
    """Batch sizes to record graphs for; smaller steps are padded to the next. Default: 1, 2, 4 and
    every 8th up to --max-num-seqs."""
    cpu_threads: int | None = None
    """Compute threads of the CPU backend; default: one per physical core we may use."""

    def __post_init__(self) -> None:
        threads = self.cpu_threads
        _require(threads is None or threads >= 1, "cpu-threads", threads, "at least 1")
        for size in self.cudagraph_capture_sizes:
            _require(size >= 1, "cudagraph-capture-sizes", size, "at least 1")


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
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Keys clients must send as a bearer token; SERVE_LLM_API_KEY (comma separated) adds more."""
    api_key_file: str | None = None
    """File with more such keys, one per line; lines that begin with # are left out."""
    admin_api_key: tuple[str, ...] = field(default=(), repr=False)
    """Keys that routes which control the server (scheduler settings, prefix cache, aborts) then
    need; they open all others, too."""
    admin_api_key_file: str | None = None
    """File with more such keys, one per line."""
    client_weight: tuple[str, ...] = ()
    """NAME=WEIGHT: an API key or user that gets WEIGHT times the usual share (policy fair)."""
    limits_file: str | None = None
    """YAML file with each client's limits (generations at once, requests and tokens per minute) and
    weight; what is beyond is refused (429)."""
    chat_template: str | None = None
    """Jinja file (or text) used instead of the model's own chat template."""
    trust_request_chat_template: bool = False
    """Allow a request to bring its own chat template (run in a sandbox)."""
    public_metrics: bool = False
    """Serve /metrics without an API key."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose web pages may call the server (CORS), such as https://chat.example; * is all
    of them, though not for the routes that control the server. Default: only pages of its own."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in addresses (the Host header) that are answered; * is all of them. Default: all, but
    on a loopback address without API keys localhost, 127.0.0.1 and [::1], so that no web page
    can reach the server under a name of its own."""
    max_request_bytes: int = 4 * 2**20
    """Largest request body; larger ones are refused with 413."""
    max_header_bytes: int = 64 * 2**10
    """Largest head of a request (its address, headers and trailers); larger ones are refused with
    431."""
    max_connections: int = 16384
    """Most connections open at once; further ones are refused with 503."""
    tool_call_parser: Literal["none", "hermes"] = "none"
    """How the model calls tools, by vLLM's names; chat completions then take tools. A chat template
    without a place for them gets them in words."""
    reasoning_parser: Literal["none", "deepseek_r1", "qwen3", "granite"] = "none"
    """How the model writes its reasoning, by vLLM's names; chat completions then give it apart from
    the answer, in reasoning and reasoning_content."""
    max_schema_bytes: int = 262_144
    """Longest JSON schema, grammar or regular expression that a request may bring; longer ones are
    refused with 400."""
    strict_schemas: bool = False
    """Refuse every JSON schema with a keyword that cannot be enforced, also where the request does
    not say strict; otherwise the header x-serve-relaxed names such keywords."""
    max_logprobs: int = 20
    """Most alternatives per token that a request may ask for in logprobs."""
    max_answer_entries: int = 2**21
    """Most that a request may come to over all its choices, in entries: prompt tokens times
    (prompt_logprobs + 1) and, without streaming, max_tokens times (logprobs + 1)."""
    max_stored_responses: int = 1000
    """Most answers of /v1/responses that are kept for later requests; the least recently used go
    first. 0: none is kept."""
    max_stored_bytes: int = 8 * 2**20
    """Most bytes that kept answers and their conversations may take."""
    stored_response_ttl: float = 86400.0
    """Seconds after which a kept answer that nobody used is forgotten."""
    max_background_responses: int = 64
    """Most background answers of /v1/responses that may be in the making; more are refused
    (429)."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto: sampling defaults come from the model's generation_config.json."""
    timeout_keep_alive: int = 120
    """Seconds an idle connection stays open; longer than clients' pools keep theirs (about 60)."""
    timeout_receive: float | None = None
    """Seconds from a request's first byte to its last; slower ones are refused with 408. Answering
    has no such limit. Default: timeout-keep-alive, but at most 30."""
    engine_timeout: float = 20.0
    """Seconds without a sign of life from the engine's process after which /health and new requests
    get 503, as long as it owes answers. A slow step is no silence."""
    step_timeout: float = 600.0
    """Seconds that the engine may take for a step before it counts as stuck, with the same
    effect; must exceed the slowest step."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests may still take after SIGTERM (and drain-delay)."""
    drain_delay: float = 0.0
    """Seconds after SIGTERM in which /ready answers 503 but requests are still taken, so that load
    balancers turn away first."""
    engine_restarts: int = 1
    """How often within a minute an engine process that died is started again; every open request
    then goes on where it was. 0: the server ends with it."""
    disable_log_requests: bool = False
    """Do not log a line per request."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is logged."""
    metrics_prefix: str = "serve_llm_"
    """Prefix of every metric; "vllm:" gives vLLM's exact names."""

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, "port", self.port, "between 0 and 65535")
        size, logprobs = self.max_request_bytes, self.max_logprobs
        _require(size >= 1024, "max-request-bytes", size, "at least 1024")
        head = self.max_header_bytes
        _require(head >= 1024, "max-header-bytes", head, "at least 1024")
        schema = self.max_schema_bytes
        _require(schema >= 1, "max-schema-bytes", schema, "at least 1")
        _require(logprobs >= 0, "max-logprobs", logprobs, "0 or more")
        entries = self.max_answer_entries
        _require(entries >= 1, "max-answer-entries", entries, "at least 1")
        for name in ("max_stored_responses", "max_stored_bytes", "max_background_responses"):
            limit = getattr(self, name)
            _require(limit >= 0, name.replace("_", "-"), limit, "0 or more")
        ttl = self.stored_response_ttl
        _require(ttl > 0, "stored-response-ttl", ttl, "above 0 seconds")
        for pair in self.client_weight:
            _require(_weight(pair) is not None, "client-weight", pair, "NAME=WEIGHT, above 0")
        timeout, prefix = self.shutdown_timeout, self.metrics_prefix
        restarts = self.engine_restarts
        _require(0 <= restarts <= 100, "engine-restarts", restarts, "between 0 and 100")
        idle = self.timeout_keep_alive
        _require(idle >= 1, "timeout-keep-alive", idle, "at least 1 second")
        receive, most = self.timeout_receive, self.max_connections
        _require(receive is None or receive > 0, "timeout-receive", receive, "above 0 seconds")
        _require(most >= 1, "max-connections", most, "at least 1")
        for flag in ("engine_timeout", "step_timeout"):
            seconds = getattr(self, flag)
            _require(seconds >= 2, flag.replace("_", "-"), seconds, "at least 2 seconds")
        _require(timeout >= 0, "shutdown-timeout", timeout, "0 or more seconds")
        _require(self.drain_delay >= 0, "drain-delay", self.drain_delay, "0 or more seconds")
        _require(
            re.fullmatch(r"[A-Za-z_:][A-Za-z0-9_:]*", prefix) is not None,
            "metrics-prefix",
            repr(prefix),
            "letters, digits, _ and :, not beginning with a digit",
        )

    def receive_timeout_s(self) -> float:
        """`timeout_receive`, or what it is by default."""
        if self.timeout_receive is None:
            return float(min(self.timeout_keep_alive, MAX_RECEIVE_TIMEOUT_S))
        return self.timeout_receive

    def client_weights(self) -> dict[str, float]:
        """The shares of API keys and users that have one of their own."""
        return {pair.rpartition("=")[0]: _weight(pair) or 1.0 for pair in self.client_weight}


def _weight(pair: str) -> float | None:
    """WEIGHT of NAME=WEIGHT; None if it is none."""
    name, _, text = pair.rpartition("=")
    try:
        weight = float(text)
    except ValueError:
        return None
    return weight if name and 0 < weight < math.inf else None


def api_keys_from_environment() -> tuple[str, ...]:
    """Keys in SERVE_LLM_API_KEY, comma separated."""
    return tuple(k.strip() for k in os.environ.get("SERVE_LLM_API_KEY", "").split(",") if k.strip())


def let_idle_threads_sleep() -> None:
    """Before torch is loaded: its idle OpenMP threads spin for a fraction of a millisecond only.

    By default they spin for about six, on cores that the kernels' own threads need, whenever a step
    edits or copies a row of logits. Who has set how OpenMP waits keeps that.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "20000"


def engine_environment() -> dict[str, str]:
    """The environment for the engine's process: ours, without keys that it has no use for."""
    return {name: value for name, value in os.environ.items() if name not in _SECRETS}


def cache_folder() -> Path:
    """Where downloaded models and compiled kernels are kept: SERVE_LLM_CACHE, or our part of the
    user's cache."""
    if own := os.environ.get("SERVE_LLM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "serve-llm"
