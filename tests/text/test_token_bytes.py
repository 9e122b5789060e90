"""Bytes of single tokens, and decoders that have none."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models

from serve.errors import ConfigError
from serve.text.token_bytes import TokenBytes
from tests.text.tiny_tokenizers import byte_level, sentencepiece, wordpiece


def test_log_06_bytes_of_tokens_join_to_the_text_they_make() -> None:
    backend = byte_level()
    tokens = TokenBytes(backend)
    text = "hé 😀 <|im_end|><think here> Ġ\u2028"
    token_ids = backend.encode(text).ids
    assert b"".join(tokens.inside[i] for i in token_ids).decode() == text


def test_each_kind_has_its_own_bytes() -> None:
    pieces, words = sentencepiece(), wordpiece()
    assert TokenBytes(pieces).inside[pieces.token_to_id("<0xE2>")] == b"\xe2"
    assert TokenBytes(pieces).inside[pieces.token_to_id("▁hello")] == b" hello"
    assert TokenBytes(pieces).leading[pieces.token_to_id("▁hello")] == b"hello"
    assert TokenBytes(words).inside[words.token_to_id("##ing")] == b"ing"
    assert TokenBytes(words).inside[words.token_to_id("world")] == b" world"


@pytest.mark.parametrize("token_id", [-1, 10**9])
def test_unknown_ids_add_nothing(token_id: int) -> None:
    assert TokenBytes(byte_level()).inside[token_id] == b""


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    ],
)
def test_a_decoder_that_is_not_a_sum_over_tokens_is_refused_by_name(
    decoder: decoders.Decoder,
) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0}, "a"))
    backend.decoder = decoder
    with pytest.raises(ConfigError, match=r"decodes with .*(CTC|BPEDecoder|Replace|Strip)"):
        TokenBytes(backend)
