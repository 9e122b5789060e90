"""How plans reach devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from serve.scheduler.output import SchedulerOutput, StepResult


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What the worker measured at start."""

    num_blocks: int  # usable device blocks, without the null block
    num_host_blocks: int
    vocab_size: int
    max_model_len: int
    max_num_batched_tokens: int  # token budget of a step, resolved
    device: str
    dtype: str
    attention_backend: str
    block_bytes: int = 0  # KV of one block, all layers
    cache_dtype: str = ""  # of keys and values
    identity: str = ""  # equal where the same request gets the same bits
    prompt_limits: tuple[tuple[int, bool], ...] = ()  # see `CausalModel`
    depth: int = 1  # steps that may be out at once, if nobody asks for another number


MASK_WORD_BITS = 32


def words_for(vocab_size: int) -> int:
    """Words of a mask that have a bit for every token."""
    return -(-vocab_size // MASK_WORD_BITS)


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Which tokens some positions of a step may draw; the others may draw any."""

    rows: npt.NDArray[np.int64]
    """[M]; counted over all that the plan samples: `num_samples` each, in the order of
    `scheduled`. None twice."""
    bits: npt.NDArray[np.int32]
    """[M, ceil(vocab / 32)]; 1 allows token t: bit t % 32, from the lowest, of number t // 32."""


class PendingTokens(Protocol):
    """The result of a launched step."""

    def wait(self) -> StepResult:
        """Block until the step's tokens are known. Raises what the step raised."""


class Launch(Protocol):
    """A step whose forward pass is on its way."""

    def sample(self, mask: TokenMask | None) -> PendingTokens:
        """Launch the choice of its tokens; once, and before the next step's `forward`. Raises what
        launching raises.

        On a device that computes by itself there is time to make a mask before this is called.
        """


class BlocksUnusable(Exception):
    """A file's KV blocks cannot be used here; says why."""


class BlockArchive(Protocol):
    """Blocks' contents in a file, each known by a hash, and what they must fit."""

    def write_blocks(self, path: Path, hashes: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """Replace the file; its size in bytes. Raises OSError."""

    def read_hashes(self, path: Path) -> list[bytes]:
        """Of the blocks in the file, most wanted first. Raises BlocksUnusable."""

    def read_blocks(self, path: Path, block_ids: Sequence[int]) -> None:
        """Fill blocks with the first ones of the file. Raises BlocksUnusable."""


class Executor(Protocol):
    """Runs steps in the order they are given, as one FIFO of device work."""

    def start(self) -> WorkerInfo:
        """Load the model and allocate the cache. Raises ConfigError."""

    def forward(self, plan: SchedulerOutput) -> Launch:
        """Launch a step's forward pass. May return before it has run (CUDA) or after (CPU)."""

    def close(self) -> None:
        """Free the device."""
