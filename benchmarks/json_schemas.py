"""How much of JSON Schema an answer can be held to, by the official JSON-Schema-Test-Suite.

    python -m benchmarks.json_schemas DIR       # DIR: tests/draft2020-12 of the suite

The suite lies in the source distribution of `jsonschema`, under `json/`:

    pip download --no-binary :all: --no-deps jsonschema
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from serve.answers.schemas import check_schema
from serve.errors import InvalidRequest

END = 256


class _Bytes:
    """A vocabulary with one token for each byte: it can spell every document in one way."""

    tokens = [*(bytes([byte]) for byte in range(END)), b"<end>"]  # noqa: RUF012
    special_token_ids = [END]  # noqa: RUF012
    eos_token_id = END
    bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


VOCABULARY = LLTokenizer(TokenizerWrapper(_Bytes()))


class Case(NamedTuple):
    file: str
    group: str
    name: str
    schema: Any
    document: Any
    is_valid: bool


def matcher(schema: Any) -> LLMatcher:
    """Of the documents that fit a schema; in its error state if there can be none."""
    own = schema if isinstance(schema, dict) else ({} if schema else {"not": {}})
    settings = {"coerce_one_of": False, "lenient": False}
    grammar = f"start: %json {json.dumps({**own, 'x-guidance': settings})}"
    return LLMatcher(VOCABULARY, grammar, log_level=0)


def admits(grammar: LLMatcher, document: Any) -> bool:
    """Whether an answer under a grammar can be exactly this document."""
    tokens = list(json.dumps(document, ensure_ascii=False).encode())
    copy = grammar.deep_copy()
    return bool(copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting())


def cases(directory: Path) -> Iterator[Case]:
    for path in sorted(directory.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            for test in group["tests"]:
                yield Case(
                    path.name,
                    group["description"],
                    test["description"],
                    _of_its_draft(group["schema"], directory.name),
                    test["data"],
                    test["valid"],
                )


def _of_its_draft(schema: Any, directory: str) -> Any:
    """What names no draft is read as of the newest."""
    draft = {"draft4": "04", "draft6": "06", "draft7": "07"}.get(directory)
    if draft is None or not isinstance(schema, dict):
        return schema
    return {"$schema": f"http://json-schema.org/draft-{draft}/schema#", **schema}


def verdict(case: Case) -> str:
    """What becomes of a document under its schema, with all that is asked held to."""
    try:
        checked = check_schema(case.schema, "schema", strict=True)
    except InvalidRequest:
        return "schema refused by name"
    grammar = matcher(checked.schema)
    if grammar.is_error():
        return "schema refused by the grammar"
    if admits(grammar, case.document) == case.is_valid:
        return "right"
    return "refuses valid" if case.is_valid else "admits invalid"


def count(directory: Path) -> tuple[Counter[str], list[tuple[str, Case]]]:
    """How many documents met which verdict; and those that were judged wrongly."""
    judged = [(verdict(case), case) for case in cases(directory)]
    wrong = [item for item in judged if item[0] in {"refuses valid", "admits invalid"}]
    return Counter(word for word, _ in judged), wrong


def main() -> None:
    began = time.process_time()
    counts, wrong = count(Path(sys.argv[1]))
    for word, number in counts.most_common():
        print(f"{number:5}  {word}")
    for word, case in wrong:
        print(f"{word}: {case.file}: {case.group}: {case.name}")
    print(f"{sum(counts.values())} documents, {time.process_time() - began:.1f} s of CPU time")


if __name__ == "__main__":
    main()
