"""The front: what it sends, what its readers get, and when it aborts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from serve.engine.async_engine import AsyncEngine
from serve.engine.control_calls import MAX_OPEN
from serve.engine.outputs import RequestOutput
from serve.errors import EngineDead, InvalidRequest, PromptTooLong, QueueFull, ShuttingDown
from serve.messages import FinishReason, RequestTimes, Shutdown, TokenDelta, TokenLogprobs
from serve.sampling_params import RepetitionDetection, SamplingParams
from serve.text.generation_config import GenerationConfig
from tests.engine.fake_front import InlineEngine, inline_engine, scripted_engine
from tests.fakes import reference_completion

FOUR = SamplingParams(max_tokens=4)


def ids(text: str) -> list[int]:
    """Byte-level ids of printable ASCII: the alphabet is sorted, so ! is 0."""
    return [ord(char) - ord("!") for char in text]


async def settle() -> None:
    """Give every ready task its turns."""
    for _ in range(10):
        await asyncio.sleep(0)


async def collect(outputs: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in outputs]


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def read(
    engine: AsyncEngine, sampling: SamplingParams = FOUR, *, prompt: str = "ab"
) -> asyncio.Task[list[RequestOutput]]:
    return asyncio.create_task(collect(engine.generate(ids(prompt), sampling)))


# ---------------------------------------------------------------------- a request's life


async def test_deltas_become_text_and_the_last_one_ends_the_stream() -> None:
    engine, client, _ = await scripted_engine()
    reader = read(engine, prompt="abc")
    await settle()
    (request,) = client.added
    client.step(TokenDelta(request.request_id, ids("x")))
    await settle()
    client.step(TokenDelta(request.request_id, ids("yz"), finish_reason=FinishReason.LENGTH))
    outputs = await reader
    assert [output.text for output in outputs] == ["x", "yz"]
    assert [output.num_generated_tokens for output in outputs] == [1, 3]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert outputs[-1].num_prompt_tokens == 3
    assert client.aborted == []
    await engine.close()


async def test_many_requests_at_once_each_get_the_reference_answer() -> None:
    inline = inline_engine(num_blocks=12)
    engine = await inline.start()
    prompts = [[1 + i % 7] * (1 + i % 9) for i in range(25)]
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    answers = await asyncio.gather(*(collect(engine.generate(p, sampling)) for p in prompts))
    got = [[token for output in answer for token in output.token_ids] for answer in answers]
    assert got == [reference_completion(prompt, sampling) for prompt in prompts]
    await assert_idle(inline)
    await engine.close()


async def assert_idle(inline: InlineEngine) -> None:
    """Nothing runs, waits, or holds a block."""
    await settle()
    stats = inline.core.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)


async def test_a_slow_reader_gets_one_merged_output() -> None:
    engine, client, _ = await scripted_engine()
    outputs = engine.generate(ids("a"), SamplingParams(max_tokens=100, logprobs=0))
    first = asyncio.create_task(anext(outputs))
    await settle()
    request_id = client.added[0].request_id
    score = TokenLogprobs(0, -1.0, 1, [], [])
    client.step(TokenDelta(request_id, ids("0"), logprobs=[score]))
    await first
    for char in "123456789":
        client.step(TokenDelta(request_id, ids(char), logprobs=[score]))
    await settle()
    merged = await anext(outputs)
    assert (merged.text, len(merged.token_ids), len(merged.logprobs or [])) == ("123456789", 9, 9)
    await outputs.aclose()
    await engine.close()


async def test_lim_02_no_max_tokens_means_up_to_the_context_end() -> None:
    engine, client, _ = await scripted_engine()
    reader = read(engine, SamplingParams(max_tokens=None), prompt="a" * 30)
    await settle()
    assert client.added[0].sampling.max_tokens == client.ready.max_model_len - 30
    reader.cancel()
    await settle()
    await engine.close()


# ---------------------------------------------------------------------- ends and their reasons


async def test_lim_01_a_stop_string_at_the_last_allowed_token_is_a_stop() -> None:
    engine, client, notebook = await scripted_engine()
    reader = read(engine, SamplingParams(max_tokens=3, stop=("yz",)))
    await settle()
    request_id = client.added[0].request_id
    client.step(TokenDelta(request_id, ids("xyz"), finish_reason=FinishReason.LENGTH))
    outputs = await reader
    assert text_of(outputs) == "x"
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason == "yz"
    assert client.aborted == []  # the engine was done anyway
    assert [f.reason for f in notebook.finished] == [FinishReason.STOP]
    await engine.close()


async def test_a_stop_string_ends_the_request_in_the_engine_too() -> None:
    engine, client, notebook = await scripted_engine()
    reader = read(engine, SamplingParams(max_tokens=50, stop=("yz",)))
    await settle()
    request_id = client.added[0].request_id
    client.step(TokenDelta(request_id, ids("xy")))
    client.step(TokenDelta(request_id, ids("zw")))
    client.step(TokenDelta(request_id, ids("late")))  # was on its way before the abort
    outputs = await reader
    assert text_of(outputs) == "x"
    assert sum(len(output.token_ids) for output in outputs) == 3
    assert client.aborted == [request_id]
    assert len(notebook.finished) == 1
    await engine.close()


async def test_an_output_that_repeats_itself_is_ended_where_it_does() -> None:
    engine, client, notebook = await scripted_engine()
    wanted = RepetitionDetection(max_pattern_size=3, min_count=3)
    reader = read(engine, SamplingParams(max_tokens=50, repetition_detection=wanted))
    await settle()
    request_id = client.added[0].request_id
    client.step(TokenDelta(request_id, ids("xab")))
    client.step(TokenDelta(request_id, ids("ababab")))
    outputs = await reader
    assert text_of(outputs) == "xababab"
    assert sum(len(output.token_ids) for output in outputs) == 7
    assert outputs[-1].finish_reason is FinishReason.REPETITION
    assert client.aborted == [request_id]
    assert [f.reason for f in notebook.finished] == [FinishReason.REPETITION]
    await engine.close()


async def test_an_end_at_a_repetition_is_still_the_end_it_was() -> None:
    engine, client, _ = await scripted_engine()
    wanted = RepetitionDetection(max_pattern_size=1)
    reader = read(engine, SamplingParams(max_tokens=2, repetition_detection=wanted))
    await settle()
    last = TokenDelta(client.added[0].request_id, ids("aa"), finish_reason=FinishReason.LENGTH)
    client.step(last)
    outputs = await reader
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert client.aborted == []
    await engine.close()


async def test_a_request_that_a_stop_string_ended_still_has_its_history() -> None:
    engine, client, notebook = await scripted_engine()
    reader = read(engine, SamplingParams(max_tokens=50, stop=("y",)))
    await settle()
    request = client.added[0]
    start = request.arrival_time
    told = RequestTimes(start, start + 1, start + 2, start + 2, 0)
    client.step(TokenDelta(request.request_id, ids("x"), times=told), time=start + 2)
    client.step(TokenDelta(request.request_id, ids("y")), time=start + 3)
    outputs = await reader
    assert outputs[-1].times == RequestTimes(start, start + 1, start + 2, start + 3, 0)
    assert notebook.finished[0].times.first_scheduled_time == start + 1
    await engine.close()


@pytest.mark.parametrize(
    ("sampling", "text", "stop_reason"),
    [
        (SamplingParams(max_tokens=9), "x", None),
        (SamplingParams(max_tokens=9, include_stop_str_in_output=True), "x!", None),
        (SamplingParams(max_tokens=9, stop_token_ids=(0,), ignore_eos=True), "x", 0),
    ],
)
async def test_the_token_that_stops_is_counted_but_shown_only_on_request(
    sampling: SamplingParams, text: str, stop_reason: int | None
) -> None:
    engine, client, _ = await scripted_engine(GenerationConfig(frozenset({0})))
    reader = read(engine, sampling)
    await settle()
    request_id = client.added[0].request_id
    client.step(TokenDelta(request_id, ids("x!"), finish_reason=FinishReason.STOP))
    outputs = await reader
    assert text_of(outputs) == text
    assert outputs[-1].token_ids == ids("x!")
    assert outputs[-1].stop_reason == stop_reason
    assert outputs[-1].hides_last == (text == "x")
    await engine.close()


async def test_smp_12_all_end_ids_reach_the_engine_unless_eos_is_ignored() -> None:
    engine, client, _ = await scripted_engine(GenerationConfig(frozenset({7, 9})))
    read(engine, SamplingParams(stop_token_ids=(3,)))
    read(engine, SamplingParams(stop_token_ids=(3,), ignore_eos=True))
    await settle()
    assert [request.sampling.stop_token_ids for request in client.added] == [(3, 7, 9), (3,)]
    await engine.close()


async def test_str_10_an_error_in_the_engine_ends_one_stream_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inline = inline_engine()
    inline.executor.fail_on = lambda number, plan: number == 4
    engine = await inline.start()
    failed = await collect(
        engine.generate([1, 2], SamplingParams(max_tokens=20), request_id="mine")
    )
    assert failed[-1].finish_reason is FinishReason.ERROR
    assert failed[-1].error == "request mine: internal error; see the server's log."
    assert "a step failed; it ends mine" in caplog.text
    assert "injected into step 4" in caplog.text
    following = await collect(engine.generate([1, 2], FOUR))
    assert following[-1].finish_reason is FinishReason.LENGTH
    await assert_idle(inline)
    await engine.close()


# ---------------------------------------------------------------------- aborts


async def test_str_12_closing_the_iterator_aborts_once() -> None:
    engine, client, notebook = await scripted_engine()
    outputs = engine.generate(ids("a"), SamplingParams(max_tokens=2000 // 20))
    first = asyncio.create_task(anext(outputs))
    await settle()
    request_id = client.added[0].request_id
    client.step(TokenDelta(request_id, ids("x")))
    await first
    await outputs.aclose()
    await outputs.aclose()
    assert client.aborted == [request_id]
    assert [f.reason for f in notebook.finished] == [FinishReason.ABORT]
    await engine.close()


async def test_str_12_cancelling_a_reader_aborts() -> None:
    engine, client, _ = await scripted_engine()
    reader = read(engine)
    await settle()
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert client.aborted == [client.added[0].request_id]
    await engine.close()


async def test_str_12_a_finished_request_that_is_not_read_to_its_end_is_not_aborted() -> None:
    engine, client, notebook = await scripted_engine()
    outputs = engine.generate(ids("a"), FOUR)
    first = asyncio.create_task(anext(outputs))
    await settle()
    request_id = client.added[0].request_id
    client.step(TokenDelta(request_id, ids("x")))
    await first
    client.step(TokenDelta(request_id, ids("y"), finish_reason=FinishReason.LENGTH))
    await settle()
    await outputs.aclose()
    assert client.aborted == []
    assert [f.reason for f in notebook.finished] == [FinishReason.LENGTH]
    await engine.close()


async def test_an_iterator_that_is_never_begun_sends_nothing() -> None:
    engine, client, _ = await scripted_engine()
    await engine.generate(ids("a"), FOUR).aclose()
    assert client.sent == []
    await engine.close()


@pytest.mark.parametrize("num_outputs", [0, 1, 3])
async def test_sch_10_aborts_at_any_moment_free_everything(num_outputs: int) -> None:
    inline = inline_engine(num_blocks=16, budget=3, max_num_seqs=4)
    engine = await inline.start()

    async def hang_up_after(num: int, prompt: list[int]) -> None:
        outputs = engine.generate(prompt, SamplingParams(max_tokens=12))
        for _ in range(num):
            await anext(outputs)
        await outputs.aclose()

    async def hang_up_while_waiting(prompt: list[int]) -> None:
        reader = asyncio.create_task(collect(engine.generate(prompt, FOUR)))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)

    prompts = [[i % 9] * (1 + i) for i in range(12)]
    await asyncio.gather(
        *(hang_up_after(num_outputs, prompt) for prompt in prompts),
        *(hang_up_while_waiting(prompt) for prompt in prompts),
    )
    last = await collect(engine.generate([5], FOUR))
    tokens = [token for output in last for token in output.token_ids]
    assert tokens == reference_completion([5], FOUR)
    await assert_idle(inline)
    await engine.close()


# ---------------------------------------------------------------------- ids


async def test_sch_23_two_requests_with_the_same_label_are_independent() -> None:
    inline = inline_engine()
    engine = await inline.start()
    one, two = await asyncio.gather(
        collect(engine.generate([1], FOUR, request_id="same")),
        collect(engine.generate([2], FOUR, request_id="same")),
    )
    assert {output.request_id for output in one + two} == {"same"}
    assert [t for o in one for t in o.token_ids] == reference_completion([1], FOUR)
    assert [t for o in two for t in o.token_ids] == reference_completion([2], FOUR)
    await engine.close()


async def test_sch_24_a_label_used_again_while_its_abort_is_in_flight_completes() -> None:
    inline = inline_engine()
    engine = await inline.start()
    for _ in range(50):
        first = engine.generate([3, 4], SamplingParams(max_tokens=40), request_id="x")
        await anext(first)
        await first.aclose()
        second = await collect(engine.generate([3, 4], FOUR, request_id="x"))
        assert second[-1].num_generated_tokens == 4
    await engine.close()


# ---------------------------------------------------------------------- refusals


async def test_a_request_that_can_never_be_answered_is_refused_before_anything_is_sent() -> None:
    engine, client, _ = await scripted_engine()
    with pytest.raises(PromptTooLong, match="200"):
        engine.generate(ids("a" * 200), SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        engine.generate(ids("a"), SamplingParams(stop_token_ids=(10_000,)))
    await settle()
    assert client.sent == []
    await engine.close()


# ---------------------------------------------------------------------- death, drain, close


async def test_ops_01_death_reaches_every_open_stream_at_once() -> None:
    engine, client, notebook = await scripted_engine()
    readers = [read(engine) for _ in range(3)]
    await settle()
    client.die("it fell over")
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert [str(result) for result in results] == ["it fell over"] * 3
    assert all(isinstance(result, EngineDead) for result in results)
    assert await engine.wait_dead() == engine.dead_reason == "it fell over"
    with pytest.raises(EngineDead, match="fell over"):
        engine.generate(ids("a"), FOUR)
    assert [f.reason for f in notebook.finished] == [FinishReason.ERROR] * 3
    assert client.aborted == []
    await engine.close()


async def test_text_that_came_before_the_death_is_still_read() -> None:
    engine, client, _ = await scripted_engine()
    outputs = engine.generate(ids("a"), FOUR)
    first = asyncio.create_task(anext(outputs))
    await settle()
    client.step(TokenDelta(client.added[0].request_id, ids("x")))
    client.die("gone")
    assert (await first).text == "x"
    with pytest.raises(EngineDead, match="gone"):
        await anext(outputs)
    await engine.close()


async def test_drain_waits_for_readers_and_takes_no_new_ones() -> None:
    engine, client, _ = await scripted_engine()
    reader = read(engine)
    await settle()
    draining = asyncio.create_task(engine.drain(timeout_s=60))
    await settle()
    assert not draining.done()
    with pytest.raises(EngineDead, match="shutting down"):
        engine.generate(ids("a"), FOUR)
    request_id = client.added[0].request_id
    client.step(TokenDelta(request_id, ids("x"), finish_reason=FinishReason.LENGTH))
    await draining
    assert text_of(await reader) == "x"
    await engine.close()


async def test_drain_gives_up_after_its_time_and_close_ends_the_rest() -> None:
    engine, client, _ = await scripted_engine()
    reader = read(engine)
    await settle()
    await engine.drain(timeout_s=0)
    await engine.close()
    with pytest.raises(EngineDead, match="shutting down"):
        await reader
    assert client.closed
    assert not any(isinstance(message, Shutdown) for message in client.sent)  # close() is enough


# ---------------------------------------------------------------------- figures


async def test_questions_to_an_engine_that_does_not_answer_do_not_pile_up() -> None:
    engine, client, _ = await scripted_engine()
    asked = [asyncio.create_task(engine.control("state")) for _ in range(MAX_OPEN)]
    await settle()
    with pytest.raises(QueueFull, match="wait for their answers"):
        await engine.control("state")
    assert len(client.sent) == MAX_OPEN
    await engine.close()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(answer, ShuttingDown) for answer in answers)


async def test_met_02_first_token_once_per_request_and_gaps_for_the_rest() -> None:
    engine, client, notebook = await scripted_engine()
    reader = read(engine, SamplingParams(max_tokens=4, prompt_logprobs=0))
    await settle()
    request = client.added[0]
    start, request_id = request.arrival_time, request.request_id
    score = TokenLogprobs(0, -1.0, 1, [], [])
    client.step(TokenDelta(request_id, [], prompt_logprobs=[score]), time=start + 1)  # a chunk
    client.step(TokenDelta(request_id, ids("x")), time=start + 3)
    client.step(TokenDelta(request_id, ids("yz")), time=start + 4)
    times = RequestTimes(start, start + 0.5, start + 3, start + 9, 2)
    end = TokenDelta(
        request_id,
        ids("w"),
        finish_reason=FinishReason.LENGTH,
        times=times,
        num_cached_tokens=1,
    )
    client.step(end, time=start + 9)
    await reader
    assert notebook.first_tokens == pytest.approx([3])
    assert notebook.gaps == pytest.approx([0.5, 0.5, 5])  # two tokens came at once
    (finished,) = notebook.finished
    assert finished.num_generated_tokens == 4
    assert finished.num_cached_tokens == 1
    assert finished.times == RequestTimes(start, start + 0.5, start + 3, start + 9, 2)
    assert len(notebook.stats) == 4
    await engine.close()


async def test_met_02_counts_agree_with_the_requests_under_chunking_and_preemption() -> None:
    inline = inline_engine(num_blocks=10, budget=4, max_num_seqs=6)
    engine = await inline.start()
    prompts = [[i % 5] * (3 + i % 8) for i in range(20)]
    await asyncio.gather(
        *(collect(engine.generate(p, SamplingParams(max_tokens=12))) for p in prompts)
    )
    notebook = inline.notebook
    assert notebook.stats[-1].total_preemptions_recompute > 0
    assert len(notebook.first_tokens) == len(notebook.finished) == 20
    assert len(notebook.gaps) == sum(f.num_generated_tokens - 1 for f in notebook.finished)
    for finished in notebook.finished:
        first = finished.times.first_token_time
        assert first is not None
        assert finished.times.arrival_time <= first <= finished.times.finished_time
    await engine.close()


async def test_the_model_is_described_by_what_the_engine_and_the_files_say() -> None:
    generation = GenerationConfig(frozenset({3, 10_000}), {"temperature": 0.1})
    engine, _, notebook = await scripted_engine(generation)
    assert notebook.models == [engine.model]
    assert engine.model.names == ("tiny",)
    assert engine.model.eos_token_ids == {3}  # ids outside the vocabulary mean nothing
    assert engine.model.generation_defaults == {"temperature": 0.1}
    await engine.close()
