"""What some requests need to remember about their tokens, on the device: counts and last words.

Kept only for rows that ask (penalties, bad words), in slots of tensors that grow when needed.
Sampled tokens enter on the device, so a step that is still running counts too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve.worker.device.device import Device
from serve.worker.sampling.drafts import shifted

Rows = npt.NDArray[np.int64]


class SlotMap:
    """Gives each row that needs one a slot; slots of released rows are used again."""

    def __init__(self) -> None:
        self._slot_by_row: dict[int, int] = {}
        self._free: list[int] = []

    def take(self, row: int) -> int:
        """A slot for `row`, which must have none."""
        assert row not in self._slot_by_row, row
        slot = self._free.pop() if self._free else len(self._slot_by_row)
        self._slot_by_row[row] = slot
        return slot

    def release(self, row: int) -> None:
        """Take the row's slot back, if it has one."""
        if (slot := self._slot_by_row.pop(row, None)) is not None:
            self._free.append(slot)

    def __getitem__(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Slots of these rows; each must have one."""
        return np.array([self._slot_by_row[row] for row in rows.tolist()], dtype=np.int64)


class TokenCounts:
    """How often each token was generated, and which ones the prompt holds."""

    def __init__(self, vocab_size: int, device: Device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots = SlotMap()
        empty = torch.zeros((0, vocab_size), device=device.torch_device)
        self._generated = empty.to(torch.int32)
        self._in_prompt = empty.to(torch.bool)

    def admit(self, row: int, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Count a request's tokens so far: its prompt, then what was generated before."""
        slot = self._slots.take(row)
        if slot >= len(self._generated):
            self._generated = _grown(self._generated)
            self._in_prompt = _grown(self._in_prompt)
        tokens = np.asarray(token_ids, dtype=np.int64)
        size = self._vocab_size
        generated = np.bincount(tokens[num_prompt_tokens:], minlength=size)[:size]
        in_prompt = np.bincount(tokens[:num_prompt_tokens], minlength=size)[:size] > 0
        self._generated[slot] = self._device.to_device(torch.from_numpy(generated.astype(np.int32)))
        self._in_prompt[slot] = self._device.to_device(torch.from_numpy(in_prompt))

    def release(self, row: int) -> None:
        """Forget a row, if it was counted."""
        self._slots.release(row)

    def of(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """(times generated [P, vocab] int32, in the prompt [P, vocab] bool) of these rows."""
        slots = self._device.to_device(torch.from_numpy(self._slots[rows]))
        return self._generated[slots], self._in_prompt[slots]

    def add(self, rows: Rows, token_ids: Tensor, counted: Tensor | None = None) -> None:
        """Count new tokens [P] for these rows, or those of them that are `counted` [P] bool."""
        slots = self._device.to_device(torch.from_numpy(self._slots[rows]))
        one = torch.ones_like(token_ids, dtype=torch.int32)
        if counted is not None:
            one *= counted
        self._generated.index_put_((slots, token_ids), one, accumulate=True)


class RecentTokens:
    """Each row's newest tokens, right-aligned; -1 where a request has fewer."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slots = SlotMap()
        self._tokens = torch.full((0, 0), -1, dtype=torch.int64, device=device.torch_device)

    def admit(self, row: int, token_ids: Sequence[int], length: int) -> None:
        """Remember at least the `length` newest tokens of a request from now on."""
        slot = self._slots.take(row)
        missing = max(0, length - self._tokens.shape[1])
        self._tokens = torch.nn.functional.pad(self._tokens, (missing, 0), value=-1)
        if slot >= len(self._tokens):
            self._tokens = _grown(self._tokens)
        width = self._tokens.shape[1]
        newest = list(token_ids[max(0, len(token_ids) - width) :])
        window = torch.tensor([-1] * (width - len(newest)) + newest, dtype=torch.int64)
        self._tokens[slot] = self._device.to_device(window)

    def release(self, row: int) -> None:
        """Forget a row, if it was remembered."""
        self._slots.release(row)

    def of(self, rows: Rows) -> Tensor:
        """[P, width] newest tokens of these rows."""
        return self._tokens[self._device.to_device(torch.from_numpy(self._slots[rows]))]

    def add(self, rows: Rows, token_ids: Tensor) -> None:
        """Append one new token [P] to each of these rows."""
        slots = self._device.to_device(torch.from_numpy(self._slots[rows]))
        self._tokens[slots] = torch.cat([self._tokens[slots][:, 1:], token_ids[:, None]], dim=1)

    def extend(self, rows: Rows, token_ids: Tensor, counts: Tensor) -> None:
        """Append to each of these rows the first `counts` [P] of its token_ids [P, n]."""
        slots = self._device.to_device(torch.from_numpy(self._slots[rows]))
        self._tokens[slots] = shifted(self._tokens[slots], token_ids, counts)


def _grown(tensor: Tensor) -> Tensor:
    """The tensor with twice the slots (four at first)."""
    grown = tensor.new_zeros((max(4, 2 * len(tensor)), *tensor.shape[1:]))
    grown[: len(tensor)] = tensor
    return grown
