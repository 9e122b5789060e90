"""A chat request's messages → prompt ids, through the tokenizer's chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from serve.api.errors import MissingField, Unsupported
from serve.api.protocol.chat import Message, TemplateFields
from serve.config import ServerConfig
from serve.text.tokenizer import Tokenizer

_TURN = 256  # messages that are looked at before others are served


async def conversation_ids(
    messages: Sequence[Message],
    fields: TemplateFields,
    tokenizer: Tokenizer,
    config: ServerConfig,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """The conversation, rendered and tokenized.

    Raises InvalidRequest for content a text model cannot take, and for what the template refuses.
    """
    if fields.chat_template is not None and not config.trust_request_chat_template:
        raise Unsupported(
            "A chat template in a request is refused unless the server runs with "
            "--trust-request-chat-template.",
            param="chat_template",
        )
    continues = bool(fields.continue_final_message)
    adds_prompt = fields.add_generation_prompt
    return await tokenizer.apply_chat_template(
        await _all_plain(messages),
        add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
        continue_final_message=continues,
        chat_template=fields.chat_template,
        template_kwargs=_template_kwargs(fields),
        tools=tools,
    )


async def _all_plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    plain = []
    for i, message in enumerate(messages):
        if i % _TURN == _TURN - 1:
            await asyncio.sleep(0)
        plain.append(_plain(message, f"messages.{i}"))
    return plain


def _plain(message: Message, path: str) -> dict[str, Any]:
    if message.content is None and message.role != "assistant":
        raise MissingField(f"{path}.content is required.", param=f"{path}.content")
    return message.model_dump(exclude_none=True)


def _template_kwargs(fields: TemplateFields) -> dict[str, Any] | None:
    named = {"reasoning_effort": fields.reasoning_effort, "documents": fields.documents}
    given = {name: value for name, value in named.items() if value is not None}
    return {**given, **(fields.chat_template_kwargs or {})} or None
