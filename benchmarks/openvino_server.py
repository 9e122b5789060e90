"""OpenVINO GenAI's continuous batching behind just enough HTTP for the load generator.

Runs in OpenVINO's own environment (standard library, numpy and openvino_genai only):

    python openvino_server.py --model FILE.gguf --port 8400 --threads 2

POST /v1/completions takes token ids and streams one event a token; nothing is detokenized, which
is to its advantage. One thread steps the pipeline, the event loop writes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading

import numpy as np
import openvino as ov
import openvino_genai as genai

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class Stepper:
    """Owns the pipeline: steps it on a thread while there is work, and passes tokens to queues."""

    def __init__(self, pipeline: genai.ContinuousBatchingPipeline, loop: asyncio.AbstractEventLoop):
        self._pipeline = pipeline
        self._loop = loop
        self._live: dict[int, tuple[genai.GenerationHandle, asyncio.Queue]] = {}
        self._new: list[tuple[list[int], int, asyncio.Queue]] = []
        self._wake = threading.Condition()
        self._next_id = 0
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, prompt: list[int], max_tokens: int) -> asyncio.Queue:
        """The queue gets the number of new tokens after each step, and None at the end."""
        queue: asyncio.Queue = asyncio.Queue()
        with self._wake:
            self._new.append((prompt, max_tokens, queue))
            self._wake.notify()
        return queue

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._new and not self._live:
                    self._wake.wait()
                new, self._new = self._new, []
            for prompt, max_tokens, queue in new:
                self._start(prompt, max_tokens, queue)
            self._pipeline.step()
            self._deliver()

    def _start(self, prompt: list[int], max_tokens: int, queue: asyncio.Queue) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = max_tokens, True
        config.do_sample, config.eos_token_id = False, 2
        tensor = ov.Tensor(np.array([prompt], dtype=np.int64))
        handle = self._pipeline.add_request(self._next_id, tensor, config)
        self._live[self._next_id] = (handle, queue)
        self._next_id += 1

    def _deliver(self) -> None:
        for number, (handle, queue) in list(self._live.items()):
            while handle.can_read():
                for output in handle.read().values():
                    self._put(queue, len(output.generated_ids))
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                self._put(queue, None)
                del self._live[number]

    def _put(self, queue: asyncio.Queue, item: int | None) -> None:
        self._loop.call_soon_threadsafe(queue.put_nowait, item)


async def serve(
    stepper: Stepper, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer one connection's one request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    if head.startswith("GET"):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    else:
        lines = head.lower().split("\r\n")
        length = next(int(line[15:]) for line in lines if line.startswith("content-length:"))
        body = json.loads(await reader.readexactly(length))
        writer.write(HEAD)
        queue = stepper.add(body["prompt"], body["max_tokens"])
        count = 0
        while (new := await queue.get()) is not None:
            count += new
            writer.write(event({"choices": [{"text": " .", "finish_reason": None}]}))
        end = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        finish = {"text": "", "finish_reason": "length"}
        writer.write(event({"choices": [finish], "usage": end}) + b"data: [DONE]\n\n")
    await writer.drain()
    writer.close()


def event(content: dict) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 2048
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(
        options.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": options.threads}
    )
    stepper = Stepper(pipeline, asyncio.get_running_loop())
    server = await asyncio.start_server(
        lambda reader, writer: serve(stepper, reader, writer), "127.0.0.1", options.port
    )
    await server.serve_forever()


asyncio.run(main())
