"""What answers in a form cost: constrained beside unconstrained streams, in one run, by turns.

    python -m benchmarks.grammars [--rounds 7]

The default model through the offline engine. Streams of equal numbers of tokens: a constrained one
writes an array of numbers that is never complete before its tokens are, so that no answer ends
early on either side. Writes results/grammars.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine
from serve.answers.forms import json_form
from serve.llm import LLM
from serve.sampling_params import Grammar, SamplingParams

NUM_TOKENS = 96
LONG_ARRAY = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 30}, "size": {"type": "integer"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    },
}
SMALL = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "year": {"type": "integer"}},
    "required": ["city", "year"],
}
PROMPT = "Cities and their sizes as JSON:\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    with LLM(max_num_seqs=16, enable_prefix_caching=False) as llm:
        run(llm, 2, None)
        run(llm, 2, grammar(LONG_ARRAY))
        rows = [row(llm, streams, options.rounds) for streams in (1, 16)]
        first = first_tokens(llm, options.rounds)
    text = report(rows, first, options.rounds)
    (options.out / "grammars.md").write_text(text, encoding="utf-8")
    print(text)


def grammar(schema: object) -> Grammar:
    """A document of the schema."""
    return Grammar(text=json_form(schema))


def run(llm: LLM, streams: int, form: Grammar | None, num_tokens: int = NUM_TOKENS) -> float:
    """Seconds that so many streams take together."""
    wishes = [
        SamplingParams(
            max_tokens=num_tokens, temperature=1.0, seed=seed, ignore_eos=True, grammar=form
        )
        for seed in range(streams)
    ]
    began = time.perf_counter()
    answers = llm.generate([PROMPT] * streams, wishes)
    took = time.perf_counter() - began
    assert {len(answer.token_ids) for answer in answers} == {num_tokens}
    return took


def row(llm: LLM, streams: int, rounds: int) -> tuple[int, float, list[float]]:
    """Streams, tokens a second of the plain ones, and constrained ÷ plain throughput by round."""
    form = grammar(LONG_ARRAY)
    ratios, plain_rates = [], []
    for number in range(rounds):
        order: Sequence[Grammar | None] = (None, form) if number % 2 else (form, None)
        took = {each is None: run(llm, streams, each) for each in order}
        ratios.append(took[True] / took[False])
        plain_rates.append(streams * NUM_TOKENS / took[True])
    return streams, statistics.median(plain_rates), ratios


def first_tokens(llm: LLM, rounds: int) -> tuple[float, float]:
    """Milliseconds that a first token takes longer with a form: one seen before, and a new one."""
    seen, new, plain = [], [], []
    run(llm, 1, grammar(SMALL), 1)
    for number in range(4 * rounds):
        plain.append(run(llm, 1, None, 1))
        seen.append(run(llm, 1, grammar(SMALL), 1))
        fresh = {**SMALL, "properties": {**SMALL["properties"], f"f{number}": {"type": "null"}}}  # type: ignore[dict-item]
        new.append(run(llm, 1, grammar(fresh), 1))
    base = statistics.median(plain)
    return (statistics.median(seen) - base) * 1e3, (statistics.median(new) - base) * 1e3


def report(
    rows: Sequence[tuple[int, float, list[float]]], first: tuple[float, float], rounds: int
) -> str:
    """As Markdown."""
    facts = machine.describe()
    lines = [
        "# What answers in a form cost",
        "",
        f"`python -m benchmarks.grammars --rounds {rounds}`: the default model, {NUM_TOKENS} "
        "tokens a stream at temperature 1, constrained and plain streams by turns; throughput of "
        "the constrained ones as a share of the plain ones: median (least to greatest) of the "
        "rounds.",
        "",
        f"{facts['cpu']}, {facts['cores']} cores, {facts['date']}.",
        "",
        "| streams | plain, tokens/s | constrained ÷ plain |",
        "|---|---|---|",
    ]
    for streams, rate, ratios in rows:
        middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
        lines.append(f"| {streams} | {rate:.0f} | {middle:.3f} ({least:.3f} to {most:.3f}) |")
    seen, new = first
    lines += [
        "",
        f"A first token takes {seen:.2f} ms longer with a small schema that was seen before, and "
        f"{new:.2f} ms with a new one.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
