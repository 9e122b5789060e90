"""A .gguf file's tokenizer, rebuilt with the tokenizers library.

Own work, because transformers' reader takes ten times as long and gives every byte-level
vocabulary GPT-2's way of splitting words, which is wrong for Llama 3, Qwen 2 and Mistral's Tekken
(numbers and letters come out as other tokens than the model was trained on).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from serve.engine.gguf_settings import read_gguf_settings
from serve.errors import ConfigError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORD_PATTERNS: Final[Mapping[str, str]] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "deepseek-r1-qwen": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "tekken": _TEKKEN,
}
"""`tokenizer.ggml.pre` → what counts as a word, for those that do not split as GPT-2 does."""
GPT2_LIKE: Final = ("default", "gpt-2", "smollm")
SPECIAL_NAMES: Final[Mapping[str, str]] = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def read_gguf_tokenizer(path: Path) -> tuple[Backend, dict[str, str], dict[str, str]]:
    """The backend, its special tokens by transformers' names, and chat templates by name.

    Raises ConfigError for a file without a tokenizer, or with one of an unknown kind.
    """
    settings = read_gguf_settings(path)
    try:
        return _tokenizer(settings, path)
    except ConfigError:
        raise
    except Exception as error:  # the tokenizers library raises nothing more special
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"{path}: its tokenizer cannot be used ({reason}); fetch it again, or serve the "
            "model's Hugging Face folder."
        ) from error


def _tokenizer(
    settings: Mapping[str, Any], path: Path
) -> tuple[Backend, dict[str, str], dict[str, str]]:
    tokens = settings.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ConfigError(f"{path} holds no tokenizer; serve the model's Hugging Face folder.")
    match settings.get("tokenizer.ggml.model"):
        case "gpt2":
            backend = _byte_level(settings, path)
        case "llama":
            backend = _sentencepiece(settings)
        case other:
            raise ConfigError(
                f"{path} has a tokenizer of the kind {other!r}; known are gpt2 (byte-level BPE) "
                "and llama (sentencepiece). Serve the model's Hugging Face folder."
            )
    _add_special_tokens(backend, settings)
    special = {
        name: str(tokens[settings[f"tokenizer.ggml.{key}"]])
        for name, key in SPECIAL_NAMES.items()
        if f"tokenizer.ggml.{key}" in settings
    }
    _add_bos(backend, settings, special.get("bos_token"))
    return backend, special, _chat_templates(settings)


def read_gguf_end_ids(path: Path) -> frozenset[int]:
    """Ids that end an answer: of the text, of a turn, of a message."""
    settings = read_gguf_settings(path)
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ids = [settings[key] for key in keys if key in settings]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ConfigError(f"{path}: the ids that end an answer are {ids}; fetch it again.")
    return frozenset(ids)


def _byte_level(settings: Mapping[str, Any], path: Path) -> Backend:
    tokens = settings["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in settings["tokenizer.ggml.merges"]]
    split = str(settings.get("tokenizer.ggml.pre", "default"))
    pattern = WORD_PATTERNS.get(split)
    if pattern is None and split not in GPT2_LIKE:
        known = ", ".join(sorted([*WORD_PATTERNS, *GPT2_LIKE]))
        raise ConfigError(
            f"{path} splits words the {split!r} way (tokenizer.ggml.pre); known are {known}. "
            "Serve the model's Hugging Face folder."
        )
    # Llama 3 and Tekken take a whole word that is a token before they look at merges.
    backend = Backend(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            merges,
            ignore_merges=pattern in (_LLAMA3, _TEKKEN),
        )
    )
    by_word: list[pre_tokenizers.PreTokenizer] = []
    if split == "smollm":
        by_word = [pre_tokenizers.Digits(individual_digits=True)]
    if pattern is not None:
        by_word = [pre_tokenizers.Split(Regex(pattern), "isolated")]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*by_word, to_bytes])
    backend.decoder = decoders.ByteLevel()
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(settings: Mapping[str, Any]) -> Backend:
    tokens: list[str] = settings["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Backend(
        models.BPE(
            vocabulary,
            _merges(vocabulary, settings["tokenizer.ggml.scores"]),
            unk_token=tokens[settings.get("tokenizer.ggml.unknown_token_id", 0)],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    spaces: normalizers.Normalizer = normalizers.Replace(" ", "▁")
    if settings.get("tokenizer.ggml.add_space_prefix", True):
        spaces = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """sentencepiece merges the pair whose union scores best, so every way to split a token in two
    is a merge, and the token's score its rank."""
    merges: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocabulary.items():
        for i in range(1, len(token)):
            left, right = token[:i], token[i:]
            if left in vocabulary and right in vocabulary:
                rank = (-scores[token_id], vocabulary[left], vocabulary[right])
                merges.append((*rank, left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _add_special_tokens(backend: Backend, settings: Mapping[str, Any]) -> None:
    tokens = settings["tokenizer.ggml.tokens"]
    kinds = settings.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind in (UNKNOWN, CONTROL)]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    own = [t for t, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    # Matched after normalizing, because in a sentencepiece vocabulary they may hold space marks.
    backend.add_tokens([AddedToken(t, normalized=True, special=False) for t in own])


def _add_bos(backend: Backend, settings: Mapping[str, Any], bos: str | None) -> None:
    by_default = settings["tokenizer.ggml.model"] == "llama" or (
        WORD_PATTERNS.get(str(settings.get("tokenizer.ggml.pre"))) == _LLAMA3
    )
    if bos is not None and settings.get("tokenizer.ggml.add_bos_token", by_default):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, backend.token_to_id(bos))],
        )


def _chat_templates(settings: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template` is the default; `tokenizer.chat_template.NAME` are others."""
    key = "tokenizer.chat_template"
    named = {
        name.removeprefix(f"{key}."): text
        for name, text in settings.items()
        if name.startswith(f"{key}.") and isinstance(text, str)
    }
    return named | ({"default": settings[key]} if key in settings else {})
