"""PendingStep: what a launched step has drawn, on its way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from serve.messages import TokenLogprobs
from serve.scheduler.output import StepResult
from serve.worker.device.device import PendingCopy
from serve.worker.sampling.drafts import Drafts
from serve.worker.sampling.logprobs import PendingLogprobs

_NOTHING_LEFT = (
    "no token was left to draw: what the request itself allows (allowed_token_ids, logit_bias, "
    "bad_words) and what must come next in its answer exclude each other."
)


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """Scores of a run of a prompt's tokens."""

    request_id: str
    scores: PendingLogprobs
    num_top: list[int]


@dataclass(frozen=True, slots=True)
class PendingMask:
    """Which of the masked positions had nothing left to draw."""

    places: list[int]
    excluded: PendingCopy


@dataclass(slots=True)
class PendingStep:
    """A launched step. What it drew stands position by position, as in its `request_ids`."""

    prompts: list[PendingPrompt]
    request_ids: Sequence[str] = ()
    token_ids: PendingCopy | None = None
    drafts: Drafts | None = None  # None: one position for each request
    logprobs: PendingLogprobs | None = None
    num_logprobs: Sequence[int] = ()  # of the positions that asked, which are `logprob_places`
    logprob_places: Sequence[int] = ()
    mask: PendingMask | None = None

    def wait(self) -> StepResult:
        """The step's tokens, once they are known."""
        drawn = self.token_ids.wait().tolist() if self.token_ids else []
        if self.drafts is None:
            token_ids = {i: [t] for i, t in zip(self.request_ids, drawn, strict=True)}
        else:
            names = dict.fromkeys(self.request_ids)
            token_ids = dict(zip(names, self.drafts.cut(drawn), strict=True))
        failed = {} if self.mask is None else self._fail_excluded(self.mask, token_ids)
        return StepResult(
            token_ids=token_ids,
            logprobs={} if self.logprobs is None else self._wait_logprobs(self.logprobs, token_ids),
            prompt_logprobs={p.request_id: list(p.scores.wait(p.num_top)) for p in self.prompts},
            failed=failed,
        )

    def _wait_logprobs(
        self, logprobs: PendingLogprobs, token_ids: dict[str, list[int]]
    ) -> dict[str, list[TokenLogprobs]]:
        """Those of the tokens that are given out."""
        found: dict[str, list[TokenLogprobs]] = {}
        scores = logprobs.wait(self.num_logprobs)
        for place, scored in zip(self.logprob_places, scores, strict=True):
            found.setdefault(self.request_ids[place], []).append(scored)
        return {name: scored[: len(token_ids[name])] for name, scored in found.items()}

    def _fail_excluded(self, mask: PendingMask, token_ids: dict[str, list[int]]) -> dict[str, str]:
        """Take back what was drawn where nothing was left; the requests and the reason."""
        failed = {}
        for place in compress(mask.places, mask.excluded.wait().tolist()):
            request_id = self.request_ids[place]
            number = place - self.request_ids.index(request_id)
            if number < len(token_ids[request_id]):  # else it follows a draft that was wrong
                del token_ids[request_id][number:]
                failed[request_id] = _NOTHING_LEFT
        return failed
