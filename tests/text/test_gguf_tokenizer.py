"""Tokenizers of .gguf files, written here with the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import pre_tokenizers

from serve.errors import ConfigError
from serve.text.generation_config import read_generation_config
from serve.text.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6


def write(path: Path, tokens: list[str], types: dict[str, int], /, **settings: Any) -> Path:
    """A file with a vocabulary and no tensors; settings are `tokenizer.` keys without dots."""
    writer = GGUFWriter(path, "llama")
    settings = {"tokens": tokens, "token_type": [types.get(t, 1) for t in tokens]} | settings
    for key, value in settings.items():
        name = f"tokenizer.{key}" if key.startswith("chat_template") else f"tokenizer.ggml.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case -1:
                writer.add_int32(name, value)
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
        ("pixtral", ["<bos>", "123", "4"]),  # as Llama 3
        ("tekken", ["<bos>", "1", "2", "3", "4"]),  # TOK-42
        ("phi-2", ["123", "4"]),
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
@pytest.mark.parametrize("pre", ["default", "tekken", "llama3"])
def test_tok_42_the_file_decides_about_the_bos(
    tmp_path: Path, pre: str, add_bos: bool, num_bos: int
) -> None:
    path = byte_level(tmp_path / "m.gguf", pre, add_bos_token=add_bos)
    assert Tokenizer.load(path).encode_now("hello").count(260) == num_bos
    no_id = byte_level(tmp_path / "no_id.gguf", pre, bos_token_id=None)
    assert Tokenizer.load(no_id).encode_now("he") == [256]


def with_marks(path: Path, marks: dict[str, int], **settings: Any) -> list[str]:
    """A file whose vocabulary has further tokens of these types; returns its tokens."""
    tokens = [*ALPHABET, "</s>", *marks]
    settings = {"model": "gpt2", "pre": "default", "merges": [], "eos_token_id": 256} | settings
    write(path, tokens, {"</s>": CONTROL} | marks, **settings)
    return tokens


END_TEXTS = """
<|eot_id|> <|im_end|> <|return|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT>
_<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <｜end▁of▁sentence｜> [e~[
<|fim_pad|> <|repo_name|> <|file_sep|>
"""


def test_eos_41_ends_are_known_by_their_text_whatever_their_type(tmp_path: Path) -> None:
    kinds = (NORMAL, CONTROL, USER_DEFINED)
    marks = {text: kinds[i % 3] for i, text in enumerate(END_TEXTS.split())}
    others = {"<|im_start|>": CONTROL, "<think>": USER_DEFINED, "im_end": NORMAL}
    tokens = with_marks(tmp_path / "m.gguf", marks | others)

    ends = read_generation_config(tmp_path / "m.gguf", "auto").eos_token_ids

    assert {tokens[i] for i in ends} == {"</s>", *END_TEXTS.split()}
    tokenizer = Tokenizer.load(tmp_path / "m.gguf")
    for text in marks:  # each is one token in a text, and not shown
        assert tokenizer.encode_now(text) == [tokens.index(text)]
        assert tokenizer.decode_now([tokens.index(text)]) == ""


@pytest.mark.parametrize(
    ("marks", "ends"),
    [
        ("<|end|> <|return|> <|call|>", "</s> <|return|> <|call|>"),  # Harmony's channels
        ("<|end|> <|flush|> <|calls|>", "</s> <|flush|> <|calls|>"),
        ("<|end|> <|return|>", "</s> <|end|> <|return|>"),
        ("<|tool_response> <turn|>", "<|tool_response> <turn|>"),
    ],
)
def test_eos_41_what_closes_one_of_several_messages_is_no_end(
    tmp_path: Path, marks: str, ends: str
) -> None:
    tokens = with_marks(tmp_path / "m.gguf", dict.fromkeys(marks.split(), CONTROL))
    found = read_generation_config(tmp_path / "m.gguf", "auto").eos_token_ids
    assert {tokens[i] for i in found} == set(ends.split())


def test_eos_41_ids_that_the_file_names_end_too(tmp_path: Path) -> None:
    marks = {"<fim>": CONTROL, "[PAD]": CONTROL, "<stop>": CONTROL}
    ids = {"fim_pad_token_id": 257, "eot_token_id": 259}
    with_marks(tmp_path / "m.gguf", marks, **ids)
    assert read_generation_config(tmp_path / "m.gguf", "auto").eos_token_ids == {256, 257, 259}


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


OWN = ["<think>", "▁▁▁", "<a b>", "▁own", "  \n"]


def with_own_tokens(path: Path, **settings: Any) -> Tokenizer:
    """A sentencepiece file with tokens of the model's makers: marks, runs of spaces, one with a
    space in it, one after a space, and one written with spaces."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", "a", "b", "▁a", "▁b", "▁▁", "<|im_end|>"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *words, *OWN]
    types = {"<unk>": 2, "<s>": CONTROL, "</s>": CONTROL, "<|im_end|>": CONTROL}
    types |= dict.fromkeys(bytes_, BYTE) | dict.fromkeys(OWN, USER_DEFINED)
    scores = [-float(i) for i in range(len(tokens))]
    settings = {"model": "llama", "scores": scores, "add_bos_token": False} | settings
    return Tokenizer.load(write(path, tokens, types, **settings))


@pytest.mark.parametrize(
    ("text", "with_prefix", "without"),
    [
        ("a<think>b", "▁a <think> b", "a <think> b"),
        ("<think>b", "<think> b", "<think> b"),
        ("<think><think>", "<think> <think>", "<think> <think>"),
        ("a <think> b", "▁a ▁ <think> ▁b", "a ▁ <think> ▁b"),
        ("</s><think>a", "</s> <think> a", "</s> <think> a"),
        ("a<a b>b", "▁a <a▁b> b", "a <a▁b> b"),
        ("<a b>", "<a▁b>", "<a▁b>"),
        ("a own", "▁a ▁own", "a ▁own"),
        ("a    b", "▁a ▁▁▁ ▁b", "a ▁▁▁ ▁b"),
        ("   b", "▁▁▁ ▁b", "▁▁▁ b"),
        ("  b", "▁▁▁ b", "▁ ▁b"),
        ("a  \n", "▁a ▁▁\n", "a ▁▁\n"),
    ],
)
def test_tok_41_own_tokens_are_found_wherever_their_text_stands(
    tmp_path: Path, text: str, with_prefix: str, without: str
) -> None:
    for prefix, expected in ((True, with_prefix), (False, without)):
        tokenizer = with_own_tokens(tmp_path / f"{prefix}.gguf", add_space_prefix=prefix)
        token_ids = tokenizer.encode_now(text)
        names = [tokenizer.token_text(token_id).replace(" ", "▁") for token_id in token_ids]
        assert names == expected.split(" ")
        assert tokenizer.decode_now(token_ids, skip_special_tokens=False) == text


def test_tok_41_sentencepiece_itself_cuts_own_tokens_out_alike(tmp_path: Path) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b ab ba  b a", "b  aa bb"] * 20),
        model_prefix=str(tmp_path / "m"),
        model_type="bpe",
        vocab_size=280,
        hard_vocab_limit=False,
        byte_fallback=True,
        user_defined_symbols=["<think>", "<|im_start|>", "▁▁▁"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    ids = range(theirs.get_piece_size())
    tokens = [theirs.id_to_piece(i) for i in ids]
    types = {"<unk>": 2, "<s>": CONTROL, "</s>": CONTROL}
    types |= dict.fromkeys(["<think>", "<|im_start|>", "▁▁▁"], USER_DEFINED)
    types |= {tokens[i]: BYTE for i in ids if theirs.is_byte(i)}
    scores = [theirs.get_score(i) for i in ids]
    file = write(
        tmp_path / "m.gguf", tokens, types, model="llama", scores=scores, add_bos_token=False
    )
    ours = Tokenizer.load(file)
    for text in (
        "a<think>b",
        "ab <|im_start|>b a<think><think> ba",
        "a   b      a",
        "b a\n<think>a",
    ):
        assert ours.encode_now(text) == theirs.encode(text), text


def test_tok_41_thousands_of_own_tokens_cost_little(tmp_path: Path) -> None:
    own = [f"<unused{i}>" for i in range(2000)]
    tokens = ["<unk>", "▁", "a", *own]
    types = {"<unk>": 2} | dict.fromkeys(own, USER_DEFINED)
    scores = [0.0] * len(tokens)
    file = write(tmp_path / "m.gguf", tokens, types, model="llama", scores=scores)
    assert Tokenizer.load(file).encode_now("a<unused1999>a") == [1, 2, 2002, 2]


def test_unknown_kinds_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'klingon' way"):
        Tokenizer.load(byte_level(tmp_path / "pre.gguf", "klingon"))
    with pytest.raises(ConfigError, match="kind 'bert'"):
        Tokenizer.load(byte_level(tmp_path / "model.gguf", model="bert"))


@pytest.mark.parametrize(
    "settings",
    [
        {"bos_token_id": 999_999},
        {"bos_token_id": -1},
        {"token_type": [1, 2]},
        {"tokens": [1, 2]},
        {"tokens": "text"},
        {"tokens": ["a" * 2000]},
        {"merges": [1.5]},
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
