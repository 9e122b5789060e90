"""The settings of `serve-llm bench …`: frozen dataclasses whose fields become flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal, Self

from serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Lengths:
    """A number of tokens, or a range from which each request draws uniformly."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, flag: str) -> Self:
        """ "128" or "8:256". Raises ConfigError."""
        low, _, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high or low))
        except ValueError:
            lengths = cls(0, 0)
        if not 1 <= lengths.low <= lengths.high:
            raise ConfigError(f"--{flag} {text} is not a length such as 128 or 8:256.")
        return lengths

    def draw(self, rng: Random) -> int:
        """One length."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """Which server, and how it is asked."""

    base_url: str = "http://127.0.0.1:8000"
    """Where the server listens, without /v1."""
    model: str | None = None
    """Name sent with each request; default: the first that /v1/models lists."""
    endpoint: Literal["completions", "chat"] = "completions"
    """/v1/completions or /v1/chat/completions."""
    api_key: str | None = None
    """Sent as a bearer token."""
    stream: bool = True
    """Ask for a stream; off: the whole answer counts as the first token."""
    ignore_eos: bool = True
    """Ask for exactly output-len tokens (an extension most servers know)."""
    temperature: float = 0.0
    """Sampling temperature."""
    extra_body: str = "{}"
    """JSON object with more fields for each request."""
    timeout: float = 600.0
    """Seconds after which a request counts as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """What is asked."""

    dataset: Literal["random", "shared-prefix", "mixed", "jsonl"] = "random"
    """random prompts; the same after shared prefixes; short and long ones mixed; a file."""
    dataset_path: Path | None = None
    """For jsonl: lines with prompt (text or ids) or messages; output_len, arrival_s if known."""
    num_prompts: int = 100
    """Number of requests (of a file: at most)."""
    input_len: str = "32"
    """Tokens of a random prompt: 32, or 16:64 to draw from a range."""
    output_len: str = "128"
    """Tokens asked for: 128, or 8:256 to draw from a range."""
    prefix_len: int = 512
    """For shared-prefix: tokens in front of each prompt."""
    num_prefixes: int = 1
    """For shared-prefix: number of different prefixes."""
    long_share: float = 0.1
    """For mixed: share of prompts that are long."""
    long_input_len: str = "1024"
    """For mixed: tokens of a long prompt."""
    prompt_format: Literal["auto", "ids", "words"] = "auto"
    """Random prompts as token ids (exact), or as common words, about a token each; auto: ids for
    completions, words for chat."""
    max_token_id: int = 30000
    """Random ids are drawn from 1000 to here; keep it below the model's vocabulary."""
    seed: int = 0
    """Same seed, same prompts, lengths and arrivals."""

    def __post_init__(self) -> None:
        for flag in ("input_len", "output_len", "long_input_len"):
            Lengths.parse(getattr(self, flag), flag.replace("_", "-"))
        if self.num_prompts < 1:
            raise ConfigError(f"--num-prompts {self.num_prompts} is not possible: at least 1.")
        if (self.dataset == "jsonl") != (self.dataset_path is not None):
            raise ConfigError("--dataset jsonl and --dataset-path FILE go together.")
        if self.max_token_id <= 1000:
            raise ConfigError(f"--max-token-id {self.max_token_id} must be above 1000.")
        if not 0 <= self.long_share <= 1:
            raise ConfigError(f"--long-share {self.long_share} must be between 0 and 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalOptions:
    """When it is asked."""

    request_rate: float = float("inf")
    """Requests a second, whatever the server does (open loop); inf: all at once."""
    arrivals: Literal["poisson", "fixed", "trace"] = "poisson"
    """Gaps at this rate: exponential or equal; trace: as recorded in the file's arrival_s."""
    max_concurrency: int | None = None
    """Most requests open at once; with rate inf this is a closed loop."""
    num_warmups: int = 1
    """Requests sent, and forgotten, before the clock starts."""

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"--request-rate {self.request_rate} must be above 0.")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency {self.max_concurrency} must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What becomes of the figures."""

    goodput: tuple[str, ...] = ()
    """Limits in ms that a good request keeps: ttft:1000 tpot:50 e2e:9000."""
    output_json: Path | None = None
    """File for all figures, with every request's times."""
    plot: Path | None = None
    """PNG file for a plot (needs matplotlib: pip install 'serve-llm[bench]')."""
    progress: bool = True
    """Show a progress bar."""

    def __post_init__(self) -> None:
        self.limits_ms()

    def limits_ms(self) -> Mapping[str, float]:
        """`goodput` as a mapping. Raises ConfigError."""
        limits = {}
        for text in self.goodput:
            name, _, value = text.partition(":")
            try:
                limits[name] = float(value)
            except ValueError:
                limits[""] = 0.0
        if not limits.keys() <= {"ttft", "tpot", "e2e"}:
            given = " ".join(self.goodput)
            raise ConfigError(f"--goodput {given}: give limits such as ttft:1000 tpot:50 e2e:9000.")
        return limits


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """What the engine alone is asked."""

    num_prompts: int | None = None
    """Prompts given at once; default: 64 for throughput, 1 for latency."""
    input_len: str = "32"
    """Tokens of a prompt: 32, or 16:64 to draw from a range."""
    output_len: str = "128"
    """Tokens generated: 128, or 8:256 to draw from a range."""
    repeats: int = 3
    """Timed runs."""
    warmups: int = 1
    """Runs before them that are not counted."""
    workload_seed: int = 0
    """Same seed, same prompts and lengths."""
    output_json: Path | None = None
    """File for the figures."""

    def __post_init__(self) -> None:
        for flag in ("input_len", "output_len"):
            Lengths.parse(getattr(self, flag), flag.replace("_", "-"))
        if self.num_prompts is not None and self.num_prompts < 1:
            raise ConfigError(f"--num-prompts {self.num_prompts} must be at least 1.")
        if self.repeats < 1 or self.warmups < 0:
            raise ConfigError("--repeats must be at least 1, and --warmups 0 or more.")
