"""A chat's answer, in one piece or as a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from serve.api.answering.choices import Choice, in_intervals
from serve.api.answering.chunks import ChunkWriter, Envelope, text_json
from serve.api.answering.generation import Job, Outputs, Tally
from serve.api.answering.logprobs import ChatLogprobsWriter, TokenNames
from serve.api.answering.scores import ChatScores, Scores
from serve.api.answering.streaming import DONE
from serve.api.protocol.chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
)
from serve.engine.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A request, ready to run and to be answered."""

    body: ChatCompletionRequest
    job: Job
    envelope: Envelope
    names: TokenNames
    num_top: int | None  # `top_logprobs`, if logprobs are wanted

    def scores(self) -> list[Scores]:
        """What writes the choices' log-probabilities; the first writes the prompt's."""
        names = None if self.body.prompt_logprobs is None else self.names
        if self.num_top is None and names is None:
            return []
        first = ChatScores(self.logprobs_writer(), names)
        others = (ChatScores(self.logprobs_writer(), None) for _ in range(1, self.job.n))
        return [first, *others]

    def whole(self, choices: Sequence[Choice], tally: Tally) -> ChatCompletion:
        """The answer without streaming, and without its log-probabilities."""
        extras: dict[str, Any] = {}
        if self.body.prompt_logprobs is not None:
            extras["prompt_logprobs"] = None
        if self.body.return_token_ids:
            extras["prompt_token_ids"] = self.job.prompts[0]
        if self.body.return_metrics:
            extras["metrics"] = tally.metrics()
        return ChatCompletion(
            **self.envelope.fields(),
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=tally.usage(),
            **extras,
        )

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        ids: dict[str, Any] = {}
        if self.body.return_token_ids:
            ids["token_ids"] = choice.token_ids
        return ChatChoice(
            index=index,
            message=AssistantMessage(role="assistant", content=choice.text, refusal=None),
            logprobs=None,
            finish_reason=choice.ended_by,
            stop_reason=choice.stop_reason,
            **ids,
        )

    def logprobs_writer(self) -> ChatLogprobsWriter | None:
        """For one choice; None if nobody asked."""
        return None if self.num_top is None else ChatLogprobsWriter(self.num_top, self.names)

    async def events(self, outputs: Outputs) -> AsyncIterator[bytes]:
        """The answer as server-sent events: per choice a role, its text, and why it ended."""
        body = self.body
        chunks = ChunkWriter(
            self.envelope, body.stream_options, outputs.tally, tells_metrics=body.return_metrics
        )
        choices = [_ChoiceStream(self, index, chunks) for index in range(self.job.num_choices)]
        async for index, output in in_intervals(outputs, body.stream_interval):
            if event := choices[index].events(output):
                yield event
        yield chunks.figures_chunk() + DONE


class _ChoiceStream:
    """Turns one choice's outputs into events."""

    def __init__(self, answer: ChatAnswer, index: int, chunks: ChunkWriter) -> None:
        self._prompt_ids = answer.job.prompts[0]
        self._gives_ids = bool(answer.body.return_token_ids)
        self._index = index
        self._chunks = chunks
        self._begun = False
        self._logprobs = answer.logprobs_writer()

    def events(self, output: RequestOutput) -> bytes:
        """The events an output amounts to; none if there is nothing to say yet."""
        events = b""
        if payload := self._payload(output):
            events = self._chunks.chunk(self._index, payload)
        if output.finish_reason is not None:
            events += self._chunks.last_chunk(
                self._index, '"delta":{},"logprobs":null', output.finish_reason, output.stop_reason
            )
        if events and not self._begun:
            self._begun = True
            events = self._chunks.chunk(self._index, self._role_payload()) + events
        return events

    def _role_payload(self) -> str:
        ids = f',"prompt_token_ids":{self._prompt_ids}' if self._gives_ids else ""
        return f'"delta":{{"role":"assistant","content":""}},"logprobs":null{ids}'

    def _payload(self, output: RequestOutput) -> str:
        logprobs, ids = "null", ""
        if self._logprobs is not None and output.logprobs:
            logprobs = json.dumps(
                self._logprobs.generated(output.logprobs, hides_last=output.hides_last)
            )
        elif not output.text and not (self._gives_ids and output.token_ids):
            return ""
        if self._gives_ids:
            ids = f',"token_ids":{output.token_ids}'
        return f'"delta":{{"content":{text_json(output.text)}}},"logprobs":{logprobs}{ids}'
