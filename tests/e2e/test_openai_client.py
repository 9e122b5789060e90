"""The default model answers OpenAI's own client, and curl as the log and README show it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.e2e.server_process import ServerProcess

README = Path(__file__).parents[2] / "README.md"
MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture
def api(default_server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{default_server.url}/v1", api_key="unused", max_retries=0)


def test_the_example_in_the_log_works_as_it_stands(default_server: ServerProcess) -> None:
    command = re.search(r"try: (curl .*)", default_server.log)
    assert command
    done = subprocess.run(
        ["bash", "-c", command[1]], capture_output=True, text=True, check=True, timeout=120
    )
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["choices"][0]["message"]["content"]


def readme_example(language: str, containing: str) -> str:
    """The README's code block in `language` that contains these words."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", README.read_text(), re.DOTALL)
    return next(text for kind, text in blocks if kind == language and containing in text)


def test_readmes_curl_example_works(default_server: ServerProcess) -> None:
    command = readme_example("", "curl ").replace("http://127.0.0.1:8000", default_server.url)
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=120
    )
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_readmes_python_example_works(default_server: ServerProcess) -> None:
    code = readme_example("python", "OpenAI").replace("http://127.0.0.1:8000", default_server.url)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip()


def test_a_chat_answer_makes_sense(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=40, temperature=0
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_is_the_same_text_in_pieces(api: openai.OpenAI) -> None:
    request = {"model": MODEL, "messages": QUESTION, "max_tokens": 40, "temperature": 0}
    whole = api.chat.completions.create(**request)
    chunks = list(
        api.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    *pieces, last = chunks
    text = "".join(c.choices[0].delta.content or "" for c in pieces)
    assert text == whole.choices[0].message.content
    assert len(pieces) > 3
    assert pieces[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage == whole.usage


def test_completions_stream_and_do_not(api: openai.OpenAI) -> None:
    request = {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 12, "temperature": 0}
    whole = api.completions.create(**request).choices[0].text
    assert "four" in whole
    pieces = [
        c.choices[0].text for c in api.completions.create(**request, stream=True) if c.choices
    ]
    assert "".join(pieces) == whole


async def test_many_at_once_get_what_they_get_alone(default_server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{default_server.url}/v1", api_key="unused", max_retries=0
    ) as api:

        async def ask(number: int) -> str:
            answer = await api.completions.create(
                model=MODEL, prompt=f"{number}, {number + 1},", max_tokens=16, temperature=0
            )
            return answer.choices[0].text

        alone = [await ask(number) for number in range(4)]
        assert await asyncio.gather(*(ask(number) for number in range(4))) == alone


def test_the_model_is_listed_and_another_is_not_found(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(model="nope", messages=QUESTION)


def test_a_mistake_is_a_bad_request_with_the_field(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model=MODEL, messages=QUESTION, temperature=-1)
    assert caught.value.param == "temperature"
