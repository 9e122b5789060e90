"""Responses' `truncation: "auto"`: a conversation that is too long loses its oldest messages.

Whole messages go, as few as are enough, and never those that instruct, nor the last one. A tool's
result does not stay without its call.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve.api.answering.conversation import conversation_ids
from serve.api.protocol.chat import ChatCompletionRequest, Message
from serve.config import ServerConfig
from serve.engine.async_engine import AsyncEngine
from serve.engine.request_limits import most_tokens
from serve.errors import InvalidRequest, PromptTooLong
from serve.text.tokenizer import Tokenizer

MAX_ROOM = 1024
"""Tokens that an answer of no stated length finds at least, unless that is more than a quarter of
what there is."""


async def drop_oldest(
    asked: ChatCompletionRequest, engine: AsyncEngine, config: ServerConfig
) -> list[int]:
    """Drop what must go for the answer to have its room; the indices of the messages that stayed.

    What does not fit even then stays, to be refused by whoever checks it. Raises InvalidRequest.
    """
    messages = list(asked.messages)
    limit = most_tokens(engine.ready)
    room = asked.max_tokens or min(MAX_ROOM, limit // 4)
    fitting = _Fitting(asked, engine.tokenizer, config, limit - room)
    if await fitting.begins_at(0) is not None:
        return list(range(len(messages)))
    starts = [i for i in range(len(messages)) if _can_begin(messages, i)]
    begin, low, high = starts[-1] if starts else 0, 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if (found := await fitting.begins_at(starts[middle])) is None:
            low = middle + 1
        else:
            begin, high = found, middle
    kept = _kept(messages, begin)
    asked.messages = [messages[i] for i in kept]
    return kept


class _Fitting:
    """Tells what beginnings leave the answer its room."""

    def __init__(
        self,
        asked: ChatCompletionRequest,
        tokenizer: Tokenizer,
        config: ServerConfig,
        max_tokens: int,
    ) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._config = config
        self._max_tokens = max_tokens
        self._messages = list(asked.messages)

    async def begins_at(self, start: int) -> int | None:
        """Where the conversation can begin, at `start` or at the next user's turn (templates may
        insist on one); None if it is too long then."""
        later = range(start, len(self._messages))
        user = next((i for i in later if self._messages[i].role == "user"), start)
        try:
            return start if await self._fits(start) else None
        except InvalidRequest:
            if start == 0:
                raise
        return user if user != start and await self._fits(user) else None

    async def _fits(self, start: int) -> bool:
        kept = [self._messages[i] for i in _kept(self._messages, start)]
        try:
            ids = await conversation_ids(kept, self._asked, self._tokenizer, self._config)
        except PromptTooLong:
            return False
        return len(ids) <= self._max_tokens


def _kept(messages: Sequence[Message], start: int) -> list[int]:
    return [i for i, m in enumerate(messages) if i >= start or _stays(m)]


def _can_begin(messages: Sequence[Message], i: int) -> bool:
    """Whether a conversation can be cut before message i: calls and their results are one."""
    message = messages[i]
    goes_on = i > 0 and messages[i - 1].tool_calls and message.tool_calls
    return not (_stays(message) or message.role == "tool" or goes_on)


def _stays(message: Message) -> bool:
    return message.role in ("system", "developer")
