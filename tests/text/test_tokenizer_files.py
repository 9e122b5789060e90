"""A folder's tokenizer read without transformers is the one that transformers reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from serve.errors import ConfigError
from serve.text.tokenizer_files import TokenizerFiles, read_tokenizer_files
from tests.text.tiny_tokenizers import CHATML, KINDS, byte_level, sentencepiece

TEXTS = (
    "hello world",
    "  hé,\tll a. 1999\n\n  <|end|>x<think here> </s>",
    "世界 👋",
    "<extra> a<extra>",
)


def saved(folder: Path, backend: Backend, **config: Any) -> Path:
    """A model folder."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config))
    (folder / "config.json").write_text("{}")
    return folder


def saved_by_transformers(folder: Path, name: str) -> Path:
    """What a tokenizer class of theirs, which may rebuild everything from the vocabulary, saves."""
    import transformers

    of = sentencepiece() if name == "LlamaTokenizer" else byte_level()
    model = json.loads(of.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = getattr(transformers, name)(vocab=model["vocab"], merges=merges)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return folder


def read_by_transformers(folder: Path) -> tuple[Backend, dict[str, str], dict[str, str]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = tokenizer.chat_template
    templates = {"default": template} if isinstance(template, str) else dict(template or {})
    special = {name: str(text) for name, text in tokenizer.special_tokens_map.items()}
    return tokenizer.backend_tokenizer, special, templates


def assert_same(folder: Path) -> TokenizerFiles:
    """Ids with and without special tokens, text of every id, special tokens and templates."""
    ours, files = read_tokenizer_files(folder)
    theirs, special_tokens, templates = read_by_transformers(folder)
    for text in TEXTS:
        for adds in (True, False):
            expected = theirs.encode(text, add_special_tokens=adds).ids
            assert ours.encode(text, add_special_tokens=adds).ids == expected, text
    assert ours.get_vocab() == theirs.get_vocab()
    for token_id in range(ours.get_vocab_size()):
        assert ours.decode([token_id]) == theirs.decode([token_id])
    assert dict(files.templates) == templates
    named = {k: v for k, v in special_tokens.items() if k.endswith("_token")}
    assert dict(files.special_tokens) == named
    return files


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_is_read_alike(tmp_path: Path, kind: str) -> None:
    assert_same(saved(tmp_path, KINDS[kind]()))


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer"])
def test_what_transformers_classes_save_is_read_alike(tmp_path: Path, name: str) -> None:
    files = assert_same(saved_by_transformers(tmp_path, name))
    assert files.special_tokens["eos_token"]
    assert files.templates == {"default": CHATML}


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "<|end|>", "bos_token": "<|im_start|>"},
        {"eos_token": {"__type": "AddedToken", "content": "<|end|>", "lstrip": True}},
        {"eos_token": "<extra>"},
        {"eos_token": "<|end|>", "pad_token": "<think here>"},
        {"eos_token": "<|end|>", "image_token": "<extra>"},
        {"eos_token": "<|end|>", "extra_special_tokens": ["<extra>"]},
        {"eos_token": "<|end|>", "additional_special_tokens": ["<extra>", "<|im_end|>"]},
        {"eos_token": "<|end|>", "extra_special_tokens": {"image_token": "<extra>"}},
        {"eos_token": "<|end|>", "add_bos_token": True, "bos_token": "<|im_start|>"},
        {
            "eos_token": "<|end|>",
            "added_tokens_decoder": {
                "300": {"content": "<extra>", "lstrip": True, "rstrip": True, "special": False}
            },
        },
    ],
)
def test_tokens_of_the_config_file_are_read_alike(tmp_path: Path, config: dict[str, Any]) -> None:
    assert_same(saved(tmp_path, byte_level(), **config))


