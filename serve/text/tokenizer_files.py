"""What a checkpoint's files say about its tokenizer: the backend, special tokens, chat templates.

A folder's tokenizer.json is the whole tokenizer, and tokenizer_config.json beside it names special
tokens and holds the chat template. Reading the two takes a fraction of a second; transformers,
which reads every older kind too, imports torch first and so takes seconds and 300 MB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from serve.checkpoint.find import find_gguf
from serve.checkpoint.json_files import read_json_object, read_text
from serve.errors import ConfigError
from serve.text.gguf_tokenizer import read_gguf_tokenizer

_VOCABULARIES = ("tokenizer.json", "*.model", "vocab*", "merges.txt", "*.tiktoken", "tekken.json")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a checkpoint's tokenizer files say, beside the backend itself.

    `special_tokens` are the names templates use (bos_token, eos_token …) with their text.
    `templates` are chat templates by name; the plain one is "default".
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)


def has_vocabulary(path: Path) -> bool:
    """Whether a model brings a tokenizer along. Raises ConfigError as `find_gguf` does."""
    return find_gguf(path) is not None or any(
        next(path.glob(name), None) is not None for name in _VOCABULARIES
    )


def read_tokenizer_files(path: Path) -> tuple[Backend, TokenizerFiles]:
    """Of a model folder or a .gguf file. Raises ConfigError, also for a tokenizer without tokens:
    that is what transformers makes of a folder without one."""
    if not has_vocabulary(path):
        raise _without_tokenizer(path)
    backend, files = _read(path)
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    few = backend.get_vocab_size(with_added_tokens=False) <= len(added) + 1
    if few and len(backend.get_vocab(with_added_tokens=False).keys() - added) <= 1:
        raise _without_tokenizer(path)
    return backend, files


def _without_tokenizer(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}: the model has no tokenizer, or one without tokens; download its tokenizer.json "
        "(or tokenizer.model, or vocab.json with merges.txt) and tokenizer_config.json into the "
        "folder. Without weights and tokenizer, --load-format dummy serves token ids."
    )


def _read(path: Path) -> tuple[Backend, TokenizerFiles]:
    gguf_file = find_gguf(path)
    if gguf_file is not None:
        backend, special_tokens, templates = read_gguf_tokenizer(gguf_file)
        return backend, TokenizerFiles(special_tokens, templates)
    config = read_json_object(path / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # an older folder has its special tokens apart
        config |= read_json_object(path / "special_tokens_map.json")
    # Where neither file names an end, it is known to transformers' class alone (GPT-2's).
    if (path / "tokenizer.json").exists() and "eos_token" in config:
        return _read_json(path, config)
    return _read_with_transformers(path)


def _read_json(path: Path, config: Mapping[str, Any]) -> tuple[Backend, TokenizerFiles]:
    content = read_text(path / "tokenizer.json")
    try:
        backend = Backend.from_str(content)
    except Exception as error:  # the library raises nothing more special
        reason = str(error).split("\n", 1)[0]
        raise ConfigError(
            f"{path / 'tokenizer.json'} is no tokenizer ({reason}); fetch it again."
        ) from error
    special_tokens = {
        name: text
        for name, token in {**config, **_extra_names(config)}.items()
        if name.endswith("_token") and (text := _text(token)) is not None
    }
    try:
        _add_missing(backend, config, special_tokens)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"The added tokens of {path / 'tokenizer_config.json'} are malformed ({error})."
        ) from error
    return backend, TokenizerFiles(special_tokens, _templates(path, config))


def _extra_names(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Further special tokens that have names of their own."""
    extra = config.get("extra_special_tokens")
    return extra if isinstance(extra, dict) else {}


def _text(token: object) -> str | None:
    """A token is written as its text, or as an object with flags; null means there is none."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _add_missing(
    backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Tokens that tokenizer_config.json alone knows, in the order of their ids."""
    there = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda e: int(e[0]))
    tokens = [
        AddedToken(token["content"], **{flag: token[flag] for flag in _FLAGS if flag in token})
        for _, token in listed
    ]
    backend.add_tokens([token for token in tokens if token.content not in there])
    further = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = [*special_tokens.values(), *map(_text, further if isinstance(further, list) else [])]
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    backend.add_special_tokens(
        [
            AddedToken(text, normalized=False, special=True)
            for text in dict.fromkeys(named)
            if text and text not in special
        ]
    )


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files of their own come before the entry in tokenizer_config.json."""
    files = {"default": path / "chat_template.jinja"}
    files |= {f.stem: f for f in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    found = {name: read_text(file) for name, file in files.items() if file.exists()}
    if found:
        return found
    match config.get("chat_template"):
        case str(template):
            return {"default": template}
        case list(named):
            try:
                return {str(each["name"]): str(each["template"]) for each in named}
            except (KeyError, TypeError) as error:
                raise ConfigError(
                    f"{path / 'tokenizer_config.json'}: every chat template in a list needs a name "
                    "and a template; fetch it again."
                ) from error
    return {}


def _read_with_transformers(path: Path) -> tuple[Backend, TokenizerFiles]:
    from transformers import AutoTokenizer  # takes seconds to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for missing or broken files
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"No tokenizer could be read from {path} ({reason}); the folder needs a "
            "tokenizer.json, or a tokenizer.model, with its tokenizer_config.json."
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ConfigError(
            f"{path} has a {type(tokenizer).__name__}, which is not of the tokenizers library; "
            "convert it to a tokenizer.json."
        )
    template = tokenizer.chat_template
    templates = {"default": template} if isinstance(template, str) else dict(template or {})
    special = {name: str(text) for name, text in tokenizer.special_tokens_map.items()}
    return backend, TokenizerFiles(special, templates)
