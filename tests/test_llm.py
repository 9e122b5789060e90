"""Offline generation over the real engine, with a tiny random model."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.errors import ConfigError, EngineDead, InvalidRequest, PromptTooLong
from serve.llm import engine_config
from serve.worker import local_executor
from serve.worker.worker import Worker
from tests.e2e.tiny_model import save_tiny_model

SETTINGS = {"device": "cpu", "attention_backend": "reference", "cpu_threads": 1, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), max_model_len=128)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **SETTINGS) as llm:
        yield llm


def test_sch_25_every_call_returns_its_own_results_in_order(llm: LLM) -> None:
    first = llm.generate(["one", "two", "three"], GREEDY)
    second = llm.generate(["three", "four", "one"], GREEDY)
    assert [o.prompt for o in first] == ["one", "two", "three"]
    assert [o.prompt for o in second] == ["three", "four", "one"]
    assert second[0].token_ids == first[2].token_ids
    assert second[2].token_ids == first[0].token_ids
    assert {len(o.token_ids) for o in first + second} == {6}
    assert {o.finish_reason for o in first} == {"length"}


def test_a_single_text_is_one_prompt_and_no_prompts_give_no_outputs(llm: LLM) -> None:
    (output,) = llm.generate("one", GREEDY)
    assert output == llm.generate(["one"], GREEDY)[0]
    assert llm.generate([], GREEDY) == []


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    (from_text,) = llm.generate("one", GREEDY)
    (from_ids,) = llm.generate([from_text.prompt_token_ids], GREEDY)
    assert from_ids.prompt is None
    assert from_ids.token_ids == from_text.token_ids
    assert from_ids.text == from_text.text


def test_each_prompt_may_have_its_own_sampling(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 5)]
    assert [len(o.token_ids) for o in llm.generate(["a", "b"], params)] == [1, 5]
    with pytest.raises(InvalidRequest, match="3 prompts, but 2"):
        llm.generate(["a", "b", "c"], params)


def test_stops_and_logprobs_come_as_asked(llm: LLM) -> None:
    (plain,) = llm.generate("one", GREEDY)
    stop_at = plain.token_ids[3]
    asked = SamplingParams(
        temperature=0.0,
        max_tokens=6,
        ignore_eos=True,
        stop_token_ids=(stop_at,),
        logprobs=2,
        prompt_logprobs=1,
    )
    (stopped,) = llm.generate("one", asked)
    end = plain.token_ids.index(stop_at) + 1
    assert stopped.token_ids == plain.token_ids[:end]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop_at)
    assert stopped.logprobs is not None
    assert [s.token_id for s in stopped.logprobs] == stopped.token_ids
    assert all(len(s.top_token_ids) == 2 for s in stopped.logprobs)
    assert stopped.prompt_logprobs is not None
    assert [s.token_id for s in stopped.prompt_logprobs] == stopped.prompt_token_ids[1:]
    assert plain.logprobs is plain.prompt_logprobs is None


def test_a_prompt_that_can_never_fit_is_refused_before_anything_runs(llm: LLM) -> None:
    before = llm.stats.total_prompt_tokens
    with pytest.raises(PromptTooLong, match="128"):
        llm.generate(["fits", "x" * 500], GREEDY)
    llm.generate("y", GREEDY)
    assert llm.stats.total_prompt_tokens - before == len("y")


def test_it_works_where_an_event_loop_is_running(llm: LLM) -> None:
    async def notebook_cell() -> int:
        return len(llm.generate("one", GREEDY)[0].token_ids)

    assert asyncio.run(notebook_cell()) == 6


def test_progress_shows_a_bar_that_reaches_the_end(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(["one", "two"], GREEDY, progress=True)
    shown = capsys.readouterr().err
    assert "generating" in shown
    assert "2/2" in shown
    assert "12 tokens" in shown
    llm.generate(["one"], GREEDY)
    assert capsys.readouterr() == ("", "")


def test_preemption_is_real_and_changes_nothing(model: Path, llm: LLM) -> None:
    prompts = [f"{'long ' * 4}{n}" for n in range(6)]
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = [o.token_ids for o in llm.generate(prompts, sampling)]
    for mode, counter in (("recompute", "recompute"), ("swap", "swap")):
        small = {"num_gpu_blocks_override": 14, "block_size": 8, "swap_space": 0.1}
        with LLM(str(model), preemption_mode=mode, **SETTINGS, **small) as crowded:
            got = [o.token_ids for o in crowded.generate(prompts, sampling)]
            stats = crowded.stats
        assert got == expected
        assert getattr(stats, f"total_preemptions_{counter}") > 0
        assert stats.num_blocks_used == stats.num_running == stats.num_swapped == 0


def test_after_close_nothing_can_be_generated_and_closing_again_is_harmless(model: Path) -> None:
    llm = LLM(str(model), **SETTINGS)
    assert llm.ready.max_model_len == 128
    llm.close()
    llm.close()
    with pytest.raises(EngineDead, match="was closed"):
        llm.generate("one", GREEDY)


def test_settings_are_named_as_in_the_config_and_sizes_may_be_written_out() -> None:
    config = engine_config(
        model="m",
        max_model_len=512,
        kv_cache_memory_bytes="2GiB",
        max_num_batched_tokens="1k",
        preemption_mode="auto",
    )
    assert config.model.model == "m"
    assert config.model.max_model_len_tokens() == 512
    assert config.cache.kv_cache_memory_bytes == 2**31
    assert config.scheduler.max_num_batched_tokens == 1000
    assert config.scheduler.preemption_mode == "auto"
    assert engine_config() == EngineConfig()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blocksize": 4}, "blocksize is not an engine setting.*block_size"),
        ({"kv_cache_memory_bytes": "lots"}, "kv_cache_memory_bytes: 'lots'"),
        ({"block_size": 0}, "--block-size 0"),
        ({"model": "/no/such/model"}, "/no/such/model does not exist"),
    ],
)
def test_settings_that_cannot_work_are_config_errors(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**settings)  # type: ignore[arg-type]


def test_importing_serve_is_cheap() -> None:
    code = "import sys, serve; serve.__version__; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert printed.stdout == b"False\n"


def test_a_second_llm_starts_without_the_collector_when_the_first_is_gone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that the first one fills, the second starts only if nothing waits for it."""
    made: list[weakref.ref[Worker]] = []

    def make_worker(config: EngineConfig, path: Path) -> Worker:
        assert [ref() for ref in made] == [None] * len(made), "an earlier model is still in memory"
        worker = Worker(config, path)
        made.append(weakref.ref(worker))
        return worker

    monkeypatch.setattr(local_executor, "Worker", make_worker)
    gc.collect()
    gc.disable()
    try:
        answers = []
        for _ in range(2):
            with LLM(str(model), **SETTINGS) as llm:
                answers.append(llm.generate(["one"], GREEDY)[0].token_ids)
                assert made[-1]() is not None
            assert made[-1]() is None
    finally:
        gc.enable()
    assert len(made) == 2
    assert answers[0] == answers[1]
