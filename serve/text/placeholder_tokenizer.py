"""Stands in for the tokenizer of a model that has none: a config.json with dummy weights.

Such a model is served to be measured, by prompts that are lists of token ids. Token 17 of an answer
reads " <17>", so that streaming, logprobs and token counts work as with any other model; text, and
so chats too, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from serve.checkpoint.json_files import read_json_object
from serve.checkpoint.sizes import check_sizes
from serve.errors import ConfigError, InvalidRequest
from serve.text.token_bytes import TokenBytes
from serve.text.tokenizer import Tokenizer
from serve.text.tokenizer_files import TokenizerFiles, has_vocabulary


class _PlaceholderTokens(TokenBytes):
    """Names instead of a vocabulary, made when asked for: a vocabulary of names would take a second
    and 80 MB for usual sizes."""

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        super().__init__(backend)

    def _token(self, token_id: int) -> str | None:
        return f"<{token_id}>" if 0 <= token_id < self._vocab_size else None


class PlaceholderTokenizer(Tokenizer):
    """Knows ids only."""

    def __init__(self, vocab_size: int) -> None:
        backend = Backend(WordLevel({"<0>": 0}, unk_token="<0>"))
        super().__init__(backend, TokenizerFiles())
        self.tokens = _PlaceholderTokens(backend, vocab_size)
        self.vocab_size, self.max_token_id = vocab_size, vocab_size - 1

    def encode_now(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise InvalidRequest(
            "This model has no tokenizer (it is a config.json with dummy weights), so it cannot "
            "take text or messages: use /v1/completions with a list of token ids as the prompt."
        )

    async def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[int]:
        return self.encode_now("")


def load_tokenizer(path: Path, load_format: str, chat_template: str | None = None) -> Tokenizer:
    """The model's tokenizer, or a placeholder for dummy weights in a folder without one.

    Raises ConfigError as `Tokenizer.load` does.
    """
    if load_format != "dummy" or has_vocabulary(path):
        return Tokenizer.load(path, chat_template)
    file = path / "config.json"
    config = read_json_object(file)
    check_sizes(file, config)
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    if not isinstance(size, int):
        raise ConfigError(f"{file} has no vocab_size, which dummy weights need.")
    return PlaceholderTokenizer(size)
