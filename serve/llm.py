"""LLM: generate for a batch of prompts in this process, over the same engine that serves.

llm = LLM(max_num_seqs=32)
for output in llm.generate(["Hello", "Good morning"], SamplingParams(max_tokens=40)):
    print(output.text)
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

from serve.checkpoint.hub import DEFAULT_MODEL, find_model
from serve.config import (
    CacheConfig,
    Count,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from serve.engine.async_engine import AsyncEngine
from serve.engine.build import build_engine_core
from serve.engine.inline import InlineClient
from serve.engine.observer import NoObserver
from serve.engine.outputs import RequestOutput
from serve.errors import ConfigError, EngineDead, InvalidRequest
from serve.messages import EngineReady, EngineStats, TokenLogprobs
from serve.progress import BatchBar
from serve.sampling_params import SamplingParams
from serve.text.generation_config import read_generation_config
from serve.text.placeholder_tokenizer import load_tokenizer

T = TypeVar("T")

_SECTIONS = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
}
_COUNTS = ("kv_cache_memory_bytes", "max_num_batched_tokens")


@dataclass(frozen=True, slots=True)
class LLMOutput:
    """What one prompt led to. `finish_reason` is "stop", "length" or "error" (with `error`)."""

    prompt: str | None  # None when ids were given
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs] | None
    error: str | None


class LLM:
    """A loaded model. Holds its memory until `close`, or the end of a `with` block.

    The engine runs on a thread of its own, so this also works where an event loop is running
    already (notebooks). Calls from several threads are answered together.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        """Load `model`: a folder, a .gguf file or a hub id; None is the default model.

        `settings` are fields of ModelConfig, CacheConfig, SchedulerConfig and DeviceConfig by their
        names. Raises ConfigError for an unknown or impossible one, or a model that cannot load.
        """
        config = engine_config(model=model, **settings)
        path = find_model(config.model.model, config.model.revision)
        client = InlineClient(lambda inbox, outbox: build_engine_core(config, path, inbox, outbox))
        self._stats = _LastStats()
        self._engine = AsyncEngine(
            client,
            load_tokenizer(path, config.model.load_format),
            self._stats,
            names=(config.model.model or DEFAULT_MODEL.name,),
            generation=read_generation_config(path, "none"),
            seed=config.model.seed,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a task must not be cut off midway
        try:
            self._run(self._engine.start())
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[LLMOutput]:
        """Complete each prompt (text, or token ids); the outputs come in the prompts' order.

        `sampling` is one for all, or one for each. `progress` shows a bar on the terminal.
        Raises RequestError, before anything runs, when one of them can never be answered, and
        EngineDead after `close` or when the engine has died.
        """
        if self._loop.is_closed():
            raise EngineDead("this LLM was closed; make a new one.")
        listed: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else [*prompts]
        each = _one_for_each(sampling or SamplingParams(), len(listed))
        return self._run(self._generate(listed, each, progress))

    @property
    def stats(self) -> EngineStats:
        """The engine's figures after its last step."""
        return self._stats.stats

    @property
    def ready(self) -> EngineReady:
        """What the engine measured and resolved at start."""
        return self._engine.ready

    def close(self) -> None:
        """Free the model and the cache. The object cannot generate any more."""
        if self._loop.is_closed():
            return
        atexit.unregister(self.close)
        self._run(self._engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sequence[SamplingParams],
        progress: bool,
    ) -> list[LLMOutput]:
        token_ids = [await self._token_ids(prompt) for prompt in prompts]
        # Made before any is read: a prompt that is refused stops the whole batch before it begins.
        streams = [
            self._engine.generate(ids, params)
            for ids, params in zip(token_ids, sampling, strict=True)
        ]
        with BatchBar("generating", len(streams), shown=progress) as bar:
            return await asyncio.gather(
                *(
                    _collect(prompt, ids, stream, bar)
                    for prompt, ids, stream in zip(prompts, token_ids, streams, strict=True)
                )
            )

    async def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return await self._engine.tokenizer.encode(prompt)
        return list(prompt)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the engine's thread and wait; an interrupt here (Ctrl-C) cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


class _LastStats(NoObserver):
    """Keeps the engine's newest figures."""

    def __init__(self) -> None:
        self.stats = EngineStats()

    def stepped(self, stats: EngineStats) -> None:
        self.stats = stats


async def _collect(
    prompt: str | Sequence[int],
    prompt_token_ids: list[int],
    stream: AsyncIterator[RequestOutput],
    bar: BatchBar,
) -> LLMOutput:
    """Read one request to its end."""
    parts: list[RequestOutput] = []
    async for part in stream:
        parts.append(part)
        bar.advance(len(part.token_ids), done=int(part.finish_reason is not None))
    last = parts[-1]
    assert last.finish_reason is not None
    return LLMOutput(
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=prompt_token_ids,
        text="".join(part.text for part in parts),
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        finish_reason=last.finish_reason.value,
        stop_reason=last.stop_reason,
        logprobs=[score for part in parts for score in part.logprobs or []] or None,
        prompt_logprobs=[score for part in parts for score in part.prompt_logprobs or []] or None,
        error=last.error,
    )


def engine_config(**settings: Any) -> EngineConfig:
    """Settings by field name, whatever section they belong to. Raises ConfigError."""
    section_of = {f.name: name for name, kind in _SECTIONS.items() for f in fields(kind)}
    chosen: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for key, value in settings.items():
        if key not in section_of:
            known = ", ".join(sorted(section_of))
            raise ConfigError(f"{key} is not an engine setting. There are: {known}.")
        chosen[section_of[key]][key] = _as_written(key, value)
    return EngineConfig(**{name: kind(**chosen[name]) for name, kind in _SECTIONS.items()})


def _as_written(key: str, value: Any) -> Any:
    """The value as the config takes it: sizes may be numbers or text such as "8k" and "2GiB"."""
    if key == "max_model_len":
        return str(value)
    if key in _COUNTS and value is not None:
        try:
            return Count(value)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}.") from error
    return value


def _one_for_each(
    sampling: SamplingParams | Sequence[SamplingParams], count: int
) -> Sequence[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise InvalidRequest(
            f"there are {count} prompts, but {len(sampling)} sampling parameters; give one for "
            "each, or one for all.",
            param="sampling",
        )
    return sampling
