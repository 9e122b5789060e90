"""What the scheduler costs a step, and that waiting requests cost nothing.

    python -m benchmarks.step_overhead

The real scheduler and cache; only the device is left out (every sampled token is 1). Shown in
microseconds and as multiples of a fixed piece of pure Python timed in the same run, so that a slow
or busy machine does not change the answer.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine
from serve.engine.inspect.step_log import StepLog
from serve.kv_cache.manager import KVCacheManager
from serve.kv_cache.prefix_index import BlockHashes
from serve.messages import AddRequest
from serve.sampling_params import SamplingParams
from serve.scheduler.limits import SchedulerLimits
from serve.scheduler.output import StepResult
from serve.scheduler.scheduler import Scheduler

PROMPT_LEN = 64
BLOCK_SIZE = 16
MAX_TOKENS = 4000
STEPS_PER_SAMPLE = 20
YARDSTICK_ADDITIONS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.step_overhead", description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", default="0,1000,100000", help="queue lengths, comma separated")
    parser.add_argument("--samples", type=int, default=25)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()

    rows = [(options.running, int(n)) for n in options.waiting.split(",")]
    rows += [(options.running // 8, 0), (1, 0)]
    engines = {row: decoding_scheduler(*row) for row in rows}
    gc.freeze()
    steps, yardsticks = measure(engines, options.samples)
    yardstick = statistics.median(yardsticks)
    report = Report(
        yardstick_s=yardstick,
        steps=[(row, statistics.median(seconds)) for row, seconds in steps.items()],
        log_s=step_log_s(engines[rows[0]], options.samples),
        match_s=prefix_match_s(num_blocks=2000, repeats=options.samples),
        hash_s=hashing_s(num_blocks=2000, repeats=options.samples),
    )
    text = as_markdown(report)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "step_overhead.md").write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Report:
    """What was measured, in seconds."""

    yardstick_s: float
    steps: list[tuple[tuple[int, int], float]]  # ((running, waiting), schedule and update)
    log_s: float
    match_s: float
    hash_s: float

    @property
    def each_s(self) -> float:
        """One more running request."""
        (few, _), few_s = self.steps[-2]
        (many, _), many_s = self.steps[0]
        return (many_s - few_s) / (many - few)


def decoding_scheduler(running: int, waiting: int) -> Scheduler:
    """A scheduler whose `running` requests are past their prompts, with `waiting` behind them."""
    blocks = running * -(-(PROMPT_LEN + MAX_TOKENS) // BLOCK_SIZE)
    limits = SchedulerLimits(
        max_num_seqs=running,
        max_num_batched_tokens=running * PROMPT_LEN,
        max_model_len=PROMPT_LEN + MAX_TOKENS,
    )
    scheduler = Scheduler(KVCacheManager(blocks, BLOCK_SIZE, 0), limits)
    for number in range(running + waiting):
        prompt = [(number * 7919 + place * 31) % 49000 for place in range(PROMPT_LEN)]
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        scheduler.add(AddRequest(f"r{number}", prompt, sampling, arrival_time=0.0))
    step(scheduler)
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (running, waiting), stats
    return scheduler


def step(scheduler: Scheduler) -> float:
    """One step; the seconds that `schedule` and `update` took together."""
    begin = time.perf_counter()
    plan = scheduler.schedule()
    scheduled = time.perf_counter()
    result = StepResult({entry.request_id: [1] for entry in plan.scheduled if entry.num_samples})
    updating = time.perf_counter()
    scheduler.update(plan, result)
    return time.perf_counter() - updating + scheduled - begin


def measure(
    engines: dict[tuple[int, int], Scheduler], samples: int
) -> tuple[dict[tuple[int, int], list[float]], list[float]]:
    """Seconds a step, by (running, waiting), and the yardstick's; in turns, so all see the same."""
    seconds: dict[tuple[int, int], list[float]] = {row: [] for row in engines}
    yardsticks = []
    for _ in range(samples):
        yardsticks.append(statistics.median(timed(yardstick) for _ in range(STEPS_PER_SAMPLE)))
        for row, scheduler in engines.items():
            steps = [step(scheduler) for _ in range(STEPS_PER_SAMPLE)]
            seconds[row].append(statistics.median(steps))
    return seconds, yardsticks


