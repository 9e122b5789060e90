"""Short texts never wait for long ones, whoever brings how many of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from serve.errors import PromptTooLong
from serve.text.tokenizer_threads import NUM_LONG_THREADS, SHORT_CHARS, TokenizerThreads
from tests.api.scripted import byte_level_tokenizer

LONG = "x" * (SHORT_CHARS + 1)


@pytest.fixture
def threads() -> Iterator[TokenizerThreads]:
    threads = TokenizerThreads()
    yield threads
    threads.close()


@pytest.mark.parametrize(
    "about",
    [
        LONG,
        ["hi"] * 1000,
        [{"role": "user", "content": "hi"}, {"content": [{"text": LONG}]}],
        {"documents": [{"text": LONG}]},
        [[1] * (SHORT_CHARS + 1)],
    ],
)
async def test_sec_44_what_is_short_is_done_while_all_else_is_held_up(
    threads: TokenizerThreads, about: object
) -> None:
    released = threading.Event()
    held_up = [
        asyncio.create_task(threads.run(lambda: released.wait(30), about))
        for _ in range(2 * NUM_LONG_THREADS)
    ]
    await asyncio.sleep(0)

    ident = await threads.run(threading.get_ident, "hello", [{"role": "user", "content": "hi"}])

    assert ident != threading.get_ident()
    assert not any(task.done() for task in held_up)
    released.set()
    assert await asyncio.gather(*held_up) == [True] * len(held_up)


async def test_sec_44_a_text_that_cannot_fit_is_refused_unread() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.max_model_len = 8
    text = "a" * (8 * 32 + 1)

    assert len(await tokenizer.encode(text[1:])) == 8 * 32
    for refused, param in (
        (tokenizer.encode(text), "prompt"),
        (tokenizer.encode_all(["a", text]), "prompt"),
        (tokenizer.apply_chat_template([{"role": "user", "content": text}]), "messages"),
    ):
        with pytest.raises(PromptTooLong, match="no text of more than 256 characters") as refusal:
            await refused
        assert refusal.value.param == param