def test_an_older_folders_special_tokens_are_read_alike(tmp_path: Path) -> None:
    folder = saved(tmp_path, byte_level())
    names = {"eos_token": {"content": "<|end|>", "lstrip": False}, "bos_token": "<|im_start|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    assert assert_same(folder).special_tokens["bos_token"] == "<|im_start|>"


@pytest.mark.parametrize(
    "template",
    [CHATML, [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}], None],
)
def test_templates_of_the_config_file_are_read_alike(tmp_path: Path, template: object) -> None:
    assert_same(saved(tmp_path, byte_level(), eos_token="<|end|>", chat_template=template))


def test_template_files_come_before_the_config_file(tmp_path: Path) -> None:
    folder = saved(tmp_path, byte_level(), eos_token="<|end|>", chat_template="config")
    (folder / "chat_template.jinja").write_text("file é", "utf-8")
    assert assert_same(folder).templates == {"default": "file é"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert assert_same(folder).templates == {"default": "file é", "tool_use": "tools"}


def test_special_tokens_that_only_the_class_knows_come_from_transformers(tmp_path: Path) -> None:
    folder = saved_by_transformers(tmp_path, "GPT2Tokenizer")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    _, files = read_tokenizer_files(folder)
    assert files.special_tokens["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize(
    "tokens",
    [
        {"300": {"text": "<extra>"}},
        {"x": {"content": "<extra>"}},
        {"300": "<extra>"},
        {"300": {"content": 1}},
        ["<extra>"],
    ],
)
def test_malformed_added_tokens_are_a_config_error(tmp_path: Path, tokens: object) -> None:
    folder = saved(tmp_path, byte_level(), eos_token="<|end|>", added_tokens_decoder=tokens)
    with pytest.raises(ConfigError, match="added tokens"):
        read_tokenizer_files(folder)


def test_the_server_reads_a_folders_tokenizer_without_torch(tmp_path: Path) -> None:
    folder = saved(tmp_path, byte_level(), eos_token="<|end|>")
    code = (
        "import pathlib, sys, serve.serving\n"
        "from serve.text.tokenizer import Tokenizer\n"
        "Tokenizer.load(pathlib.Path(sys.argv[1]))\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("family", ["qwen3", "phi", "gpt2", "opt", "gemma2", "llama"])
@pytest.mark.parametrize("left", [{}, {"tokenizer_config.json": "{}"}, {"vocab.json": '{"a": 0}'}])
def test_a_folder_without_a_tokenizer_is_refused_in_one_line(
    tmp_path: Path, family: str, left: dict[str, str]
) -> None:
    """transformers makes an empty tokenizer of most of them."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    for name, content in left.items():
        (tmp_path / name).write_text(content)

    with pytest.raises(ConfigError, match=r"tokenizer\.json") as caught:
        read_tokenizer_files(tmp_path)

    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_tokens_is_refused(tmp_path: Path) -> None:
    backend = Backend(BPE())
    backend.add_special_tokens(["<s>", "</s>"])
    with pytest.raises(ConfigError, match="no tokenizer, or one without tokens"):
        read_tokenizer_files(saved(tmp_path, backend, eos_token="</s>"))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "[" * 10_000,
        '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        '{"model": {"type": "NoSuch"}}',
    ],
)
def test_sec_51_a_malformed_tokenizer_is_one_line(tmp_path: Path, content: str) -> None:
    folder = saved(tmp_path, byte_level(), eos_token="<|end|>")
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no tokenizer") as caught:
        read_tokenizer_files(folder)
    assert "\n" not in str(caught.value)


def test_ops_13_a_chat_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", byte_level())
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\xff\xfe")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read"):
        read_tokenizer_files(folder)


@pytest.mark.parametrize("named", [[{"name": "default"}], ["default"]])
def test_ops_13_a_list_of_chat_templates_without_texts_is_named(
    tmp_path: Path, named: list[Any]
) -> None:
    folder = saved(tmp_path / "m", byte_level(), chat_template=named)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: every chat template"):
        read_tokenizer_files(folder)
