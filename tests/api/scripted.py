"""An engine that says what a test tells it to, behind the real front (tokens in, text out).

`ScriptedClient` stands where the engine process stands. Every `receive` is one step, in which each
running request gains the next token of its script.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from serve.messages import (
    AbortRequests,
    AddRequest,
    EngineDied,
    EngineReady,
    EngineStats,
    FinishReason,
    FromEngine,
    RequestTimes,
    StepOutputs,
    ToEngine,
    TokenDelta,
    TokenLogprobs,
)
from serve.text.tokenizer import Tokenizer
from serve.text.tokenizer_files import TokenizerFiles

WORDS = (" Hello", " world", " one", " two", " three", " four", "Hello", "one")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'raise' %}{{ raise_exception('no raising here') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer(chat_template: str | None = TEMPLATE) -> Tokenizer:
    """A real byte-level tokenizer: all bytes, a few words, and chat markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        spelled = word.replace(" ", "Ġ")
        for end in range(2, len(spelled) + 1):
            pair = (spelled[: end - 1], spelled[end - 1])
            if spelled[:end] not in vocab:
                vocab[spelled[:end]] = len(vocab)
                merges.append(pair)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    markers = ("<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(text, special=True) for text in markers])
    templates = {"default": chat_template} if chat_template is not None else {}
    files = TokenizerFiles(special_tokens={"eos_token": "<|im_end|>"}, templates=templates)
    return Tokenizer(backend, files)


@dataclass
class Script:
    """What a request gets: these tokens, and then the end token over and over."""

    token_ids: Sequence[int]
    fail_after: int | None = None  # tokens before the step fails
    hold_after: int | None = None  # tokens before it stands still, until it is aborted
    refuse_for_s: float | None = None  # the queue is full, and will be for so long
    expires: bool = False  # waits too long for its first step


@dataclass
class _Running:
    request: AddRequest
    script: Script
    first_scheduled_time: float
    first_token_time: float | None = None
    num_generated: int = 0


@dataclass
class ScriptedClient:
    """EngineClient. `script` is asked once per request; `received` is all that the front sent."""

    tokenizer: Tokenizer
    script: Callable[[AddRequest], Script]
    max_model_len: int = 512
    num_blocks: int = 64
    scheduling_policy: str = "fcfs"
    silent_s: float = 0.0  # since it last showed life
    received: list[ToEngine] = field(default_factory=list)
    running: dict[str, _Running] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _died: str | None = None
    _num_prompt: int = 0
    _num_generated: int = 0

    async def start(self) -> EngineReady:
        return EngineReady(
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=16,
            num_host_blocks=8,
            vocab_size=self.tokenizer.max_token_id + 1,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            device="fake",
            dtype="float32",
            attention_backend="none",
            scheduling_policy=self.scheduling_policy,
        )

    def send(self, message: ToEngine) -> None:
        self.received.append(message)
        match message:
            case AddRequest():
                entry = _Running(message, self.script(message), time.monotonic())
                self.running[message.request_id] = entry
                self._num_prompt += len(message.prompt_token_ids)
            case AbortRequests(ids):
                for request_id in ids:
                    self.running.pop(request_id, None)
        self._news.set()

    async def receive(self) -> FromEngine:
        while True:
            await asyncio.sleep(0)
            if self._died is not None:
                return EngineDied(self._died)
            movable = [r for r in self.running.values() if r.num_generated != r.script.hold_after]
            if movable or self._news.is_set():
                self._news.clear()
                deltas = [self._advance(entry) for entry in movable]
                return StepOutputs(deltas, self._stats(len(movable)), time.monotonic())
            await self._news.wait()

    def seen_at(self) -> float:
        return time.monotonic() - self.silent_s

    async def close(self) -> None:
        self.die("closed")

    def die(self, reason: str) -> None:
        """End the engine (on its event loop)."""
        self._died = reason
        self._news.set()

    def wake(self) -> None:
        """Look again at what can go on (on its event loop)."""
        self._news.set()

    @property
    def num_aborts(self) -> int:
        """Abort messages so far."""
        return sum(isinstance(message, AbortRequests) for message in self.received)

    def _stats(self, num_tokens: int) -> EngineStats:
        blocks = sum(
            -(-(len(r.request.prompt_token_ids) + r.num_generated) // 16)
            for r in self.running.values()
        )
        return EngineStats(
            num_running=len(self.running),
            num_blocks_used=blocks,
            num_blocks=self.num_blocks,
            total_prompt_tokens=self._num_prompt,
            total_generation_tokens=self._num_generated,
            step_tokens=[num_tokens] if num_tokens else [],
        )

    def _advance(self, entry: _Running) -> TokenDelta:
        request, script = entry.request, entry.script
        sampling = request.sampling
        assert sampling.max_tokens is not None
        now = time.monotonic()
        if script.refuse_for_s is not None or script.expires:
            del self.running[request.request_id]
            return TokenDelta(
                request.request_id,
                [],
                finish_reason=FinishReason.TIMEOUT if script.expires else FinishReason.ERROR,
                error="too much waits",
                retry_after_s=script.refuse_for_s,
            )
        if entry.num_generated == script.fail_after:
            del self.running[request.request_id]
            return TokenDelta(
                request.request_id, [], finish_reason=FinishReason.ERROR, error="the step blew up"
            )
        prompt_logprobs = None
        if entry.num_generated == 0 and sampling.prompt_logprobs is not None:
            ids = request.prompt_token_ids[1:]
            prompt_logprobs = [fake_logprobs(i, sampling.prompt_logprobs) for i in ids]
        token_ids: list[int] = []
        reason = FinishReason.LENGTH if sampling.max_tokens == 0 else None
        if reason is None:
            token_id, reason = self._next(entry)
            token_ids = [token_id]
            entry.first_token_time = entry.first_token_time or now
        if reason is not None:
            del self.running[request.request_id]
        times = RequestTimes(
            request.arrival_time, entry.first_scheduled_time, entry.first_token_time, now, 0
        )
        return TokenDelta(
            request.request_id,
            token_ids,
            logprobs=None
            if sampling.logprobs is None
            else [fake_logprobs(i, sampling.logprobs) for i in token_ids],
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            times=times if reason is not None else None,
        )

    def _next(self, entry: _Running) -> tuple[int, FinishReason | None]:
        sampling, position = entry.request.sampling, entry.num_generated
        script = entry.script.token_ids
        end_id = self.tokenizer.eos_token_id
        assert end_id is not None
        token_id = script[position] if position < len(script) else end_id
        if sampling.ignore_eos and token_id == end_id:
            token_id = script[position % len(script)]
        entry.num_generated += 1
        self._num_generated += 1
        if token_id in sampling.stop_token_ids and entry.num_generated > sampling.min_tokens:
            return token_id, FinishReason.STOP
        if entry.num_generated == sampling.max_tokens:
            return token_id, FinishReason.LENGTH
        return token_id, None


def fake_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """-0.5 for the token, then -1.5, -2.5 …; an impossible one last."""
    top_ids = [abs(token_id - i) for i in range(num_top)]
    top_values = [-0.5 - i for i in range(num_top)]
    if num_top > 1:
        top_values[-1] = float("-inf")
    return TokenLogprobs(token_id, -0.5, 1, top_ids, top_values)
