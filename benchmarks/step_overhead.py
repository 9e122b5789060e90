"""What the scheduler costs a step, and that waiting requests cost nothing.

    python -m benchmarks.step_overhead

The real scheduler and cache; only the device is left out (every sampled token is 1). Shown in
microseconds and as multiples of a fixed piece of pure Python timed in the same run, so that a slow
or busy machine does not change the answer.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import machine
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
    matching = prefix_match_s(num_blocks=2000, repeats=options.samples)

    report = {
        "machine": machine.describe(),
        "yardstick": f"{YARDSTICK_ADDITIONS} dict writes and additions",
        "yardstick_us": yardstick * 1e6,
        "steps": [
            {
                "running": running,
                "waiting": waiting,
                "step_us": statistics.median(seconds) * 1e6,
                "yardsticks": statistics.median(seconds) / yardstick,
            }
            for (running, waiting), seconds in steps.items()
        ],
        "prefix_match_2000_blocks_us": matching * 1e6,
        "prefix_match_2000_blocks_yardsticks": matching / yardstick,
    }
    show(report)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "step_overhead.json").write_text(json.dumps(report, indent=2) + "\n")


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
    result = StepResult({entry.request_id: [1] for entry in plan.scheduled if entry.samples})
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


def timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def show(report: dict) -> None:
    print(f"yardstick: {report['yardstick']}, {report['yardstick_us']:.1f} us")
    print(f"{'running':>8} {'waiting':>8} {'us a step':>10} {'yardsticks':>11} {'to first':>9}")
    first = report["steps"][0]["yardsticks"]
    for row in report["steps"]:
        print(
            f"{row['running']:>8} {row['waiting']:>8} {row['step_us']:>10.1f} "
            f"{row['yardsticks']:>11.2f} {row['yardsticks'] / first:>9.2f}"
        )
    few, many = report["steps"][-2], report["steps"][0]
    each = (many["step_us"] - few["step_us"]) / (many["running"] - few["running"])
    print(f"each more running request: {each:.2f} us a step")
    print(
        f"2000 cached blocks matched in {report['prefix_match_2000_blocks_us']:.0f} us, "
        f"{report['prefix_match_2000_blocks_yardsticks']:.2f} yardsticks"
    )


if __name__ == "__main__":
    main()
