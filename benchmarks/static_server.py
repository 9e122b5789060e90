"""Request-level (static) batching over transformers' `generate`, behind OpenAI's completions API.

What serving looked like before continuous batching: requests wait until a batch is full or the
first of them has waited long enough; the batch is padded on the left, runs until its longest
answer is done, and only then does the next batch begin.

    python -m benchmarks.static_server --model DIR --port 8300 --batch-size 16 --max-wait 0.05

With `"stream": true` a request gets its tokens as the batch makes them (kinder than the plain form,
where everything is returned when the slowest ends); its place in the batch stays taken either way.
GET /stats tells tokens computed and tokens anybody had asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from benchmarks.machine import num_cores


@dataclass(slots=True)
class Waiting:
    """A request in line. `texts` gets each token's text, then None."""

    prompt: list[int]
    max_tokens: int
    stream: bool
    loop: asyncio.AbstractEventLoop
    texts: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)

    def put(self, text: str | None) -> None:
        """From any thread."""
        self.loop.call_soon_threadsafe(self.texts.put_nowait, text)


class StaticBatcher:
    """Owns the model and runs one batch after the other, on a thread of its own."""

    def __init__(self, model_path: str, dtype: str, batch_size: int, max_wait_s: float) -> None:
        torch.set_num_threads(num_cores())
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self._model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=getattr(torch, dtype)
        ).eval()
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s
        self._queue: Queue[Waiting] = Queue()
        self.computed_tokens = self.useful_tokens = self.batches = 0
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, request: Waiting) -> None:
        """Put a request in line."""
        self._queue.put(request)

    def _run(self) -> None:
        while True:
            batch = [self._queue.get()]
            try:
                while len(batch) < self._batch_size:
                    batch.append(self._queue.get(timeout=self._max_wait_s))
            except Empty:
                pass  # nobody else came in time
            self._answer(batch)

    def _answer(self, batch: list[Waiting]) -> None:
        longest_prompt = max(len(request.prompt) for request in batch)
        pads = [longest_prompt - len(request.prompt) for request in batch]
        ids = torch.tensor([[0] * pad + r.prompt for pad, r in zip(pads, batch, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest_prompt - pad) for pad in pads])
        steps = max(request.max_tokens for request in batch)
        # Counted before the answers go out: who has the last of them may read the counters at once.
        self.batches += 1
        self.computed_tokens += steps * len(batch)
        self.useful_tokens += sum(request.max_tokens for request in batch)
        writer = _BatchWriter(batch, self.tokenizer)
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=steps,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                streamer=writer,
            )


class _BatchWriter(BaseStreamer):
    """Hands each step's tokens to the requests of a batch that still want some."""

    def __init__(self, batch: list[Waiting], tokenizer: Any) -> None:
        self._batch = batch
        self._tokenizer = tokenizer
        self._num_steps = -1  # `generate` first shows the prompts
        self._texts: list[list[str]] = [[] for _ in batch]

    def put(self, value: torch.Tensor) -> None:
        self._num_steps += 1
        if self._num_steps == 0:
            return
        for request, texts, token_id in zip(self._batch, self._texts, value.tolist(), strict=True):
            if self._num_steps <= request.max_tokens:
                text = self._tokenizer.decode([token_id])
                if request.stream:
                    request.put(text)
                    if self._num_steps == request.max_tokens:
                        request.put(None)
                else:
                    texts.append(text)

    def end(self) -> None:
        for request, texts in zip(self._batch, self._texts, strict=True):
            if not request.stream:
                request.put("".join(texts))
                request.put(None)


def make_app(batcher: StaticBatcher) -> Starlette:
    """The routes."""

    async def complete(http: Request) -> Response:
        body = await http.json()
        prompt = body["prompt"]
        ids = batcher.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        stream = bool(body.get("stream"))
        loop = asyncio.get_running_loop()
        request = Waiting(ids, int(body.get("max_tokens") or 16), stream, loop)
        batcher.add(request)
        if stream:
            return StreamingResponse(_events(request), media_type="text/event-stream")
        text = await request.texts.get()
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        return JSONResponse({"choices": [choice], "usage": _usage(request)})

    async def stats(_: Request) -> Response:
        return JSONResponse(
            {
                "computed_tokens": batcher.computed_tokens,
                "useful_tokens": batcher.useful_tokens,
                "batches": batcher.batches,
            }
        )

    async def health(_: Request) -> Response:
        return Response()

    return Starlette(
        routes=[
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/stats", stats),
            Route("/health", health),
        ]
    )


async def _events(request: Waiting) -> AsyncIterator[bytes]:
    while (text := await request.texts.get()) is not None:
        yield _event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
    finish = {"index": 0, "text": "", "finish_reason": "length"}
    yield _event({"choices": [finish], "usage": _usage(request)}) + b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _usage(request: Waiting) -> dict[str, int]:
    return {"prompt_tokens": len(request.prompt), "completion_tokens": request.max_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.static_server", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-wait", type=float, default=0.05, help="seconds for a batch to fill")
    options = parser.parse_args()
    batcher = StaticBatcher(options.model, options.dtype, options.batch_size, options.max_wait)
    uvicorn.run(make_app(batcher), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
