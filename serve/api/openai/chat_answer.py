"""A chat's answer, in one piece or as a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from serve.answers.events import CallArguments, CallBegun, CallEnded
from serve.api.answering.choices import Choice
from serve.api.answering.chunks import ChunkWriter, Envelope, in_intervals, text_json
from serve.api.answering.generation import Job, Outputs, Tally
from serve.api.answering.json_pieces import JsonPieces, with_scores
from serve.api.answering.logprobs import ChatLogprobsWriter, TokenNames
from serve.api.answering.parts import Part, reasoning_of, text_of
from serve.api.answering.scores import ChatScores, Scores
from serve.api.answering.streaming import DONE, error_event
from serve.api.answering.tools import call_delta, calls_of, ends_in_calls
from serve.api.protocol.chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
)
from serve.engine.outputs import RequestOutput

_CALL_PARTS = (CallBegun, CallArguments, CallEnded)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A request, ready to run and to be answered."""

    body: ChatCompletionRequest
    job: Job
    envelope: Envelope
    names: TokenNames
    num_top: int | None  # `top_logprobs`, if logprobs are wanted
    names_tool: bool = False  # the request says which tool to call

    @property
    def streams(self) -> bool:
        """Whether it is sent while it is made."""
        return bool(self.body.stream)

    @property
    def tells_reasoning(self) -> bool:
        """Whether reasoning that is told apart is also sent."""
        return self.body.include_reasoning is not False

    def ends_with_calls(self, parts: Sequence[Part], ended_by: str) -> bool:
        """Whether an answer of these parts ended because it calls tools."""
        return ended_by == "stop" and not self.names_tool and ends_in_calls(parts)

    def field_names(self) -> Mapping[str, str]:
        """The job's fields are called as they are."""
        return {}

    def scores(self) -> list[Scores]:
        """What writes the choices' log-probabilities; the first writes the prompt's."""
        names = None if self.body.prompt_logprobs is None else self.names
        if self.num_top is None and names is None:
            return []
        first = ChatScores(self.logprobs_writer(), names)
        others = (ChatScores(self.logprobs_writer(), None) for _ in range(1, self.job.n))
        return [first, *others]

    async def whole(self, choices: Sequence[Choice], tally: Tally) -> Response:
        """The answer without streaming."""
        return JsonPieces(with_scores(self._completion(choices, tally), choices))

    def error_event(self, error: Exception) -> bytes:
        """The end of a stream in which something went wrong."""
        return error_event(error)

    def _completion(self, choices: Sequence[Choice], tally: Tally) -> ChatCompletion:
        """The answer without its log-probabilities."""
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
        thought: dict[str, Any] = {}
        if (reasoning := reasoning_of(choice.parts)) and self.tells_reasoning:
            thought = {"reasoning": reasoning, "reasoning_content": reasoning}
        content: str | None = choice.text
        ended_by = choice.ended_by
        if self.job.tools and (calls := calls_of(choice.parts)):
            thought["tool_calls"] = calls
            content = content or None
            if self.ends_with_calls(choice.parts, ended_by):
                ended_by = "tool_calls"
        return ChatChoice(
            index=index,
            message=AssistantMessage(role="assistant", content=content, refusal=None, **thought),
            logprobs=None,
            finish_reason=ended_by,
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
        async for index, parts, output in in_intervals(outputs, body.stream_interval):
            if event := choices[index].events(parts, output):
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
        self._answer = answer
        self._calls: list[Part] = []  # what was said of calls, where there are tools
        self._logprobs = answer.logprobs_writer()

    def events(self, parts: Sequence[Part], output: RequestOutput) -> bytes:
        """The events a piece amounts to; none if there is nothing to say yet."""
        events = b""
        if self._answer.job.tools:
            calls = [part for part in parts if isinstance(part, _CALL_PARTS)]
            parts = [part for part in parts if not isinstance(part, _CALL_PARTS)]
            self._calls += calls
        else:
            calls = []
        if payload := self._payload(parts, output):
            events = self._chunks.chunk(self._index, payload)
        for part in calls:
            if (delta := call_delta(part)) is not None:
                payload = f'"delta":{{"tool_calls":[{json.dumps(delta)}]}},"logprobs":null'
                events += self._chunks.chunk(self._index, payload)
        if output.finish_reason is not None:
            reason = output.finish_reason.value
            if self._calls and self._answer.ends_with_calls(self._calls, reason):
                reason = "tool_calls"
            payload = '"delta":{},"logprobs":null'
            events += self._chunks.last_chunk(self._index, payload, reason, output.stop_reason)
        if events and not self._begun:
            self._begun = True
            events = self._chunks.chunk(self._index, self._role_payload()) + events
        return events

    def _role_payload(self) -> str:
        ids = f',"prompt_token_ids":{self._prompt_ids}' if self._gives_ids else ""
        return f'"delta":{{"role":"assistant","content":""}},"logprobs":null{ids}'

    def _payload(self, parts: Sequence[Part], output: RequestOutput) -> str:
        logprobs, ids = "null", ""
        if self._logprobs is not None and output.logprobs:
            logprobs = json.dumps(
                self._logprobs.generated(output.logprobs, hides_last=output.hides_last)
            )
        elif not parts and not (self._gives_ids and output.token_ids):
            return ""
        if self._gives_ids:
            ids = f',"token_ids":{output.token_ids}'
        return f'"delta":{{{self._delta(parts)}}},"logprobs":{logprobs}{ids}'

    def _delta(self, parts: Sequence[Part]) -> str:
        text, reasoning = text_of(parts), reasoning_of(parts)
        if not (reasoning and self._answer.tells_reasoning):
            return f'"content":{text_json(text)}'
        thought = text_json(reasoning)
        said = f'"content":{text_json(text)},' if text else ""
        return f'{said}"reasoning":{thought},"reasoning_content":{thought}'
