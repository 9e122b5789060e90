"""The vocabulary as grammars see it: what each token adds to a text, in bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

from serve.errors import InvalidRequest

Vocabulary = Callable[[tuple[int, ...]], LLTokenizer]
"""The end tokens of a text → the vocabulary with these. Takes a second; for any thread."""


def no_vocabulary(end_token_ids: tuple[int, ...]) -> LLTokenizer:
    """For an engine that is given none: a request with a grammar is refused."""
    raise InvalidRequest("this engine knows no grammars.")


class TokenTable:
    """What llguidance asks of a tokenizer: bytes by id, and how a text is tokenized."""

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_token_ids: Sequence[int],
        eos_token_id: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))


def model_vocabulary(model_path: Path, load_format: str, vocab_size: int) -> Vocabulary:
    """That of a model's own tokenizer, read when it is first asked for. `vocab_size`: how many
    tokens the model scores; those that the tokenizer does not know are never allowed."""

    def with_ends(end_token_ids: tuple[int, ...]) -> LLTokenizer:
        from serve.text.placeholder_tokenizer import load_tokenizer  # a server without needs none

        tokenizer = load_tokenizer(model_path, load_format)
        table = TokenTable(
            [tokenizer.tokens.inside[token_id] for token_id in range(vocab_size)],
            sorted(i for i in tokenizer.tokens.special_ids if i < vocab_size),
            end_token_ids[0],
            lambda text: tokenizer.encode_now(text, add_special_tokens=False),
        )
        return vocabulary_of(table, end_token_ids)

    return with_ends


def vocabulary_of(table: TokenTable, end_token_ids: Sequence[int]) -> LLTokenizer:
    """A table with these end tokens, ready for matching."""
    return LLTokenizer(
        TokenizerWrapper(table), n_vocab=len(table.tokens), eos_token=list(end_token_ids)
    )
