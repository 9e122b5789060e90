"""A completion's answer, in one piece or as a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from serve.api.answering.choices import Choice
from serve.api.answering.chunks import ChunkWriter, Envelope, in_intervals, text_json
from serve.api.answering.generation import Job, Outputs, Tally
from serve.api.answering.json_pieces import JsonPieces, with_scores
from serve.api.answering.logprobs import CompletionLogprobsWriter, TokenNames
from serve.api.answering.parts import Part, text_of
from serve.api.answering.scores import CompletionScores, Scores
from serve.api.answering.streaming import DONE, error_event
from serve.api.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionRequest,
)
from serve.engine.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """A request, ready to run and to be answered."""

    body: CompletionRequest
    job: Job
    envelope: Envelope
    names: TokenNames
    echoed: list[str] | None  # each prompt's text, if the answer repeats it

    @property
    def streams(self) -> bool:
        """Whether it is sent while it is made."""
        return bool(self.body.stream)

    def field_names(self) -> Mapping[str, str]:
        """The job's fields are called as they are."""
        return {}

    def prompt_of(self, index: int) -> list[int]:
        """The prompt ids of a choice."""
        return self.job.prompts[index // self.job.n]

    def echo_of(self, index: int) -> str:
        """The prompt text a choice repeats."""
        return self.echoed[index // self.job.n] if self.echoed is not None else ""

    def logprobs_writer(self) -> CompletionLogprobsWriter | None:
        """For one choice; None if nobody asked."""
        if self.body.logprobs is None:
            return None
        leads = self.echoed is not None
        return CompletionLogprobsWriter(self.body.logprobs, self.names, leads=leads)

    def scores(self) -> list[Scores]:
        """What writes the choices' log-probabilities."""
        if self.body.logprobs is None and self.body.prompt_logprobs is None:
            return []
        return [self.scores_of(i, self.logprobs_writer()) for i in range(self.job.num_choices)]

    def scores_of(self, index: int, writer: CompletionLogprobsWriter | None) -> CompletionScores:
        """What writes one choice's."""
        names = None if self.body.prompt_logprobs is None else self.names
        echoed = self.prompt_of(index) if self.echoed is not None else None
        return CompletionScores(writer, names, echoed)

    async def whole(self, choices: Sequence[Choice], tally: Tally) -> Response:
        """The answer without streaming."""
        return JsonPieces(with_scores(self._completion(choices, tally), choices))

    def error_event(self, error: Exception) -> bytes:
        """The end of a stream in which something went wrong."""
        return error_event(error)

    def _completion(self, choices: Sequence[Choice], tally: Tally) -> Completion:
        """The answer without its log-probabilities."""
        extras: dict[str, Any] = {}
        if self.body.return_metrics:
            extras["metrics"] = tally.metrics()
        return Completion(
            **self.envelope.fields(),
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=tally.usage(),
            **extras,
        )

    def _choice(self, index: int, choice: Choice) -> CompletionChoice:
        extras: dict[str, Any] = {}
        if self.body.prompt_logprobs is not None:
            extras["prompt_logprobs"] = None
        if self.body.return_token_ids:
            extras["prompt_token_ids"] = self.prompt_of(index)
            extras["token_ids"] = choice.token_ids
        return CompletionChoice(
            index=index,
            text=self.echo_of(index) + choice.text,
            logprobs=None,
            finish_reason=choice.ended_by,
            stop_reason=choice.stop_reason,
            **extras,
        )

    async def events(self, outputs: Outputs) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        body = self.body
        chunks = ChunkWriter(
            self.envelope, body.stream_options, outputs.tally, tells_metrics=body.return_metrics
        )
        choices = [_ChoiceStream(self, index) for index in range(self.job.num_choices)]
        async for index, parts, output in in_intervals(outputs, body.stream_interval):
            if choices[index].echo_scores is not None:
                await choices[index].note(output)
            payload = choices[index].payload(parts, output)
            if output.finish_reason is not None:
                yield chunks.last_chunk(
                    index, payload, output.finish_reason.value, output.stop_reason
                )
            elif payload:
                yield chunks.chunk(index, payload)
        yield chunks.figures_chunk() + DONE


class _ChoiceStream:
    """Turns one choice's outputs into chunk payloads; the prompt, if echoed, leads the first."""

    def __init__(self, answer: CompletionAnswer, index: int) -> None:
        self._echoes = answer.echoed is not None
        self._gives_ids = bool(answer.body.return_token_ids)
        self._prompt_ids = answer.prompt_of(index)
        self._echo = answer.echo_of(index)
        self._begun = False
        self._writer = answer.logprobs_writer()
        self.echo_scores: CompletionScores | None = None  # until the first payload
        if self._echoes and self._writer is not None:
            self.echo_scores = answer.scores_of(index, self._writer)

    async def note(self, output: RequestOutput) -> None:
        """While there are `echo_scores`, comes before `payload`: they may be many."""
        assert self.echo_scores is not None
        await self.echo_scores.add(output)

    def payload(self, parts: Sequence[Part], output: RequestOutput) -> str:
        """The chunk's fields as JSON text; empty if there is nothing to say yet."""
        if not output.token_ids and output.finish_reason is None:
            return ""
        begins, self._begun = not self._begun, True
        text = self._echo + text_of(parts) if begins else text_of(parts)
        if not (text or output.finish_reason or self._writer or self._gives_ids):
            return ""
        logprobs = "null"
        if self._writer is not None:
            logprobs = self._logprobs(self._writer, output)
        ids = ""
        if self._gives_ids:
            ids = f',"token_ids":{output.token_ids}'
            if begins:
                ids += f',"prompt_token_ids":{self._prompt_ids}'
        return f'"text":{text_json(text)},"logprobs":{logprobs}{ids}'

    def _logprobs(self, writer: CompletionLogprobsWriter, output: RequestOutput) -> str:
        if self.echo_scores is not None:
            first, self.echo_scores = self.echo_scores, None
            return "".join(first.pieces())
        return json.dumps(writer.generated(output.logprobs)) if output.logprobs else "null"
