"""`/metrics`: names, types, values, and what Prometheus' own checker says."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve.api.figures.metrics import Metrics, one_two_five
from serve.config import ServerConfig
from serve.engine.observer import FinishedRequest
from serve.engine.served_model import ServedModel
from serve.messages import EngineReady, EngineStats, FinishReason, RequestTimes
from serve.sampling_params import SamplingParams
from tests.api.conftest import ANSWER, Server, running_server

READY = EngineReady(
    max_model_len=2048,
    num_blocks=100,
    block_size=16,
    num_host_blocks=50,
    vocab_size=1000,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    device="cpu",
    dtype="bfloat16",
    attention_backend="reference",
    cache_dtype="float8_e4m3fn",
)
MODEL = ServedModel(("a", "b"), 2048, 1000, frozenset(), {})

GAUGES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "kv_cache_usage_perc",
    "cache_config_info",
]
COUNTERS = [
    "num_preemptions_total",
    "num_preemptions_by_mode_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "preemption_tokens_recomputed_total",
    "preemption_bytes_swapped_total",
    "request_success_total",
]
HISTOGRAMS = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "request_num_preemptions",
]


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics("serve_llm_")
    metrics.engine_ready(READY, MODEL)
    return metrics


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """One sample of our own prefix, found by its name and some of its labels."""
    samples = [
        sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name == f"serve_llm_{name}" and labels.items() <= sample.labels.items()
    ]
    assert len(samples) == 1, (name, labels, samples)
    return float(samples[0])


def finished(**fields: object) -> FinishedRequest:
    usual: dict[str, object] = {
        "reason": FinishReason.STOP,
        "times": RequestTimes(10.0, 11.0, 13.0, 17.0, 2),
        "num_prompt_tokens": 7,
        "num_generated_tokens": 5,
        "num_cached_tokens": 3,
        "sampling": SamplingParams(max_tokens=20),
    }
    return FinishedRequest(**{**usual, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix", ["serve_llm_", "vllm:"])
def test_every_figure_exists_from_the_start_with_its_type(prefix: str) -> None:
    metrics = Metrics(prefix)
    metrics.engine_ready(READY, MODEL)
    text = metrics.render().decode()

    types = dict(re.findall(rf"# TYPE {prefix}(\S+) (\w+)", text))

    assert {name: types[name] for name in GAUGES} == dict.fromkeys(GAUGES, "gauge")
    assert {name: types[name] for name in COUNTERS} == dict.fromkeys(COUNTERS, "counter")
    assert {name: types[name] for name in HISTOGRAMS} == dict.fromkeys(HISTOGRAMS, "histogram")
    steps = "iteration_tokens_total" if prefix == "vllm:" else "iteration_tokens"
    assert types[steps] == "histogram"
    assert "_created" not in text
    labelled = re.findall(rf"^{prefix}\w+{{(.*)}} ", text, re.MULTILINE)
    assert len(labelled) > 100
    assert all('model_name="a"' in labels and 'engine="0"' in labels for labels in labelled)


def test_what_preemption_and_the_prefix_cache_did_is_counted() -> None:
    metrics = Metrics("serve_llm_")
    metrics.engine_ready(replace(READY, block_bytes=1000), MODEL)
    metrics.stepped(
        EngineStats(
            total_prefix_cache_queries=90,
            total_prefix_cache_hits=32,
            total_preemption_tokens_recomputed=17,
            total_preemption_blocks_swapped=3,
        )
    )
    metrics.stepped(
        EngineStats(
            total_prefix_cache_queries=100,
            total_prefix_cache_hits=48,
            total_preemption_tokens_recomputed=17,
            total_preemption_blocks_swapped=3,
        )
    )

    assert value(metrics, "prefix_cache_queries_total") == 100
    assert value(metrics, "prefix_cache_hits_total") == 48
    assert value(metrics, "preemption_tokens_recomputed_total") == 17
    assert value(metrics, "preemption_bytes_swapped_total") == 3000


def test_met_01_preemptions_are_counted_by_what_the_engine_gained(metrics: Metrics) -> None:
    assert value(metrics, "num_preemptions_total") == 0
    assert value(metrics, "num_preemptions_by_mode_total", mode="swap") == 0

    metrics.stepped(EngineStats(total_preemptions_recompute=3, total_preemptions_swap=1))
    metrics.stepped(EngineStats(total_preemptions_recompute=3, total_preemptions_swap=4))

    assert value(metrics, "num_preemptions_total") == 7
    assert value(metrics, "num_preemptions_by_mode_total", mode="recompute") == 3
    assert value(metrics, "num_preemptions_by_mode_total", mode="swap") == 4


def test_met_03_steps_are_observed_with_their_size(metrics: Metrics) -> None:
    metrics.stepped(EngineStats(step_tokens=[4, 4], total_prompt_tokens=8))
    metrics.stepped(
        EngineStats(step_tokens=[1, 1], total_prompt_tokens=9, total_generation_tokens=2)
    )

    assert value(metrics, "iteration_tokens_count") == 4
    assert value(metrics, "iteration_tokens_sum") == 10
    assert value(metrics, "iteration_tokens_bucket", le="1.0") == 2
    assert value(metrics, "iteration_tokens_bucket", le="8.0") == 4
    assert value(metrics, "prompt_tokens_total") == 9
    assert value(metrics, "generation_tokens_total") == 2


def test_met_05_usage_is_the_share_that_live_requests_hold(metrics: Metrics) -> None:
    stats = EngineStats(num_blocks_used=25, num_blocks=100, num_running=2, num_waiting=3)
    metrics.stepped(stats)
    assert value(metrics, "kv_cache_usage_perc") == 0.25
    assert value(metrics, "host_kv_cache_usage_perc") == 0  # no host blocks at all: none in use
    assert value(metrics, "num_requests_running") == 2
    assert value(metrics, "num_requests_waiting") == 3

    metrics.stepped(EngineStats(num_blocks=100))

    assert value(metrics, "kv_cache_usage_perc") == 0
    assert value(metrics, "num_requests_running") == 0


def test_met_02_a_finished_request_is_observed_once_in_each_span(metrics: Metrics) -> None:
    metrics.first_token(3.0, 0)
    for gap in (1.0, 1.0, 1.0, 1.0):
        metrics.inter_token(gap, 0)
    metrics.request_finished(finished())

    sums = {
        "time_to_first_token_seconds": 3,
        "e2e_request_latency_seconds": 7,
        "request_queue_time_seconds": 1,
        "request_inference_time_seconds": 6,
        "request_prefill_time_seconds": 2,
        "request_decode_time_seconds": 4,
        "request_time_per_output_token_seconds": 1,
        "request_prompt_tokens": 7,
        "request_generation_tokens": 5,
        "request_params_max_tokens": 20,
        "request_num_preemptions": 2,
    }
    for name, expected in sums.items():
        assert value(metrics, f"{name}_count") == 1, name
        assert value(metrics, f"{name}_sum") == expected, name
    assert value(metrics, "inter_token_latency_seconds_count") == 4
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert value(metrics, "prompt_tokens_cached_total") == 3


def test_spans_whose_ends_are_unknown_are_left_out(metrics: Metrics) -> None:
    times = RequestTimes(10.0, None, None, 12.0, 0)
    metrics.request_finished(
        finished(reason=FinishReason.ABORT, times=times, num_generated_tokens=0)
    )

    assert value(metrics, "request_success_total", finished_reason="abort") == 1
    assert value(metrics, "request_success_total", finished_reason="stop") == 0
    assert value(metrics, "e2e_request_latency_seconds_count") == 1
    for name in ("queue_time", "prefill_time", "decode_time", "inference_time"):
        assert value(metrics, f"request_{name}_seconds_count") == 0


def test_met_02_counts_agree_after_many_requests() -> None:
    with running_server() as server, server.http() as http:
        for i in range(10):
            http.post("/v1/completions", json={"prompt": "Hello", "n": 1 + i % 2, "max_tokens": 99})
        text = http.get("/metrics").text

    counts = {
        name: float(re.findall(rf"^serve_llm_{name}_count{{.*}} (\S+)$", text, re.MULTILINE)[0])
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds")
    }
    assert set(counts.values()) == {15.0}
    assert 'request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 15.0' in text
    assert (
        f"serve_llm_generation_tokens_total{{}} {15 * (len(server.ids(ANSWER)) + 1)}.0"
        in re.sub(r"{.*?}", "{}", text)
    )


def test_the_cache_settings_are_labels(metrics: Metrics) -> None:
    assert (
        value(
            metrics,
            "cache_config_info",
            block_size="16",
            num_gpu_blocks="100",
            num_cpu_blocks="50",
            cache_dtype="float8_e4m3fn",
        )
        == 1
    )


def test_buckets_of_lengths_end_with_the_context() -> None:
    assert one_two_five(2048) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    assert one_two_five(1) == [1]


def test_metrics_are_served_under_the_configured_prefix() -> None:
    config = ServerConfig(metrics_prefix="vllm:")
    with running_server(config) as server, server.http() as http:
        response = http.get("/metrics")

    assert response.headers["content-type"].startswith("text/plain")
    assert "vllm:num_preemptions_total{" in response.text


def test_promtool_has_nothing_to_say(http: httpx.Client, server: Server) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (of the Debian package prometheus) is not installed")
    http.post("/v1/completions", json={"prompt": "Hello"})
    text = http.get("/metrics").text

    check = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30
    )

    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


def test_drafts_are_counted_with_vllms_names_where_there_are_any(metrics: Metrics) -> None:
    assert b"spec_decode" not in metrics.render()
    drafting = Metrics("vllm:")
    drafting.engine_ready(replace(READY, num_drafts=3), MODEL)
    assert b'vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 0.0' in drafting.render()
    for drafts, per_pos in ((2, (2, 1, 0)), (5, (4, 2, 1))):
        drafting.stepped(
            EngineStats(
                total_spec_drafts=drafts,
                total_spec_draft_tokens=3 * drafts,
                total_spec_accepted_tokens=sum(per_pos),
                spec_accepted_per_pos=per_pos,
            )
        )
    shown = drafting.render().decode()
    labels = 'engine="0",model_name="a"'
    for line in (
        f"vllm:spec_decode_num_drafts_total{{{labels}}} 5.0",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} 15.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 7.0",
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}} 4.0',
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="2"}} 1.0',
    ):
        assert line in shown


def test_totals_of_drafts_go_on_after_a_restart() -> None:
    past = EngineStats(total_spec_drafts=3, spec_accepted_per_pos=(2, 1))
    assert EngineStats().after(past).spec_accepted_per_pos == (2, 1)
    now = EngineStats(total_spec_drafts=1, spec_accepted_per_pos=(1, 0)).after(past)
    assert (now.total_spec_drafts, now.spec_accepted_per_pos) == (4, (3, 1))
