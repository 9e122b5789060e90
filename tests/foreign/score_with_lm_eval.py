"""`python -m tests.foreign.score_with_lm_eval BACKEND MODEL URL DATA OUT`: a small task's numbers.

BACKEND is `hf` (the model in transformers) or `local-completions` (a server of it at URL).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def task(data: str) -> dict[str, Any]:
    """The most likely of several continuations, over a local file."""
    return {
        "task": "continuations",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": data}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }


def main(backend: str, model: str, url: str, data: str, out: str) -> None:
    """Write every continuation's log-likelihood and whether it is the greedy one, as JSON."""
    from lm_eval import simple_evaluate

    settings: dict[str, Any] = {"pretrained": model, "dtype": "float32", "device": "cpu"}
    if backend == "local-completions":
        settings = {
            "model": "tiny",
            "base_url": f"{url}/v1/completions",
            "tokenizer": model,
            "tokenizer_backend": "huggingface",
            "max_length": 2048,
        }
    results = simple_evaluate(
        model=backend, model_args=settings, tasks=[task(data)], batch_size=1, log_samples=True
    )
    samples = results["samples"]["continuations"]
    Path(out).write_text(json.dumps([sample["filtered_resps"] for sample in samples]))


if __name__ == "__main__":
    main(*sys.argv[1:])
