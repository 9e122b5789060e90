"""The server's figures for Prometheus: the engine's observer on one side, text on the other.

Names are vLLM's. Under another prefix than `vllm:` one of them changes: a histogram must not end in
`_total` (Prometheus keeps that for counters), so `iteration_tokens_total` is `iteration_tokens`.
"""

from __future__ import annotations

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    generate_latest,
)
from prometheus_client.process_collector import ProcessCollector

from serve.api.figures.registry import Joined, Maker
from serve.api.figures.speculation import SpeculationFigures
from serve.engine.observer import FinishedRequest
from serve.engine.served_model import ServedModel
from serve.messages import EngineReady, EngineStats, FinishReason

REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
INTER_TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


class Metrics:
    """What `/metrics` shows, in a registry of its own. Implements EngineObserver."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._registries = [CollectorRegistry()]  # of the process, and one for each engine
        ProcessCollector(registry=self._registries[0])
        self._engines: list[EngineFigures] = []  # by number; none before they are ready

    def render(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(Joined(self._registries))

    def engine_ready(self, ready: EngineReady, model: ServedModel) -> None:
        """From here on every figure of every engine exists; counters with 0."""
        for number in range(ready.num_engines):
            registry = CollectorRegistry()
            self._registries.append(registry)
            self._engines.append(EngineFigures(self._prefix, registry, ready, model, engine=number))

    def engine_restarted(self, engine: int) -> None:
        """Count it; the figures stay and go on."""
        self._engines[engine].restarts.inc()

    def stepped(self, stats: EngineStats) -> None:
        """Take over the engine's state."""
        self._engines[stats.engine].stepped(stats)

    def first_token(self, latency_s: float, engine: int) -> None:
        """Once per request."""
        self._engines[engine].first_token.observe(latency_s)

    def inter_token(self, gap_s: float, engine: int) -> None:
        """Once per later delta."""
        self._engines[engine].inter_token.observe(gap_s)

    def request_finished(self, finished: FinishedRequest) -> None:
        """Once per request."""
        self._engines[finished.engine].request_finished(finished)

    def client_refused(self, client: str, limit: str) -> None:
        """One of a client's own limits was reached, before any engine heard of it."""
        self._engines[0].client_refused(client, limit)


