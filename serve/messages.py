"""The plain values that cross between the front (text, HTTP) and the engine (ids, tensors).

Times are `time.monotonic()` seconds, which on one machine read the same in every process.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from itertools import zip_longest
from typing import Any, NamedTuple

from serve.sampling_params import SamplingParams


class FinishReason(Enum):
    """Why a request ended. STOP: end token or stop string; LENGTH: `max_tokens` or the context.
    REPETITION: `repetition_detection` found the same tokens over and over.
    TIMEOUT: it waited too long for its first step."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"
    TIMEOUT = "timeout"


# ---------------------------------------------------------------------------- front → engine


@dataclass(frozen=True, slots=True)
class Told:
    """What a stream had been told when it left the engine that it ran in: nothing of it is told
    twice, and nothing of it changes."""

    num_prompt_logprobs: int = 0
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None  # None: as far as is known, it never ran
    first_token_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Generate for one prompt. `request_id` is made by the front and never reused.

    `sampling.max_tokens` and, unless it is greedy, `sampling.seed` are resolved (not None).
    With `told` it is a moved stream: one that another engine has begun, and has generated
    `generated_token_ids` for. It arrives as if it had been preempted: no limit of the queue holds
    for it, and its next token is the one that it would have had.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time: float
    priority: int = 0  # lower is served first; counts with --scheduling-policy priority
    cache_salt: str | None = None  # prefixes are shared only among requests with the same salt
    client: str = ""  # whose share it counts to with --scheduling-policy fair
    weight: float = 1.0  # of that client, above 0
    timeout_s: float | None = None  # end it if its first step has not begun so long after arrival
    label: str | None = None  # the id that the client knows; need not be unique
    generated_token_ids: list[int] = field(default_factory=list)
    told: Told | None = None


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Forget these requests; unknown or finished ids are ignored. No delta answers an abort."""

    request_ids: list[str]
    reason: FinishReason = FinishReason.ABORT  # STOP: the front has seen a stop string


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the engine. With `drain`, running and waiting requests finish first."""

    drain: bool


@dataclass(frozen=True, slots=True)
class Control:
    """Show or change something between two steps; `ControlResult` with the same `call_id` answers.

    What there is by `name`, with its `args`: see `serve.engine.inspect.controls`.
    """

    call_id: int
    name: str
    args: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------------------- engine → front


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine can take requests; what it measured and resolved at start."""

    max_model_len: int
    num_blocks: int  # usable device blocks, without the null block
    block_size: int
    num_host_blocks: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    dtype: str
    attention_backend: str
    prefix_caching: bool = False  # equal beginnings of prompts are computed once
    scheduling_policy: str = "fcfs"
    block_bytes: int = 0  # KV of one block, all layers
    cache_dtype: str = ""  # of keys and values
    num_engines: int = 1  # that serve as one
    num_drafts: int = 0  # most guessed tokens of a request in a step; 0: none are guessed
    identity: str = ""  # of weights, formats and kernels: equal where the same seed gives the same


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token itself, its rank (1 = best), and the n best."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """A request's history, for metrics and for `metrics` in the response.

    A delta before the last one carries it as it stands then (`finished_time` is that moment).
    """

    arrival_time: float
    first_scheduled_time: float | None  # None: it never ran
    first_token_time: float | None
    finished_time: float
    num_preemptions: int


class TokenDelta(NamedTuple):
    """What one request gained in one step. The last one of a request has `finish_reason`.

    A named tuple: there is one per request and step, and a frozen dataclass costs three to four
    times as much to make.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token id, when asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # prompt positions 1.. scored in this step
    finish_reason: FinishReason | None = None
    error: str | None = None  # with FinishReason.ERROR
    times: RequestTimes | None = None  # with finish_reason, the first token, and after preemptions
    num_cached_tokens: int = 0  # of the prompt, from the prefix cache; told with `times`
    retry_after_s: float | None = None  # with an error: too much waited here; come back then
    is_invalid: bool = False  # with an error: the request itself is at fault


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's state now (gauges) and since its start (`total_…`)."""

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_blocks_used: int = 0  # referenced by live requests
    num_blocks: int = 0
    num_host_blocks_used: int = 0
    num_host_blocks: int = 0
    num_blocks_cached: int = 0  # whose content the prefix cache can find, held or not
    num_blocks_pinned: int = 0  # of these, the ones that stay
    total_preemptions_recompute: int = 0
    total_preemptions_swap: int = 0
    total_prompt_tokens: int = 0  # each prompt token once, however often it was computed
    total_generation_tokens: int = 0
    total_prefix_cache_queries: int = 0  # tokens looked up in the prefix cache
    total_prefix_cache_hits: int = 0  # tokens found there
    total_preemption_tokens_recomputed: int = 0  # computed tokens that preemption dropped
    total_preemption_blocks_swapped: int = 0  # copied out or in
    total_spec_drafts: int = 0  # shares of steps that had drafts in them
    total_spec_draft_tokens: int = 0
    total_spec_accepted_tokens: int = 0
    spec_accepted_per_pos: tuple[int, ...] = ()  # since the start, by the draft's number
    step_tokens: list[int] = field(default_factory=list)  # size of each step since the last message
    engine: int = 0  # its number, where several serve as one

    def after(self, past: EngineStats) -> EngineStats:
        """The same state, with totals that go on from those of an engine before this one."""
        totals = {
            f.name: getattr(self, f.name) + getattr(past, f.name)
            for f in fields(self)
            if f.name.startswith("total_")
        }
        by_number = zip_longest(self.spec_accepted_per_pos, past.spec_accepted_per_pos, fillvalue=0)
        return replace(self, **totals, spec_accepted_per_pos=tuple(map(sum, by_number)))


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Deltas of one retired step. `time` is when its tokens were known."""

    deltas: list[TokenDelta]
    stats: EngineStats
    time: float


@dataclass(frozen=True, slots=True)
class ControlResult:
    """The answer to a Control: plain values, or why it was refused and for which argument."""

    call_id: int
    value: Any = None
    error: str | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The last message of an engine that cannot go on. `is_config_error`: a start-up mistake."""

    reason: str
    is_config_error: bool = False


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine ended and another one is being started; EngineReady or EngineDied comes next.
    Said by the front's own client, never by an engine."""

    reason: str


ToEngine = AddRequest | AbortRequests | Shutdown | Control
FromEngine = EngineReady | StepOutputs | EngineDied | EngineLost | ControlResult
