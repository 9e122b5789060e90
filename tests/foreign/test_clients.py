"""Clients that others wrote for OpenAI's API work unchanged."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.conftest import ANSWER, MODEL, Server, running_server

pytestmark = pytest.mark.filterwarnings("ignore")

HI = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as server:
        yield server


class TestLangChain:
    def chat(self, server: Server, **settings: Any) -> Any:
        import langchain_openai

        return langchain_openai.ChatOpenAI(
            base_url=f"{server.url}/v1", api_key="none", model=MODEL, max_retries=0, **settings
        )

    def test_a_chat_is_answered_whole_in_pieces_in_batches_and_asynchronously(
        self, server: Server
    ) -> None:
        chat = self.chat(server)

        answer = chat.invoke([("system", "Be brief."), ("human", "Hello")])

        assert answer.content == ANSWER
        assert answer.response_metadata["finish_reason"] == "stop"
        assert answer.usage_metadata["output_tokens"] == len(server.ids(ANSWER)) + 1
        assert "".join(piece.content for piece in chat.stream("Hello")) == ANSWER
        assert [each.content for each in chat.batch(["a", "b"])] == [ANSWER] * 2
        assert asyncio.run(chat.ainvoke("Hello")).content == ANSWER

    def test_log_probabilities_and_the_responses_api_are_understood(self, server: Server) -> None:
        scored = self.chat(server, logprobs=True, top_logprobs=2).invoke("Hello")
        (part,) = self.chat(server, use_responses_api=True).invoke("Hello").content

        assert scored.response_metadata["logprobs"]["content"][0]["token"] == " Hello"
        assert part["text"] == ANSWER

    def test_completions_are_answered(self, server: Server) -> None:
        import langchain_openai

        model = langchain_openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", model=MODEL, max_tokens=40
        )

        assert model.invoke("Hello") == ANSWER == "".join(model.stream("Hello"))


class TestLiteLlm:
    @pytest.fixture
    def litellm(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no network
        return importlib.import_module("litellm")

    def test_chats_and_completions_are_answered(self, litellm: Any, server: Server) -> None:
        at = {"api_base": f"{server.url}/v1", "api_key": "none"}

        answer = litellm.completion(model=f"openai/{MODEL}", messages=HI, **at)
        pieces = litellm.completion(model=f"openai/{MODEL}", messages=HI, stream=True, **at)
        text = litellm.text_completion(
            model=f"text-completion-openai/{MODEL}", prompt="Hello", max_tokens=40, **at
        )

        assert answer.choices[0].message.content == ANSWER
        assert "".join(p.choices[0].delta.content or "" for p in pieces) == ANSWER
        assert text.choices[0].text == ANSWER

    def test_a_mistake_is_its_bad_request(self, litellm: Any, server: Server) -> None:
        with pytest.raises(litellm.BadRequestError, match="temperature must be 0 or more"):
            litellm.completion(
                model=f"openai/{MODEL}",
                messages=HI,
                temperature=-1,
                api_base=f"{server.url}/v1",
                api_key="none",
            )

    def test_anthropics_api_is_understood_too(self, litellm: Any, server: Server) -> None:
        answer = litellm.completion(
            model=f"anthropic/{MODEL}",
            messages=HI,
            max_tokens=50,
            api_base=server.url,
            api_key="none",
        )

        assert answer.choices[0].message.content == ANSWER