class EngineFigures:
    """One engine's metrics: made once, bound to its labels, changed by the methods below."""

    def __init__(
        self,
        prefix: str,
        registry: CollectorRegistry,
        ready: EngineReady,
        model: ServedModel,
        engine: int,
    ) -> None:
        make = Maker(prefix, registry, model.names[0], engine)
        lengths = one_two_five(model.max_model_len)
        self._last = EngineStats()
        self._spec = None if ready.num_drafts == 0 else SpeculationFigures(make, ready.num_drafts)

        self._running = make.gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = make.gauge("num_requests_waiting", "Requests waiting for their first step.")
        self._swapped = make.gauge("num_requests_swapped", "Requests swapped out to host memory.")
        self._kv_usage = make.gauge(
            "kv_cache_usage_perc", "Share of KV blocks held by live requests; 1 is all."
        )
        self._host_usage = make.gauge(
            "host_kv_cache_usage_perc", "Share of host KV blocks held by swapped requests."
        )
        self._cached_blocks = make.gauge(
            "prefix_cache_blocks", "KV blocks whose content the prefix cache can find."
        )
        self._pinned_blocks = make.gauge(
            "prefix_cache_pinned_blocks", "KV blocks that pinned prefixes hold."
        )
        info = {
            "block_size": str(ready.block_size),
            "num_gpu_blocks": str(ready.num_blocks),
            "num_cpu_blocks": str(ready.num_host_blocks),
            "cache_dtype": ready.cache_dtype,
        }
        make.gauge("cache_config_info", "The KV cache's settings, as labels.", info).set(1)

        self._preemptions = make.counter("num_preemptions", "Preemptions of running requests.")
        by_mode = "Preemptions by what happened to the request's KV."
        self._preemptions_recompute, self._preemptions_swap = make.counters(
            "num_preemptions_by_mode", by_mode, "mode", ["recompute", "swap"]
        )
        self._recomputed_tokens = make.counter(
            "preemption_tokens_recomputed", "Computed tokens that preemptions dropped."
        )
        self._swapped_bytes = make.counter(
            "preemption_bytes_swapped", "KV bytes that preemptions copied, out and in."
        )
        self._block_bytes = ready.block_bytes
        self._prefix_queries = make.counter(
            "prefix_cache_queries", "Tokens looked up in the prefix cache."
        )
        self._prefix_hits = make.counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._prompt_tokens = make.counter("prompt_tokens", "Prompt tokens processed, each once.")
        self._generation_tokens = make.counter("generation_tokens", "Tokens generated.")
        self._cached_tokens = make.counter(
            "prompt_tokens_cached", "Prompt tokens of finished requests that a cache had."
        )
        self.restarts = make.counter(
            "engine_restarts", "Deaths of the engine process after which it was started again."
        )
        self._refusals = make.family(
            "client_limit_refusals",
            "Requests that a client's own limit refused.",
            "client",
            "limit",
        )
        reasons = list(FinishReason)
        ended = "Finished requests by why they ended."
        counters = make.counters(
            "request_success", ended, "finished_reason", [reason.value for reason in reasons]
        )
        self._finished = dict(zip(reasons, counters, strict=True))

        self.first_token = make.histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_SECONDS
        )
        self.inter_token = make.histogram(
            "inter_token_latency_seconds", "Between successive tokens.", INTER_TOKEN_SECONDS
        )
        self._per_token = make.histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time per token after the first.",
            INTER_TOKEN_SECONDS,
        )
        self._e2e, self._queue, self._inference, self._prefill, self._decode = (
            make.histogram(name, text, REQUEST_SECONDS)
            for name, text in (
                ("e2e_request_latency_seconds", "From arrival to the last token."),
                ("request_queue_time_seconds", "From arrival to the first step."),
                ("request_inference_time_seconds", "From the first step to the last token."),
                ("request_prefill_time_seconds", "From the first step to the first token."),
                ("request_decode_time_seconds", "From the first token to the last."),
            )
        )
        name = "iteration_tokens_total" if prefix == "vllm:" else "iteration_tokens"
        self._step_tokens = make.histogram(name, "Tokens computed in one step.", STEP_TOKENS)
        self._request_prompt = make.histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", lengths
        )
        self._request_generation = make.histogram(
            "request_generation_tokens", "Tokens generated for a request.", lengths
        )
        self._request_max_tokens = make.histogram(
            "request_params_max_tokens", "The max_tokens of a request.", lengths
        )
        self._request_preemptions = make.histogram(
            "request_num_preemptions", "How often a request was preempted.", PREEMPTIONS
        )

    def client_refused(self, client: str, limit: str) -> None:
        """Count a refusal by a limit of --limits-file."""
        self._refusals(client=client, limit=limit).inc()

    def stepped(self, stats: EngineStats) -> None:
        """Gauges show `stats`; counters advance by what its totals gained."""
        last, self._last = self._last, stats
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._swapped.set(stats.num_swapped)
        self._kv_usage.set(_share(stats.num_blocks_used, stats.num_blocks))
        self._host_usage.set(_share(stats.num_host_blocks_used, stats.num_host_blocks))
        self._cached_blocks.set(stats.num_blocks_cached)
        self._pinned_blocks.set(stats.num_blocks_pinned)
        recomputed = stats.total_preemptions_recompute - last.total_preemptions_recompute
        swapped = stats.total_preemptions_swap - last.total_preemptions_swap
        if recomputed or swapped:
            self._preemptions.inc(recomputed + swapped)
            self._preemptions_recompute.inc(recomputed)
            self._preemptions_swap.inc(swapped)
        self._recomputed_tokens.inc(
            stats.total_preemption_tokens_recomputed - last.total_preemption_tokens_recomputed
        )
        num_blocks = stats.total_preemption_blocks_swapped - last.total_preemption_blocks_swapped
        self._swapped_bytes.inc(num_blocks * self._block_bytes)
        self._prefix_queries.inc(stats.total_prefix_cache_queries - last.total_prefix_cache_queries)
        self._prefix_hits.inc(stats.total_prefix_cache_hits - last.total_prefix_cache_hits)
        self._prompt_tokens.inc(stats.total_prompt_tokens - last.total_prompt_tokens)
        self._generation_tokens.inc(stats.total_generation_tokens - last.total_generation_tokens)
        if self._spec is not None:
            self._spec.stepped(stats, last)
        for num_tokens in stats.step_tokens:
            self._step_tokens.observe(num_tokens)

    def request_finished(self, finished: FinishedRequest) -> None:
        """Observe a whole request; spans whose ends are unknown are left out."""
        times, num_generated = finished.times, finished.num_generated_tokens
        self._finished[finished.reason].inc()
        self._cached_tokens.inc(finished.num_cached_tokens)
        self._request_prompt.observe(finished.num_prompt_tokens)
        self._request_generation.observe(num_generated)
        if finished.sampling.max_tokens is not None:
            self._request_max_tokens.observe(finished.sampling.max_tokens)
        self._request_preemptions.observe(times.num_preemptions)
        self._e2e.observe(times.finished_time - times.arrival_time)
        if times.first_token_time is not None:
            decode_s = times.finished_time - times.first_token_time
            self._decode.observe(decode_s)
            if num_generated > 1:
                self._per_token.observe(decode_s / (num_generated - 1))
        if times.first_scheduled_time is not None:
            self._queue.observe(times.first_scheduled_time - times.arrival_time)
            self._inference.observe(times.finished_time - times.first_scheduled_time)
            if times.first_token_time is not None:
                self._prefill.observe(times.first_token_time - times.first_scheduled_time)


def one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 … up to `limit`."""
    steps = (digit * 10**power for power in range(len(str(limit))) for digit in (1, 2, 5))
    return [step for step in steps if step <= limit]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
