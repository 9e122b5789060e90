"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from serve.api.protocol.bounds import MAX_TOKEN_IDS, Listed, ModelName
from serve.api.protocol.chat import Messages, TemplateFields
from serve.api.protocol.common import RequestModel, ResponseModel, TokenId


class TokenizeRequest(TemplateFields):
    """A text (`prompt`) or a conversation (`messages`) to turn into token ids: one of the two."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(ResponseModel):
    """The ids, how many, and how many the model takes."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """Ids to turn into text."""

    model: ModelName | None = None
    tokens: Annotated[Listed[TokenId], Field(max_length=MAX_TOKEN_IDS)]
    skip_special_tokens: bool | None = None


class DetokenizeResponse(ResponseModel):
    """The text; `prompt` is vLLM's name for it."""

    prompt: str
