"""The vocabulary of a .gguf file as llama.cpp understands it: tokens, their types, and which of
them end an answer.

Files rarely name every end by its id. llama.cpp, for which they are written, knows the usual ones
by their text and takes them for control tokens whatever type the file gives them; so do we.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from serve.checkpoint.find import read_first_header
from serve.checkpoint.gguf_header import GGUFArray
from serve.errors import ConfigError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
MAX_TOKEN_LEN: Final = 1024
"""Characters; the longest that vocabularies have are runs of some hundred spaces."""

_PREFIX: Final = "tokenizer.ggml."
_END_TEXTS: Final = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    ]
)
# Marks of code that is filled in; of those that the file names itself, only the named one ends.
_FILL_TEXTS: Final[Mapping[str, Sequence[str]]] = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Where all of these are ends, the other is none: it only closes one of several messages.
_NOT_AN_END_BESIDE: Final = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|return|>", "<|calls|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
)


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """`settings` are those of the tokenizer, without their prefix; `kinds` has a type for each of
    `tokens`."""

    path: Path
    settings: Mapping[str, Any]
    tokens: Sequence[str]
    kinds: Sequence[int]
    end_ids: frozenset[int]
    templates: Mapping[str, str]  # of chats, by name

    def token_of(self, key: str) -> str | None:
        """The token whose id is the setting `key`; None without one. Raises ConfigError."""
        token_id = self.settings.get(key)
        if token_id is None:
            return None
        if type(token_id) is not int or not 0 <= token_id < len(self.tokens):
            raise unusable(self.path, f"{key} is {token_id!r} of {len(self.tokens)} tokens")
        return self.tokens[token_id]


def read_vocabulary(path: Path) -> GGUFVocabulary:
    """Raises ConfigError for a file that is not GGUF, and for a vocabulary that cannot be."""
    header = read_first_header(path)
    settings = {
        key.removeprefix(_PREFIX): value
        for key, value in header.settings.items()
        if key.startswith(_PREFIX)
    }
    tokens = read_list(path, settings, "tokens", str)
    kinds = read_list(path, settings, "token_type", int) or [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise unusable(path, f"{len(kinds)} types of {len(tokens)} tokens")
    if tokens and (longest := max(map(len, tokens))) > MAX_TOKEN_LEN:
        raise unusable(path, f"a token of {longest} characters")
    named = _ends_by_text(settings, tokens)
    not_ends = {text for text, beside in _NOT_AN_END_BESIDE if beside <= {tokens[i] for i in named}}
    ends = {i for i in named if tokens[i] not in not_ends}
    kinds = [CONTROL if i in ends else kind for i, kind in enumerate(kinds)]
    ids = _ends_by_id(path, settings)
    kept = {i for i in ids if i >= len(tokens) or tokens[i] not in not_ends}
    return GGUFVocabulary(
        path, settings, tokens, kinds, frozenset(kept | ends), _templates(header.settings)
    )


def read_list(
    path: Path, settings: Mapping[str, Any], key: str, kind: type | tuple[type, ...]
) -> list[Any]:
    """A setting that is a list of this kind; empty without one. Raises ConfigError."""
    value = settings.get(key)
    if value is None:
        return []
    items = value.read() if isinstance(value, GGUFArray) else [None]
    if not all(isinstance(item, kind) for item in items):
        raise unusable(path, f"{key} is no list of the right kind")
    return items


def unusable(path: Path, reason: str) -> ConfigError:
    """The error for a tokenizer that contradicts itself."""
    return ConfigError(
        f"{path}: its tokenizer cannot be used ({reason}); fetch it again, or serve the model's "
        "Hugging Face folder."
    )


def _ends_by_text(settings: Mapping[str, Any], tokens: Sequence[str]) -> set[int]:
    texts = set(_END_TEXTS)
    for name, candidates in _FILL_TEXTS.items():
        if f"{name}_token_id" not in settings:
            texts.update(candidates)
    return {i for i, token in enumerate(tokens) if token in texts}


def _ends_by_id(path: Path, settings: Mapping[str, Any]) -> set[int]:
    """Of the text, of a turn, of a message, of what is filled in."""
    keys = (f"{name}_token_id" for name in ("eos", "eot", "eom", *_FILL_TEXTS))
    ids = [settings[key] for key in keys if key in settings]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ConfigError(f"{path}: the ids that end an answer are {ids}; fetch it again.")
    return set(ids)


def _templates(settings: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template` is the default; `tokenizer.chat_template.NAME` are others."""
    key = "tokenizer.chat_template"
    found = {"default": settings.get(key)} | {
        name.removeprefix(f"{key}."): text
        for name, text in settings.items()
        if name.startswith(f"{key}.")
    }
    return {name: text for name, text in found.items() if isinstance(text, str)}