def yardstick() -> int:
    """A fixed piece of interpreter work of the kind a scheduler does."""
    table: dict[int, int] = {}
    total = 0
    for number in range(YARDSTICK_ADDITIONS):
        table[number] = total
        total += number
    return total


def prefix_match_s(num_blocks: int, repeats: int) -> float:
    """Seconds to find a cached prompt of so many blocks, hashing not included (done once)."""
    kv = KVCacheManager(num_blocks + 8, BLOCK_SIZE, 0, enable_prefix_caching=True)
    prompt = [place % 49000 for place in range(num_blocks * BLOCK_SIZE + 1)]
    hashes = BlockHashes(BLOCK_SIZE)
    hashes.extend(prompt)
    assert kv.grow("first", len(prompt)) is not None
    kv.commit("first", hashes, len(prompt))
    kv.free("first")
    matched = kv.match_prefix(hashes, len(prompt) - 1)
    assert len(matched) == num_blocks, len(matched)
    return statistics.median(
        timed(lambda: kv.match_prefix(hashes, len(prompt) - 1)) for _ in range(repeats)
    )


def hashing_s(num_blocks: int, repeats: int) -> float:
    """Seconds to hash a prompt of so many blocks, which happens once, before it is first looked
    up."""
    prompt = [place % 49000 for place in range(num_blocks * BLOCK_SIZE)]
    return statistics.median(
        timed(lambda: BlockHashes(BLOCK_SIZE).extend(prompt)) for _ in range(repeats)
    )


def step_log_s(scheduler: Scheduler, repeats: int) -> float:
    """Seconds that the step log takes for a step in which nothing but decodes happens."""
    log = StepLog(scheduler.view())
    log.live |= scheduler.roster.requests
    seconds = []
    for _ in range(repeats * STEPS_PER_SAMPLE):
        plan = scheduler.schedule()
        begin = time.perf_counter()
        opened = log.launched(plan, begin)
        launched = time.perf_counter()
        result = StepResult({e.request_id: [1] for e in plan.scheduled if e.num_samples})
        deltas = scheduler.update(plan, result)
        retiring = time.perf_counter()
        log.retired(opened, launched, deltas)
        seconds.append(time.perf_counter() - retiring + launched - begin)
    return statistics.median(seconds)


def timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def as_markdown(report: Report) -> str:
    """Tables of microseconds and yardsticks, with the command and the machine."""
    first_s = report.steps[0][1]
    steps = [
        [
            f"{running:,}",
            f"{waiting:,}",
            *amounts(seconds, report),
            f"{seconds / first_s:.2f}",
        ]
        for (running, waiting), seconds in report.steps
    ]
    others = [
        ["one more running request", *amounts(report.each_s, report)],
        ["the step log, for a step of decodes", *amounts(report.log_s, report)],
        ["finding 2,000 cached blocks", *amounts(report.match_s, report)],
        ["hashing 2,000 blocks, once for each prompt", *amounts(report.hash_s, report)],
    ]
    told = [f"{name}: {value}" for name, value in machine.describe().items()]
    parts = [
        "# What the scheduler costs a step\n",
        "Made by `python -m benchmarks.step_overhead`: `schedule` and `update` of the real "
        "scheduler and cache with running decodes, medians. A yardstick is "
        f"{YARDSTICK_ADDITIONS} dict writes and additions in Python, "
        f"{1e6 * report.yardstick_s:.1f} us in this run; it tells machines apart.\n",
        *table(["running", "waiting", "us a step", "yardsticks", "to the first row"], steps),
        "",
        *table(["", "us", "yardsticks"], others),
        "",
        "; ".join(told) + ".",
    ]
    return "\n".join(parts) + "\n"


def amounts(seconds: float, report: Report) -> list[str]:
    return [f"{1e6 * seconds:.3g}", f"{seconds / report.yardstick_s:.3g}"]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


if __name__ == "__main__":
    main()
