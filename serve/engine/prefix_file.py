"""`--prefix-cache-file`: cached blocks outlive the engine."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from serve.kv_cache.manager import KVCacheManager
from serve.worker.executor import BlockArchive, BlocksUnusable

logger = logging.getLogger(__name__)

GIB = 1 << 30


class PrefixFile:
    """The file of one engine: read once at its start, written once at an orderly end. A file that
    is of no use costs a warning. Pins are not kept: they are claims of clients that are gone."""

    def __init__(self, path: Path, kv: KVCacheManager, archive: BlockArchive) -> None:
        self._path = path
        self._kv = kv
        self._archive = archive

    def load(self) -> None:
        """Fill the cache, before anything runs, with as much as fits."""
        if not self._path.exists():
            logger.info("prefix cache: %s is not there yet", self._path)
            return
        size = self._path.stat().st_size / GIB
        logger.info("prefix cache: reading %s, %.2f GiB …", self._path, size)
        began = time.monotonic()
        try:
            hashes = self._archive.read_hashes(self._path)[: self._kv.num_blocks]
            self._archive.read_blocks(self._path, self._kv.prefixes.restore(hashes))
        except BlocksUnusable as error:
            self._kv.prefixes.forget()
            logger.warning("prefix cache: %s is of no use here: %s", self._path, error)
            return
        tokens = len(hashes) * self._kv.block_size
        seconds = time.monotonic() - began
        logger.info("prefix cache: %d tokens are back, after %.1f s", tokens, seconds)

    def save(self) -> None:
        """Write what is cached now. When nothing is, the file stays as it is."""
        cached = self._kv.prefixes.most_wanted()
        if not cached:
            return
        hashes, block_ids = zip(*cached, strict=True)
        try:
            size = self._archive.write_blocks(self._path, hashes, block_ids)
        except OSError as error:
            logger.error("prefix cache: %s cannot be written: %s", self._path, error)
            return
        tokens = len(hashes) * self._kv.block_size
        logger.info(
            "prefix cache: %d tokens written to %s, %.2f GiB", tokens, self._path, size / GIB
        )
