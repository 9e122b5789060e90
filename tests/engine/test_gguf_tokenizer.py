"""Tokenizers of .gguf files, written here with the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import pre_tokenizers

from serve.engine.gguf_settings import find_gguf, read_gguf_settings
from serve.engine.served_model import read_generation_config
from serve.engine.tokenizer import Tokenizer
from serve.errors import ConfigError

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CONTROL, USER_DEFINED, BYTE = 3, 4, 6


def write(path: Path, tokens: list[str], types: dict[str, int], **settings: Any) -> Path:
    """A file with a vocabulary and no tensors; settings are `tokenizer.` keys without dots."""
    writer = GGUFWriter(path, "llama")
    writer.add_token_list(tokens)
    writer.add_token_types([types.get(token, 1) for token in tokens])
    for key, value in settings.items():
        name = f"tokenizer.{key}" if key.startswith("chat_template") else f"tokenizer.ggml.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case str():
                writer.add_string(name, value)
            case list():
                writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(path: Path, pre: str = "default", **settings: Any) -> Path:
    tokens = [*ALPHABET, "he", "llo", "12", "123", "<bos>", "<eot>", "<think>"]
    types = {"<bos>": CONTROL, "<eot>": CONTROL, "<think>": USER_DEFINED}
    merges = ["h e", "1 2", "12 3"]
    settings = {"model": "gpt2", "pre": pre, "merges": merges, "bos_token_id": 260} | settings
    return write(path, tokens, types, **settings)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in tokenizer.encode_now(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("default", ["123", "4"]),  # a run of digits is one word
        ("smollm", ["1", "2", "3", "4"]),  # each digit is
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["<bos>", "123", "4"]),  # three digits are, and Llama 3 begins with its BOS
        ("tekken", ["1", "2", "3", "4"]),
    ],
)
def test_each_vocabulary_splits_words_its_own_way(
    tmp_path: Path, pre: str, expected: list[str]
) -> None:
    assert pieces(Tokenizer.load(byte_level(tmp_path / "m.gguf", pre)), "1234") == expected


def test_special_and_own_tokens_are_found_in_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path / "m.gguf"))
    text = "hé<think><eot> 😀"
    token_ids = tokenizer.encode_now(text)
    assert {261, 262} <= set(token_ids)
    assert tokenizer.decode_now(token_ids, skip_special_tokens=False) == text
    assert tokenizer.decode_now(token_ids) == "hé<think> 😀"


def test_ends_templates_and_specials_come_from_the_file(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    path = byte_level(
        tmp_path / "m.gguf", eos_token_id=260, eot_token_id=261, chat_template=template
    )
    assert read_generation_config(path, "auto").eos_token_ids == {260, 261}
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (260, 260)
    assert tokenizer.has_chat_template
    assert not Tokenizer.load(byte_level(tmp_path / "base.gguf")).has_chat_template


@pytest.mark.parametrize(("add_bos", "num_bos"), [(True, 1), (False, 0)])
def test_the_file_decides_about_the_bos(tmp_path: Path, add_bos: bool, num_bos: int) -> None:
    path = byte_level(tmp_path / "m.gguf", add_bos_token=add_bos)
    assert Tokenizer.load(path).encode_now("hello").count(260) == num_bos


def sentencepiece(path: Path, **settings: Any) -> Path:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", "h", "e", "l", "o", "ll", "he", "hell", "hello", "▁hello", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *words]
    types = {"<unk>": 2, "<s>": CONTROL, "</s>": CONTROL} | dict.fromkeys(bytes_, BYTE)
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))]
    settings = {"model": "llama", "scores": scores, "bos_token_id": 1} | settings
    return write(path, tokens, types, **settings)


def test_sentencepiece_merges_by_score_falls_back_to_bytes_and_keeps_spaces(
    tmp_path: Path,
) -> None:
    tokenizer = Tokenizer.load(sentencepiece(tmp_path / "m.gguf"))
    assert pieces(tokenizer, "hello") == ["<s>", " hello"]
    for text in ("hello  hello", " hello", "h é 😀", "ll"):
        assert tokenizer.decode_now(tokenizer.encode_now(text)) == text


def test_a_sentencepiece_file_may_do_without_the_leading_space(tmp_path: Path) -> None:
    path = sentencepiece(tmp_path / "m.gguf", add_space_prefix=False, add_bos_token=False)
    tokenizer = Tokenizer.load(path)
    assert pieces(tokenizer, "hello") == ["hello"]
    assert tokenizer.decode_now(tokenizer.encode_now(" hello")) == " hello"


def test_unknown_kinds_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'klingon' way"):
        Tokenizer.load(byte_level(tmp_path / "pre.gguf", "klingon"))
    with pytest.raises(ConfigError, match="kind 'bert'"):
        Tokenizer.load(byte_level(tmp_path / "model.gguf", model="bert"))


@pytest.mark.parametrize(
    "settings",
    [
        {"bos_token_id": 999_999},
        {"merges": ["h nowhere"]},
        {"merges": ["he"]},
        {"model": "llama"},  # without scores
    ],
)
def test_ops_13_a_tokenizer_that_contradicts_itself_is_one_clear_line(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    file = byte_level(tmp_path / "m.gguf", **settings)
    with pytest.raises(ConfigError, match=r"m\.gguf: its tokenizer cannot be used") as caught:
        Tokenizer.load(file)
    assert "\n" not in str(caught.value)


def test_ops_13_an_end_id_that_is_no_number_is_refused(tmp_path: Path) -> None:
    file = byte_level(tmp_path / "m.gguf", eos_token_id="</s>")
    with pytest.raises(ConfigError, match=r"m\.gguf: the ids that end an answer"):
        read_generation_config(file, "auto")


@pytest.mark.parametrize("cut", [0, 3, 10, 200])
def test_ops_13_a_cut_file_is_a_config_error(tmp_path: Path, cut: int) -> None:
    whole = byte_level(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:cut])
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        read_gguf_settings(path)
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        read_gguf_settings(tmp_path / "missing.gguf")


def test_a_folder_that_holds_one_gguf_file_and_no_config_means_that_file(tmp_path: Path) -> None:
    file = byte_level(tmp_path / "m.gguf")
    assert find_gguf(file) == find_gguf(tmp_path) == file
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) is None


def test_ops_13_a_folder_without_a_model_or_with_several_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither config\.json nor a \.gguf file"):
        find_gguf(tmp_path)
    for name in ("b.gguf", "a.gguf"):
        byte_level(tmp_path / name)
    with pytest.raises(ConfigError, match=r"several \.gguf files \(a\.gguf, b\.gguf\); name the"):
        find_gguf(tmp_path)
