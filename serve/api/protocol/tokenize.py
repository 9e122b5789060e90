"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from serve.api.protocol.chat import Messages, TemplateFields
from serve.api.protocol.common import Listed, RequestModel, ResponseModel, TokenId


class TokenizeRequest(TemplateFields):
    """A text (`prompt`) or a conversation (`messages`) to turn into token ids: one of the two."""

    model: str | None = None
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

    model: str | None = None
    tokens: Listed[TokenId]
    skip_special_tokens: bool | None = None


class DetokenizeResponse(ResponseModel):
    """The text; `prompt` is vLLM's name for it."""

    prompt: str
