"""What each token adds to a text, as bytes: the ground that streaming and logprobs stand on.

A tokenizer's own `decode` answers for whole lists only. Nearly every decoder is nevertheless a sum
over tokens, once text is seen as bytes: byte-level BPE maps characters to bytes, sentencepiece has
`<0xE2>` tokens and a mark for spaces, WordPiece glues by a prefix. Only a text's first token can
differ (a space is stripped). Decoders that do not work like that are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TypeVar

from tokenizers import Tokenizer as Backend

from serve.errors import ConfigError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
PER_TOKEN_STEPS = {"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
BYTE_LEVEL_STEPS = {"ByteLevel", "ByteFallback", "Fuse"}
ANCHOR = "a"
"""An ordinary token to decode others beside, so that they do not stand first or last."""


class TokenBytes:
    """Token id → bytes, worked out when first asked for and remembered. Unknown ids add nothing.

    `inside[id]` holds within a text, `leading[id]` at its start. Bytes of one token need not be
    whole characters; `texts[id]` is the text of `inside[id]` if they are, else None.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        steps = decoder_steps(backend)
        self._check(steps)
        names = {str(step["type"]) for step in steps}
        added = backend.get_added_tokens_decoder().items()
        self.special_ids = frozenset(token_id for token_id, token in added if token.special)
        self.texts = _Remembered(self._whole_text)
        if "ByteLevel" in names:
            char_bytes = _byte_level_alphabet()
            self.inside = _Remembered(self._by_token(lambda t: _byte_level(t, char_bytes)))
            self.leading = self.inside
            return
        has_byte_tokens = "ByteFallback" in names
        self.inside = _Remembered(self._by_token(lambda t: self._inside(t, has_byte_tokens)))
        self.leading = _Remembered(self._by_token(lambda t: self._leading(t, has_byte_tokens)))

    def knows(self, token_id: int) -> bool:
        """Whether the vocabulary has this id."""
        return self._token(token_id) is not None

    def _token(self, token_id: int) -> str | None:
        token: str | None = self._backend.id_to_token(token_id) if token_id >= 0 else None
        return token

    def special_id(self, text: str) -> int | None:
        """The special token that is written like this, if there is one."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def _whole_text(self, token_id: int) -> str | None:
        try:
            return self.inside[token_id].decode()
        except UnicodeDecodeError:
            return None

    def _by_token(self, to_bytes: Callable[[str], bytes]) -> Callable[[int], bytes]:
        def by_id(token_id: int) -> bytes:
            token = self._token(token_id)
            return b"" if token is None else to_bytes(token)

        return by_id

    def _inside(self, token: str, has_byte_tokens: bool) -> bytes:
        if has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        after = self._decode([ANCHOR, ANCHOR]).removeprefix(ANCHOR)
        between = self._decode([ANCHOR, token, ANCHOR])
        return between.removeprefix(ANCHOR).removesuffix(after).encode()

    def _leading(self, token: str, has_byte_tokens: bool) -> bytes:
        if has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(token)) and int(byte[1], 16) >= 0x80:
            return bytes([int(byte[1], 16)])
        return self._decode([token]).encode()

    def _decode(self, tokens: list[str]) -> str:
        decoder = self._backend.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode(tokens))

    def _check(self, steps: list[dict[str, object]]) -> None:
        names = [str(step["type"]) for step in steps]
        known = BYTE_LEVEL_STEPS if "ByteLevel" in names else PER_TOKEN_STEPS
        unknown = [name for name in names if name not in known]
        whole_text = steps[names.index("Fuse") + 1 :] if "Fuse" in names else []
        unknown += [str(step["type"]) for step in whole_text if not _strips_one_leading(step)]
        if unknown:
            raise ConfigError(
                f"The tokenizer decodes with {', '.join(unknown)}, whose text cannot be streamed "
                "token by token; byte-level, sentencepiece and WordPiece tokenizers can."
            )


T = TypeVar("T")


class _Remembered(dict[int, T]):
    """A dictionary that works out what it lacks; a plain lookup afterwards."""

    def __init__(self, work_out: Callable[[int], T]) -> None:
        super().__init__()
        self._work_out = work_out

    def __missing__(self, token_id: int) -> T:
        value = self._work_out(token_id)
        self[token_id] = value
        return value


def decoder_steps(backend: Backend) -> list[dict[str, object]]:
    """The decoder's steps as their JSON objects, nested sequences laid flat; [] without one."""
    if backend.decoder is None:
        return []
    return _flat(json.loads(backend.decoder.__getstate__()))


def _flat(step: dict[str, object]) -> list[dict[str, object]]:
    if step["type"] != "Sequence":
        return [step]
    inner = step["decoders"]
    assert isinstance(inner, list), step
    return [flat for part in inner for flat in _flat(part)]


def _strips_one_leading(step: dict[str, object]) -> bool:
    """After Fuse a step sees the whole text; this is the one such step that streams."""
    return step["type"] == "Strip" and step["start"] in (0, 1) and step["stop"] == 0


def _byte_level(token: str, char_bytes: dict[str, int]) -> bytes:
    """Added tokens are plain text where a character is outside the byte alphabet."""
    try:
        return bytes([char_bytes[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, turned round.

    Printable Latin-1 stands for itself; the other bytes take the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    shifted = {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted
