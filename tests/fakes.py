"""A fake device that notices every mistake a scheduler or cache manager can make.

It computes no model. The next token is a hash of all tokens before it, and the "KV" of a token is
that hash too, kept in the slot the plan says. So a wrong, stale, overwritten or uncopied slot is
noticed where it is read, and a wrong order of steps changes the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from serve.engine.health import PROBE_ID
from serve.messages import FromEngine, StepOutputs, ToEngine, TokenDelta, TokenLogprobs
from serve.sampling_params import SamplingParams
from serve.scheduler.output import RowData, ScheduledRequest, SchedulerOutput, StepResult
from serve.worker.executor import TokenMask, WorkerInfo

VOCAB_SIZE = 50

Content = tuple[int, int, int]
"""What a slot holds: position, token, and the hash of all tokens up to here."""


LOST: Content = (-1, -1, -1)
"""What a slot holds that a failed step should have written."""


def extend_hash(previous: int, token_id: int) -> int:
    """The running hash of a token sequence (multiplicative, 61-bit)."""
    return (previous * 1_000_003 + token_id + 1) % ((1 << 61) - 1)


def hash_tokens(token_ids: Sequence[int]) -> int:
    """Hash of a whole sequence."""
    value = 0
    for token_id in token_ids:
        value = extend_hash(value, token_id)
    return value


def next_token(hash_so_far: int, allowed: Sequence[int] | None = None) -> int:
    """The fake model's greedy choice, among those allowed."""
    number = hash_so_far >> 7
    return number % VOCAB_SIZE if allowed is None else allowed[number % len(allowed)]


def allowed_tokens(mask: TokenMask | None) -> dict[int, list[int]]:
    """What a mask allows, by the place of the sampled position."""
    if mask is None:
        return {}
    bits = np.unpackbits(mask.bits.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB_SIZE]
    return {
        int(row): [int(i) for i in np.flatnonzero(b)]
        for row, b in zip(mask.rows, bits, strict=True)
    }


