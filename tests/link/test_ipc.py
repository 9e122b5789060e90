"""Messages as bytes, and the pair of sockets that carries them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from serve.config import CacheConfig, Count, EngineConfig, ModelConfig, SchedulerConfig
from serve.errors import ConfigError
from serve.link.ipc import TYPES, Codec, EngineSocket, FrontSocket, Launch, Message
from serve.messages import (
    AbortRequests,
    AddRequest,
    Control,
    ControlResult,
    EngineDied,
    EngineStats,
    FinishReason,
    RequestTimes,
    Shutdown,
    StepOutputs,
    TokenDelta,
    TokenLogprobs,
)
from serve.sampling_params import SamplingParams
from tests.engine.fake_front import READY

SAMPLING = SamplingParams(
    max_tokens=7,
    stop=("\n", "é"),
    stop_token_ids=(2, 3),
    logit_bias={5: -100.0},
    bad_words_token_ids=((1, 2), (3,)),
    seed=-(2**63),
    logprobs=0,
)
CONFIG = EngineConfig(
    model=ModelConfig(model="m", max_model_len="8k"),
    cache=CacheConfig(kv_cache_memory_bytes=Count("2GiB")),
    scheduler=SchedulerConfig(max_num_batched_tokens=Count("2k")),
)
SCORES = [TokenLogprobs(1, -0.5, 1, [1, 2], [-0.5, float("-inf")])]
MESSAGES: list[Message] = [
    Launch(CONFIG, "/models/m", "debug"),
    AddRequest("a", [1, 2, 3], SAMPLING, 12.5, priority=-1, cache_salt="s"),
    AbortRequests(["a", "b"]),
    Control(7, "configure", {"max_num_seqs": 8, "preemption_mode": "swap", "limit": None}),
    ControlResult(7, {"running": [{"id": "a", "age_s": 0.25}], "none": None}),
    ControlResult(8, error="that cannot be", param="max_num_seqs"),
    Shutdown(drain=True),
    READY,
    StepOutputs(
        [
            TokenDelta("a", [5]),
            TokenDelta("b", [], prompt_logprobs=SCORES),
            TokenDelta(
                "c",
                [1],
                logprobs=SCORES,
                finish_reason=FinishReason.ERROR,
                error="x",
                times=RequestTimes(1.0, None, None, 2.0, 3),
                num_cached_tokens=16,
            ),
        ],
        EngineStats(num_running=3, step_tokens=[4, 4, 1]),
        99.0,
    ),
    EngineDied("reason", is_config_error=True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    codec = Codec()
    back = codec.decode(codec.encode(message))
    assert type(back) is type(message)
    assert back == message


def test_every_message_type_is_tried_above() -> None:
    assert {type(message) for message in MESSAGES} == set(TYPES)


def test_a_configured_size_keeps_its_value_and_its_type() -> None:
    codec = Codec()
    launch = codec.decode(codec.encode(MESSAGES[0]))
    assert isinstance(launch, Launch)
    assert launch.config.cache.kv_cache_memory_bytes == 2 * 2**30
    assert isinstance(launch.config.cache.kv_cache_memory_bytes, Count)


@pytest.mark.parametrize("payload", [b"\x81\xa1x\x01", b"\xc0", b"", b"\x93\x01\x02\x03"])
def test_bytes_of_another_shape_are_refused(payload: bytes) -> None:
    tag = Codec().encode(AbortRequests([]))[:1]
    with pytest.raises(msgspec.DecodeError):
        Codec().decode(tag + payload)


async def test_messages_cross_in_order_both_ways_and_before_the_other_end_exists() -> None:
    front = FrontSocket()
    front.send(MESSAGES[0])
    front.send(Shutdown(drain=False))
    engine = EngineSocket(front.address)
    assert await asyncio.to_thread(engine.receive_launch) == MESSAGES[0]
    assert await asyncio.to_thread(engine.drain, True) == [Shutdown(drain=False)]
    assert engine.drain(False) == []
    for number in range(100):
        engine.send(StepOutputs([], EngineStats(num_running=number), 0.0))
    got = [await front.receive() for _ in range(100)]
    assert [m.stats.num_running for m in got if isinstance(m, StepOutputs)] == list(range(100))
    engine.close()
    front.close()


async def test_sending_never_waits_for_a_reader() -> None:
    front = FrontSocket()
    engine = EngineSocket(front.address)
    for _ in range(3000):  # well beyond ZeroMQ's own default of 1000
        front.send(AbortRequests(["x"] * 10))
        engine.send(StepOutputs([], EngineStats(), 0.0))
    engine.close()
    front.close()


async def test_sec_51_no_folder_is_left_however_a_start_ends_and_nobody_finds_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    front = FrontSocket()
    assert list(tmp_path.iterdir()) == []  # it was there to be bound, and only we might enter it
    engine = EngineSocket(front.address)
    engine.send(StepOutputs([], EngineStats(), 0.0))
    assert (await front.receive()) == StepOutputs([], EngineStats(), 0.0)
    front.forget_address()
    front.send(Shutdown(drain=False))
    assert engine.drain(block=True) == [Shutdown(drain=False)]
    engine.close()
    front.close()


async def test_a_folder_that_is_no_good_for_sockets_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        FrontSocket()
    assert list(deep.iterdir()) == []
