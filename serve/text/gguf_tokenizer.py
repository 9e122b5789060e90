"""A .gguf file's tokenizer, rebuilt with the tokenizers library.

Own work, because transformers' reader takes ten times as long and gives every byte-level
vocabulary GPT-2's way of splitting words, which is wrong for Llama 3, Qwen 2 and Mistral's Tekken
(numbers and letters come out as other tokens than the model was trained on).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from serve.errors import ConfigError
from serve.text.gguf_vocabulary import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    GGUFVocabulary,
    read_list,
    read_vocabulary,
    unusable,
)

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
WORD_PATTERNS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("falcon-h1", "midm-2.0", "jina-v5-nano"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
}
"""`tokenizer.ggml.pre` → what counts as a word, for those that do not split as GPT-2 does."""
_LIKE_LLAMA3: Final = (_LLAMA3, _TEKKEN)
"""These begin with the BOS, and take a whole word that is a token before they look at merges."""
GPT2_LIKE: Final = (
    "default",
    "gpt-2",
    "smollm",
    "phi-2",
    "gigachat",
    "a.x-4.0",
    "mellum",
    "exaone4",
)
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
    vocabulary = read_vocabulary(path)
    try:
        backend = _backend(vocabulary)
        special = {
            name: token
            for name, key in SPECIAL_NAMES.items()
            if (token := vocabulary.token_of(key)) is not None
        }
        _add_bos(backend, vocabulary, special.get("bos_token"))
    except ConfigError:
        raise
    except Exception as error:  # the tokenizers library raises nothing more special
        raise unusable(path, f"{type(error).__name__}: {error}".split("\n", 1)[0]) from error
    return backend, special, dict(vocabulary.templates)


def read_gguf_end_ids(path: Path) -> frozenset[int]:
    """Ids that end an answer. Raises ConfigError."""
    return read_vocabulary(path).end_ids


def _backend(vocabulary: GGUFVocabulary) -> Backend:
    path = vocabulary.path
    if not vocabulary.tokens:
        raise ConfigError(f"{path} holds no tokenizer; serve the model's Hugging Face folder.")
    match vocabulary.settings.get("model"):
        case "gpt2":
            backend = _byte_level(vocabulary)
        case "llama":
            return _sentencepiece(vocabulary)
        case other:
            raise ConfigError(
                f"{path} has a tokenizer of the kind {other!r}; known are gpt2 (byte-level BPE) "
                "and llama (sentencepiece). Serve the model's Hugging Face folder."
            )
    _add_tokens(backend, vocabulary.tokens, vocabulary.kinds)
    return backend


def _byte_level(vocabulary: GGUFVocabulary) -> Backend:
    path, settings = vocabulary.path, vocabulary.settings
    merges = [tuple(m.split(" ", 1)) for m in read_list(path, settings, "merges", str)]
    split = str(settings.get("pre", "default"))
    pattern = WORD_PATTERNS.get(split)
    if pattern is None and split not in GPT2_LIKE:
        known = ", ".join(sorted([*WORD_PATTERNS, *GPT2_LIKE]))
        raise ConfigError(
            f"{path} splits words the {split!r} way (tokenizer.ggml.pre); known are {known}. "
            "Serve the model's Hugging Face folder."
        )
    backend = Backend(
        models.BPE(
            {token: i for i, token in enumerate(vocabulary.tokens)},
            merges,
            ignore_merges=pattern in _LIKE_LLAMA3,
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


def _sentencepiece(vocabulary: GGUFVocabulary) -> Backend:
    settings = vocabulary.settings
    tokens = _with_space_marks(vocabulary)
    own = [t for t, kind in zip(tokens, vocabulary.kinds, strict=True) if kind == USER_DEFINED]
    ids = {token: i for i, token in enumerate(tokens)}
    scores = read_list(vocabulary.path, settings, "scores", (float, int))
    backend = Backend(
        models.BPE(
            ids,
            _merges(ids, scores),
            unk_token=vocabulary.token_of("unknown_token_id") or tokens[0],
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
    if settings.get("add_space_prefix", True):
        spaces = normalizers.Sequence([_space_prefix(own), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    _add_tokens(backend, tokens, vocabulary.kinds)
    return backend


def _with_space_marks(vocabulary: GGUFVocabulary) -> list[str]:
    """The tokens, all of them with sentencepiece's marks for spaces: those that the model's makers
    added may have spaces in the file."""
    known = set(vocabulary.tokens)
    return [
        marked
        if kind == USER_DEFINED and (marked := token.replace(" ", "▁")) not in known
        else token
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ]


def _space_prefix(own: Sequence[str]) -> normalizers.Normalizer:
    """Puts a space before a text, unless it begins with a token of the model's makers.

    The library normalizes such a token as it does a text, and looks for the result: with a space
    before it, it would be found after spaces only.
    """
    texts = (re.escape(text) if text[:1] == "▁" else _either_space(text) for text in own if text)
    unless = f"(?!{'|'.join(texts)})" if any(own) else ""
    return normalizers.Replace(Regex(rf"\A(?=[\s\S]){unless}"), "▁")


def _either_space(text: str) -> str:
    return re.escape(text).replace("▁", "[▁ ]")


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


def _add_tokens(backend: Backend, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind in (UNKNOWN, CONTROL)]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    own = [t for t, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    # Matched after normalizing, because in a sentencepiece vocabulary they may hold space marks.
    backend.add_tokens([AddedToken(t, normalized=True, special=False) for t in own])


def _add_bos(backend: Backend, vocabulary: GGUFVocabulary, bos: str | None) -> None:
    """As llama.cpp does where the file does not decide."""
    settings = vocabulary.settings
    by_default = settings["model"] == "llama" or (
        WORD_PATTERNS.get(str(settings.get("pre"))) in _LIKE_LLAMA3
    )
    if bos is not None and settings.get("add_bos_token", by_default):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, backend.token_to_id(bos))],
        )
