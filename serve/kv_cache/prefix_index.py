"""Which block holds which tokens: a block is known by a hash of its tokens and all before them.

Source of the scheme: the hash chain of vLLM's automatic prefix caching. Equal hashes are taken for
equal tokens, so the hash is a cryptographic one; nothing but its inputs tells two prompts apart.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from hashlib import blake2b

MATCHED_AT_ONCE = 64
"""Look-ups between two tests for the end of a match: thousands of blocks are found in half the
time, and a prompt that is unknown costs no more than so many."""


class BlockHashes:
    """The hashes of one token sequence's full blocks, in order. Grows with the sequence.

    `extras` are what must be equal besides the tokens (a cache salt, an adapter), by name.
    """

    __slots__ = ("_block_size", "root", "values")

    def __init__(self, block_size: int, **extras: str) -> None:
        self._block_size = block_size
        self.root = _hash_extras(extras)
        self.values: list[bytes] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the full blocks that were added to the sequence, which is given whole."""
        size = self._block_size
        parent = self.values[-1] if self.values else self.root
        for start in range(len(self.values) * size, len(token_ids) - size + 1, size):
            tokens = array("I", token_ids[start : start + size]).tobytes()
            parent = blake2b(parent + tokens, digest_size=32).digest()
            self.values.append(parent)


def _hash_extras(extras: dict[str, str]) -> bytes:
    """Names and values with their lengths, so that no two sets of extras read the same."""
    digest = blake2b(digest_size=32)
    for name, value in sorted(extras.items()):
        for part in (name.encode(), value.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


class PrefixIndex:
    """Hash → block and back. Knows only blocks whose content has been computed."""

    def __init__(self) -> None:
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_by_hash)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._hash_by_block

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest indexed beginning of a hash chain."""
        blocks: list[int] = []
        find = self._block_by_hash.get
        for start in range(0, len(hashes), MATCHED_AT_ONCE):
            found = list(map(find, hashes[start : start + MATCHED_AT_ONCE]))
            if None in found:
                return blocks + [i for i in found[: found.index(None)] if i is not None]
            blocks += found  # type: ignore[arg-type]
        return blocks

    def block_of(self, value: bytes) -> int | None:
        """The block with this hash, if there is one."""
        return self._block_by_hash.get(value)

    def items(self) -> list[tuple[bytes, int]]:
        """Every (hash, block)."""
        return list(self._block_by_hash.items())

    def put(self, value: bytes, block_id: int) -> bool:
        """Enter a block; False, and nothing changed, if another one holds the same tokens."""
        if value in self._block_by_hash or block_id in self._hash_by_block:
            return False
        self._block_by_hash[value] = block_id
        self._hash_by_block[block_id] = value
        return True

    def forget(self, block_ids: Sequence[int]) -> None:
        """Take out blocks that are about to hold something else."""
        for block_id in block_ids:
            value = self._hash_by_block.pop(block_id, None)
            if value is not None:
                del self._block_by_hash[value]

    def keep_only(self, block_ids: Container[int]) -> None:
        """Forget all other blocks."""
        self._hash_by_block = {b: h for b, h in self._hash_by_block.items() if b in block_ids}
        self._block_by_hash = {h: b for b, h in self._hash_by_block.items()}

    def check_invariants(self) -> None:
        """Both directions say the same."""
        assert {b: h for h, b in self._block_by_hash.items()} == self._hash_by_block
