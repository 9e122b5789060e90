"""A completion's answer, in one piece or as a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from serve.api.choices import Choice, in_intervals
from serve.api.chunks import ChunkWriter, Envelope, text_json
from serve.api.generation import Job, Outputs, Tally
from serve.api.logprobs import (
    CompletionLogprobsWriter,
    TokenNames,
    joined_logprobs,
    prompt_logprobs,
)
from serve.api.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from serve.api.streaming import DONE
from serve.engine.outputs import RequestOutput
from serve.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """A request, ready to run and to be answered."""

    body: CompletionRequest
    job: Job
    envelope: Envelope
    names: TokenNames
    echoed: list[str] | None  # each prompt's text, if the answer repeats it

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

    def whole(self, choices: Sequence[Choice], tally: Tally) -> Completion:
        """The answer without streaming."""
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
            extras["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, self.names)
        if self.body.return_token_ids:
            extras["prompt_token_ids"] = self.prompt_of(index)
            extras["token_ids"] = choice.token_ids
        return CompletionChoice(
            index=index,
            text=self.echo_of(index) + choice.text,
            logprobs=self._logprobs(index, choice),
            finish_reason=choice.ended_by,
            stop_reason=choice.stop_reason,
            **extras,
        )

    def _logprobs(self, index: int, choice: Choice) -> CompletionLogprobs | None:
        writer = self.logprobs_writer()
        if writer is None:
            return None
        parts = []
        if self.echoed is not None:
            parts.append(writer.prompt(self.prompt_of(index), choice.prompt_logprobs))
        parts.append(writer.generated(choice.logprobs))
        return CompletionLogprobs(**joined_logprobs(parts))

    async def events(self, outputs: Outputs) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        body = self.body
        chunks = ChunkWriter(
            self.envelope, body.stream_options, outputs.tally, tells_metrics=body.return_metrics
        )
        choices = [_ChoiceStream(self, index) for index in range(self.job.num_choices)]
        async for index, output in in_intervals(outputs, body.stream_interval):
            payload = choices[index].payload(output)
            if output.finish_reason is not None:
                yield chunks.last_chunk(index, payload, output.finish_reason, output.stop_reason)
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
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._writer = answer.logprobs_writer()

    def payload(self, output: RequestOutput) -> str:
        """The chunk's fields as JSON text; empty if there is nothing to say yet."""
        if output.prompt_logprobs:
            self._prompt_logprobs += output.prompt_logprobs
        if not output.token_ids and output.finish_reason is None:
            return ""
        begins, self._begun = not self._begun, True
        text = self._echo + output.text if begins else output.text
        if not (text or output.finish_reason or self._writer or self._gives_ids):
            return ""
        logprobs = "null"
        if self._writer is not None:
            logprobs = json.dumps(self._logprobs(self._writer, begins, output))
        ids = ""
        if self._gives_ids:
            ids = f',"token_ids":{output.token_ids}'
            if begins:
                ids += f',"prompt_token_ids":{self._prompt_ids}'
        return f'"text":{text_json(text)},"logprobs":{logprobs}{ids}'

    def _logprobs(
        self, writer: CompletionLogprobsWriter, begins: bool, output: RequestOutput
    ) -> dict[str, Any] | None:
        parts = []
        if begins and self._echoes:
            parts.append(writer.prompt(self._prompt_ids, self._prompt_logprobs))
        if output.logprobs:
            parts.append(writer.generated(output.logprobs))
        return joined_logprobs(parts) if parts else None
