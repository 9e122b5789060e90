"""What drafts bring: the same engine with and without them, by turns, on loads that repeat their
prompts and on loads that do not.

    python -m benchmarks.speculation [--model DIR] [--method ngram] [--rounds 3]

Every answer is compared token for token. A ratio is the median over rounds of the time without
drafts over the time with them, neighbouring runs of one process; above 1 drafts are faster. By the
clock, and by processor time, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serve import LLM, SamplingParams
from serve.llm import LLMOutput

CODE = """class Basket:
    def __init__(self, owner):
        self.owner = owner
        self.items = []

    def add(self, item, count=1):
        for _ in range(count):
            self.items.append(item)

    def total(self):
        result = 0
        for item in self.items:
            result = result + item.price
        return result

    def cheapest(self):
        best = None
        for item in self.items:
            if best is None or item.price < best.price:
                best = item
        return best

    def describe(self):
        lines = []
        for item in self.items:
            lines.append(item.name + ": " + str(item.price))
        return "\\n".join(lines)
"""
LIGHTHOUSE = (
    "The lighthouse at Cape Marrow was built in 1871 by the engineer Thomas Hale. It stands 34 "
    "metres tall and was painted white and red. In 1923 a storm destroyed the keeper's house, and "
    "the keeper, Anna Lind, moved into the tower itself with her two children. The light was "
    "changed to electricity in 1951. Since 1987 the lighthouse has worked without a keeper, and "
    "today it is a museum that is open from May to September. About 12,000 people visit it every "
    "year. The museum shows the old lamp, letters by Anna Lind, and a model of the first keeper's "
    "house."
)
RIVER = (
    "The river Tolva rises in the hills above Brenn and reaches the sea after 212 kilometres. "
    "Salmon returned to the river in 2004, after two paper mills had closed and the town of Brenn "
    "had built a new treatment plant for 9 million euros. The fishing club counts the fish at the "
    "weir every autumn; in 2019 it counted 1,450 salmon. A plan for a dam near Ostby was given up "
    "in 2011 because more than 30,000 people had signed a petition against it."
)
TOPICS = (
    "bread", "bicycles", "the moon", "chess", "coffee", "glass", "bridges", "maps", "bees", "salt",
    "trains", "paper", "clocks", "wool", "the violin", "lemons", "volcanoes", "radio", "tea",
    "owls", "ships", "mirrors", "honey", "football", "kites", "pencils", "rivers", "wheat", "silk",
    "islands", "candles", "gardens",
)  # fmt: skip


def chat(text: str) -> str:
    """A user's turn, in the default model's own format."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def edit(instruction: str) -> str:
    """An edit as completion models are asked for one."""
    return (
        f"# basket.py\n```python\n{CODE}```\n\n"
        f"# basket.py, {instruction}; all else is the same\n```python\n"
    )


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts that run one after the other, or all at once."""

    name: str
    prompts: tuple[str, ...]
    max_tokens: int
    at_least: float  # the ratio that is asked for
    at_once: bool = False


LOADS = (
    Load(
        "code edit",
        (
            edit("with the class renamed to Cart"),
            edit("with a docstring in every method"),
            edit("with the variable `item` renamed to `product`"),
        ),
        256,
        1.8,
    ),
    Load(
        "summary",
        tuple(
            chat(f"Summarize this text in a few sentences, in its own words.\n\n{text}")
            for text in (LIGHTHOUSE, RIVER)
        ),
        160,
        1.5,
    ),
    Load(
        "JSON extraction",
        tuple(
            chat(f"Extract the facts of this text as JSON with short keys:\n\n{text}")
            for text in (LIGHTHOUSE, RIVER)
        ),
        160,
        1.2,
    ),
    Load(
        "chat",
        (
            chat("Tell me about the history of bread."),
            chat("Write a short story about a fox."),
            chat("Explain how a bicycle stays upright."),
        ),
        160,
        0.98,
    ),
    Load(
        "32 streams of chat",
        tuple(chat(f"Tell me about {topic}.") for topic in TOPICS),
        96,
        0.98,
        at_once=True,
    ),
)


@dataclass(slots=True)
class Figures:
    """One load at one temperature."""

    load: str
    temperature: float
    ratio: float  # by the clock
    cpu_ratio: float
    tokens: int
    differing: int
    drafted: int
    accepted: int


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 when a token differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", nargs="*", default=[load.name for load in LOADS])
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 0.7])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    config = json.dumps({"method": options.method})
    settings = {"max_model_len": "2048", "enable_prefix_caching": False}
    plain = LLM(options.model, **settings)
    drafting = LLM(options.model, speculative_config=config, **settings)
    rows = []
    for load in LOADS:
        for temperature in options.temperatures if load.name in options.loads else ():
            figures = compare(plain, drafting, load, temperature, options.rounds)
            print(as_line(figures, load), flush=True)
            rows.append(figures)
    print(f"{sum(r.tokens for r in rows)} tokens, {sum(r.differing for r in rows)} differ")
    if options.out is not None:
        options.out.write_text(table(rows), encoding="utf-8")
    return int(any(figures.differing for figures in rows))


def compare(plain: LLM, drafting: LLM, load: Load, temperature: float, rounds: int) -> Figures:
    """Both by turns; the first round is not counted, and lets the drafter learn what steps cost."""
    before = drafting.stats
    ratios: list[tuple[float, float]] = []
    tokens = differing = 0
    for _ in range(rounds + 1):
        wanted, without = answer(plain, load, temperature)
        got, with_drafts = answer(drafting, load, temperature)
        ratios.append((without[0] / with_drafts[0], without[1] / with_drafts[1]))
        tokens += sum(len(output.token_ids) for output in got)
        differing += sum(count_differing(a, b) for a, b in zip(wanted, got, strict=True))
    after = drafting.stats
    return Figures(
        load.name,
        temperature,
        statistics.median(clock for clock, _ in ratios[1:]),
        statistics.median(cpu for _, cpu in ratios[1:]),
        tokens,
        differing,
        after.total_spec_draft_tokens - before.total_spec_draft_tokens,
        after.total_spec_accepted_tokens - before.total_spec_accepted_tokens,
    )


def answer(llm: LLM, load: Load, temperature: float) -> tuple[list[LLMOutput], tuple[float, float]]:
    """All of a load's answers; seconds that they took together, and of processor time."""
    sampling = SamplingParams(
        max_tokens=load.max_tokens,
        temperature=temperature,
        top_p=0.95,
        seed=7,
        ignore_eos=load.at_once,
    )
    began, cpu_began = time.perf_counter(), time.process_time()
    if load.at_once:
        outputs = llm.generate(list(load.prompts), sampling)
    else:
        outputs = [llm.generate([prompt], sampling)[0] for prompt in load.prompts]
    return outputs, (time.perf_counter() - began, time.process_time() - cpu_began)


def count_differing(wanted: LLMOutput, got: LLMOutput) -> int:
    """Tokens from the first that is another."""
    a, b = wanted.token_ids, got.token_ids
    same = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    return max(len(a), len(b)) - same


def as_line(figures: Figures, load: Load) -> str:
    """A row of the table."""
    return (
        f"| {figures.load} | {figures.temperature} | **{figures.ratio:.2f}** | "
        f"{figures.cpu_ratio:.2f} | "
        f"{load.at_least:.2f} | {figures.accepted} of {figures.drafted} | "
        f"{figures.tokens} | {figures.differing} |"
    )


def table(rows: Sequence[Figures]) -> str:
    """Markdown."""
    loads = {load.name: load for load in LOADS}
    head = (
        "| load | temperature | times as fast | by processor time | asked for | "
        "drafts accepted | tokens compared | of these differ |\n|---|---|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(as_line(row, loads[row.load]) for row in rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