def reference_completion(prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """What the fake model answers when it runs one request at a time and never runs out of room."""
    assert sampling.max_tokens is not None
    value, completion = hash_tokens(prompt), []
    while len(completion) < sampling.max_tokens:
        completion.append(next_token(value))
        value = extend_hash(value, completion[-1])
        if completion[-1] in sampling.stop_token_ids and len(completion) > sampling.min_tokens:
            break
    return completion


@dataclass
class Row:
    """What the fake worker knows of an admitted request."""

    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    wants_prompt_logprobs: bool
    num_computed: int | None = None  # set by its first share
    drafts: list[int] = field(default_factory=list)  # of the step that runs
    failed: bool = False  # its step raised: it is over, but steps launched before that name it


@dataclass
class FakePending:
    """Nothing runs before someone waits for it, so a plan that is changed after launch shows."""

    executor: FakeExecutor
    number: int

    def sample(self, mask: TokenMask | None) -> FakePending:
        self.executor.masks[self.number] = mask
        return self

    def wait(self) -> StepResult:
        return self.executor.run_up_to(self.number)


@dataclass
class FakeExecutor:
    """Executor protocol over dictionaries.

    An inconsistent plan raises AssertionError, which is also kept in `violations`: the engine takes
    any exception of a step for a failure of the device.
    """

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    max_num_seqs: int = 1 << 30
    max_num_batched_tokens: int = 1 << 30
    max_model_len: int | None = None  # what the pool holds
    fail_on: Callable[[int, SchedulerOutput], bool] = lambda number, plan: False
    device: dict[int, list[Content | None]] = field(default_factory=dict)
    host: dict[int, list[Content | None]] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    step_sizes: list[int] = field(default_factory=list)
    violations: list[AssertionError] = field(default_factory=list)
    masks: dict[int, TokenMask | None] = field(default_factory=dict)  # of the steps to come
    closed: bool = False

    def __post_init__(self) -> None:
        self._queue: deque[tuple[int, SchedulerOutput]] = deque()
        self._num_launched = 0
        self._results: dict[int, StepResult | Exception] = {}

    # ------------------------------------------------------------------ Executor

    def start(self) -> WorkerInfo:
        return WorkerInfo(
            num_blocks=self.num_blocks,
            num_host_blocks=self.num_host_blocks,
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len or self.num_blocks * self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            device="fake",
            dtype="float32",
            attention_backend="fake",
        )

    def forward(self, plan: SchedulerOutput) -> FakePending:
        self._queue.append((self._num_launched, plan))
        self._num_launched += 1
        return FakePending(self, self._num_launched - 1)

    def close(self) -> None:
        self.closed = True

    # ------------------------------------------------------------------ running a plan

    def run_up_to(self, number: int) -> StepResult:
        while self._queue and self._queue[0][0] <= number:
            step_number, plan = self._queue.popleft()
            try:
                self._results[step_number] = self._run(step_number, plan)
            except InjectedFailure as error:
                self._results[step_number] = error
            except AssertionError as error:
                self.violations.append(error)
                self._results[step_number] = error
        result = self._results.pop(number)
        if isinstance(result, Exception):
            raise result
        return result

    def _run(self, number: int, plan: SchedulerOutput) -> StepResult:
        for request_id in plan.released:
            self.rows.pop(request_id, None)
        if self.fail_on(number, plan):
            self._fail(number, plan)
        self._copy_blocks(plan)
        self._admit(plan)
        return self._forward(plan, allowed_tokens(self.masks.pop(number, None)))

    def _fail(self, number: int, plan: SchedulerOutput) -> None:
        """Fail between the bookkeeping and all device work, copies included."""
        self._admit(plan)
        for entry in plan.scheduled:
            self.rows[entry.request_id].failed = True
        for copy in plan.swap_out:
            self.host[copy.dst] = [LOST] * self.block_size
        raise InjectedFailure(f"injected into step {number}")

    def _copy_blocks(self, plan: SchedulerOutput) -> None:
        assert not (plan.swap_out and plan.swap_in), "a step swaps both out and in"
        for copy in plan.swap_out:
            assert 1 <= copy.src <= self.num_blocks, f"swap out of foreign block {copy.src}"
            assert 0 <= copy.dst < self.num_host_blocks, f"swap to foreign block {copy.dst}"
            self.host[copy.dst] = list(self._device_block(copy.src))
        for copy in plan.swap_in:
            assert 1 <= copy.dst <= self.num_blocks, f"swap in to foreign block {copy.dst}"
            assert copy.src in self.host, f"host block {copy.src} was never written"
            self.device[copy.dst] = list(self.host[copy.src])

    def _admit(self, plan: SchedulerOutput) -> None:
        for data in plan.admitted:
            assert data.request_id not in self.rows, f"{data.request_id} already has a row"
            self.rows[data.request_id] = self._new_row(data)
        assert len(self.rows) <= self.max_num_seqs, f"{len(self.rows)} rows"

    def _new_row(self, data: RowData) -> Row:
        assert data.block_ids, f"{data.request_id} has no blocks"
        return Row(
            token_ids=list(data.token_ids),
            num_prompt_tokens=data.num_prompt_tokens,
            block_ids=list(data.block_ids),
            wants_prompt_logprobs=data.sampling.prompt_logprobs is not None,
        )

    def _forward(self, plan: SchedulerOutput, allowed: dict[int, list[int]]) -> StepResult:
        total = sum(entry.num_tokens for entry in plan.scheduled)
        assert total == plan.num_scheduled_tokens, (total, plan.num_scheduled_tokens)
        assert total <= self.max_num_batched_tokens, f"{total} tokens exceed the budget"
        if plan.scheduled:
            self.step_sizes.append(total)
        ids = [entry.request_id for entry in plan.scheduled]
        assert len(set(ids)) == len(ids), f"a request is scheduled twice: {ids}"
        alive = [entry for entry in plan.scheduled if not self.rows[entry.request_id].failed]
        self._check_no_block_has_two_writers(alive)
        for entry in alive:  # one forward pass: everything is written before it is read
            self._write_kv(entry)
        result = StepResult({}, {}, {})
        place = 0
        for entry in plan.scheduled:
            if entry in alive:
                self._attend_and_sample(entry, result, allowed.get(place))
            place += entry.num_samples
        return result

    def _check_no_block_has_two_writers(self, entries: list[ScheduledRequest]) -> None:
        writer_of: dict[int, str] = {}
        for entry in entries:
            row = self.rows[entry.request_id]
            row.block_ids.extend(entry.new_block_ids)
            first = entry.start // self.block_size
            last = (entry.start + entry.num_tokens - 1) // self.block_size
            for block_id in row.block_ids[first : last + 1]:
                if entry.request_id == PROBE_ID:
                    assert block_id == 0, "the health probe writes where others read"
                    continue
                assert 1 <= block_id <= self.num_blocks, f"write to foreign block {block_id}"
                other = writer_of.setdefault(block_id, entry.request_id)
                assert other == entry.request_id, f"{other} and {entry.request_id} write {block_id}"

    def _write_kv(self, entry: ScheduledRequest) -> None:
        row = self.rows[entry.request_id]
        start, end = entry.start, entry.start + entry.num_tokens
        assert entry.num_tokens >= 1, f"{entry.request_id} is scheduled for no token"
        if row.num_computed is not None:
            assert row.num_computed == start, f"{entry.request_id} jumps to {start}"
        row.num_computed = end
        if entry.num_samples > 1:
            row.drafts = entry.token_ids[1 - entry.num_samples :]
            assert end - len(row.drafts) == len(row.token_ids), f"{entry} guesses what is known"
            row.token_ids += row.drafts
        assert end <= len(row.token_ids), f"{entry.request_id} runs tokens nobody sampled"
        known = row.token_ids[start:end]
        assert len(entry.token_ids) in (len(known), len(known) - 1), entry
        assert entry.token_ids == known[: len(entry.token_ids)], f"{entry} but the row has {known}"
        value = hash_tokens(row.token_ids[:start])
        for position in range(start, end):
            value = extend_hash(value, row.token_ids[position])
            self._set_slot(row, position, (position, row.token_ids[position], value))

    def _attend_and_sample(
        self, entry: ScheduledRequest, result: StepResult, allowed: list[int] | None
    ) -> None:
        row = self.rows[entry.request_id]
        end = entry.start + entry.num_tokens
        value = 0
        for position in range(end):
            value = extend_hash(value, row.token_ids[position])
            found = self._get_slot(row, position)
            if found == LOST:  # nothing is sampled: whoever still counts on it is noticed
                row.failed = True
                return
            wanted = (position, row.token_ids[position], value)
            assert found == wanted, f"{entry.request_id} reads {found}, not {wanted}"
        if row.wants_prompt_logprobs:
            last = min(end, row.num_prompt_tokens - 1)
            if last > entry.start:
                result.prompt_logprobs[entry.request_id] = [
                    fake_logprob(row.token_ids[p], p) for p in range(entry.start + 1, last + 1)
                ]
        if entry.num_samples:
            assert end == len(row.token_ids), f"{entry.request_id} samples before its end"
            self._sample(row, entry, result, allowed)

    def _sample(
        self, row: Row, entry: ScheduledRequest, result: StepResult, allowed: list[int] | None
    ) -> None:
        """Draw after the known tokens, and on as long as the drafts are what is drawn."""
        drafts, row.drafts = row.drafts, []
        assert allowed is None or not drafts, f"{entry.request_id} has drafts and a mask"
        del row.token_ids[len(row.token_ids) - len(drafts) :]
        drawn: list[int] = []
        while len(drawn) <= len(drafts) and drawn == drafts[: len(drawn)]:
            drawn.append(next_token(hash_tokens(row.token_ids), allowed))
            row.token_ids.append(drawn[-1])
        row.num_computed = len(row.token_ids) - 1
        result.token_ids[entry.request_id] = drawn
        first = len(row.token_ids) - len(drawn)
        result.logprobs[entry.request_id] = [
            fake_logprob(token_id, first + i) for i, token_id in enumerate(drawn)
        ]

    def _device_block(self, block_id: int) -> list[Content | None]:
        return self.device.setdefault(block_id, [None] * self.block_size)

    def _set_slot(self, row: Row, position: int, content: Content) -> None:
        block_id = row.block_ids[position // self.block_size]
        self._device_block(block_id)[position % self.block_size] = content

    def _get_slot(self, row: Row, position: int) -> Content | None:
        block_id = row.block_ids[position // self.block_size]
        return self._device_block(block_id)[position % self.block_size]


class InjectedFailure(Exception):
    """What a step raises when a test asked for it."""


def fake_logprob(token_id: int, position: int) -> TokenLogprobs:
    """A value that tells token and position apart."""
    return TokenLogprobs(token_id, -float(position), 1, [token_id], [-float(position)])


@dataclass
class FakeInbox:
    """Messages put in by the test; what `script` gives is delivered one list per drain."""

    script: deque[list[ToEngine]] = field(default_factory=deque)

    def drain(self, block: bool) -> list[ToEngine]:
        if self.script:
            return self.script.popleft()
        assert not block, "the engine waits for a message that will never come"
        return []


@dataclass
class FakeOutbox:
    """Keeps what the engine said."""

    sent: list[FromEngine] = field(default_factory=list)

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def outputs(self) -> list[StepOutputs]:
        return [message for message in self.sent if isinstance(message, StepOutputs)]

    def deltas(self, request_id: str) -> list[TokenDelta]:
        return [d for out in self.outputs() for d in out.deltas if d.request_id == request_id]


class FakeClock:
    """Time moves when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
