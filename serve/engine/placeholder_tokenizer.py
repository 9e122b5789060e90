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
from serve.engine.tokenizer import Tokenizer
from serve.engine.tokenizer_files import TokenizerFiles
from serve.errors import ConfigError, InvalidRequest

_FILES = ("tokenizer*", "vocab*", "*.model", "*.gguf")


class PlaceholderTokenizer(Tokenizer):
    """Knows ids only."""

    def __init__(self, vocab_size: int) -> None:
        names = {f"<{token_id}>": token_id for token_id in range(vocab_size)}
        super().__init__(Backend(WordLevel(names, unk_token="<0>")), TokenizerFiles())

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
    known = path.is_file() or any(next(path.glob(name), None) for name in _FILES)
    if load_format != "dummy" or known:
        return Tokenizer.load(path, chat_template)
    config = read_json_object(path / "config.json")
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{path / 'config.json'} has no vocab_size, which dummy weights need.")
    return PlaceholderTokenizer(size)
