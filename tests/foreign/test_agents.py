"""Frameworks for agents, a command line and a reader of events work unchanged."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.messages import AddRequest
from tests.api.conftest import ANSWER, MODEL, Server, running_server

pytestmark = pytest.mark.filterwarnings("ignore")

TWO_TURNS = (
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n" + ANSWER + "<|im_end|>\n"
    "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(max_model_len=8192, num_blocks=1024) as server:
        yield server


def rendered(server: Server) -> str:
    request = next(m for m in reversed(server.client.received) if isinstance(m, AddRequest))
    return server.tokenizer.decode_now(request.prompt_token_ids, False)


class TestPydanticAi:
    @pytest.mark.parametrize("api", ["OpenAIChatModel", "OpenAIResponsesModel"])
    def test_an_agent_answers_streams_and_goes_on(self, server: Server, api: str) -> None:
        import openai
        from pydantic_ai import Agent
        from pydantic_ai.models import openai as models
        from pydantic_ai.providers.openai import OpenAIProvider

        async def talk() -> tuple[str, str, str]:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
                model = getattr(models, api)
                agent = Agent(model(MODEL, provider=OpenAIProvider(openai_client=client)))
                first = await agent.run("Hello")
                second = await agent.run("And?", message_history=first.all_messages())
                prompt = rendered(server)
                async with agent.run_stream("Hello") as stream:
                    streamed = [piece async for piece in stream.stream_text(delta=True)]
            assert second.usage.output_tokens == len(server.ids(ANSWER)) + 1
            return second.output, "".join(streamed), prompt

        assert asyncio.run(talk()) == (ANSWER, ANSWER, TWO_TURNS)


class TestOpenAiAgents:
    @pytest.mark.parametrize("api", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
    def test_an_agent_answers_streams_and_goes_on(self, server: Server, api: str) -> None:
        import agents
        import openai

        agents.set_tracing_disabled(True)

        async def talk() -> tuple[Any, str, str]:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
                model = getattr(agents, api)(model=MODEL, openai_client=client)
                agent = agents.Agent(name="a", model=model)
                first = await agents.Runner.run(agent, "Hello")
                following = [*first.to_input_list(), {"role": "user", "content": "And?"}]
                second = await agents.Runner.run(agent, following)
                prompt = rendered(server)
                stream = agents.Runner.run_streamed(agent, "Hello")
                pieces = [
                    event.data.delta
                    async for event in stream.stream_events()
                    if getattr(event, "data", None) is not None
                    and event.data.type == "response.output_text.delta"
                ]
            return second.final_output, "".join(pieces), prompt

        assert asyncio.run(talk()) == (ANSWER, ANSWER, TWO_TURNS)

    def test_it_goes_on_by_the_last_responses_id(self, server: Server) -> None:
        import agents
        import openai

        agents.set_tracing_disabled(True)

        async def talk() -> None:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
                model = agents.OpenAIResponsesModel(model=MODEL, openai_client=client)
                agent = agents.Agent(name="a", model=model)
                first = await agents.Runner.run(agent, "Hello")
                await agents.Runner.run(agent, "And?", previous_response_id=first.last_response_id)

        asyncio.run(talk())
        assert rendered(server) == TWO_TURNS


def test_smolagents_model_answers_and_streams(server: Server) -> None:
    import smolagents

    model = smolagents.OpenAIModel(
        model_id=MODEL, api_base=f"{server.url}/v1", api_key="none", max_tokens=60
    )
    hello: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]

    answer = model.generate(hello)

    assert answer.content == ANSWER
    assert answer.token_usage.output_tokens == len(server.ids(ANSWER)) + 1
    assert "".join(piece.content or "" for piece in model.generate_stream(hello)) == ANSWER


def test_the_llm_command_answers_and_continues(server: Server, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        json.dumps([{"model_id": "ours", "model_name": MODEL, "api_base": f"{server.url}/v1"}])
    )

    def llm(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm", *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"},
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.rstrip("\n")

    assert llm("prompt", "-m", "ours", "Hello") == ANSWER
    assert llm("prompt", "-m", "ours", "--continue", "--no-stream", "And?") == ANSWER
    assert rendered(server) == TWO_TURNS


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}, "message"),
        ("completions", {"prompt": "Hello"}, "message"),
        ("responses", {"input": "Hello"}, "response.completed"),
        (
            "messages",
            {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60},
            "message_stop",
        ),
    ],
)
def test_httpx_sse_reads_every_stream(
    server: Server, path: str, body: dict[str, Any], last: str
) -> None:
    import httpx_sse

    with (
        httpx.Client(base_url=server.url) as client,
        httpx_sse.connect_sse(
            client, "POST", f"/v1/{path}", json={"stream": True, **body}
        ) as source,
    ):
        events = list(source.iter_sse())

    assert events[-1].event == last
    assert (events[-1].data == "[DONE]") == (last == "message")
    assert all(isinstance(each.json(), dict) for each in events if each.data != "[DONE]")
