"""A transformers causal LM taken apart: the layers that give hidden states, and the head over them.

Which submodule gives them differs by family (`model`, `transformer`, OPT's `model.decoder`), so one
plain forward pass is watched: it is the outermost submodule whose output has them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Parts:
    """Both parts, and what the whole says about some tokens."""

    base: Any
    head: Head
    plain_logits: Tensor  # [T, vocab] fp32, of the tokens it was watched with
    num_positions: int | None  # that its learned position embeddings have, if it has any


class Head:
    """[S, hidden] → [S, vocab] fp32: whatever the model does after its layers, with any scaling or
    capping of logits."""

    def __init__(self, hf_model: Any, base_path: str) -> None:
        self._given = _GivenHidden()
        self._model = _with_submodule(hf_model, base_path, self._given)

    def __call__(self, hidden: Tensor) -> Tensor:
        # The ids only tell the model the shape; the base that would read them is not there.
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        self._given.hidden = hidden[None]
        logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0].float()
        self._given.hidden = None
        return logits


def take_apart(hf_model: Any, token_ids: Tensor) -> Parts:
    """Watch a plain forward pass over token_ids [T], which must not be consecutive numbers.

    Raises ConfigError, and whatever the model's code raises.
    """
    bases: list[str] = []
    hooks = [
        module.register_forward_hook(_note_hidden_states(name, bases))
        for name, module in hf_model.named_modules()
        if name
    ]
    positions = _PositionTables(len(token_ids))
    try:
        with torch.inference_mode(), positions:
            logits = hf_model(input_ids=token_ids[None], use_cache=False).logits[0].float()
    finally:
        for hook in hooks:
            hook.remove()
    if not bases:
        raise ConfigError("it has no part that ends in hidden states")
    base = hf_model.get_submodule(bases[-1])
    return Parts(base, Head(hf_model, bases[-1]), logits, positions.fewest)


def _note_hidden_states(name: str, found: list[str]) -> Callable[..., None]:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(getattr(output, "last_hidden_state", None), Tensor):
            found.append(name)  # the outermost is the last to end

    return note


class _PositionTables(TorchFunctionMode):
    """Finds embeddings of positions: those that are asked for c, c + 1, c + 2, …"""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.fewest: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding and len(args) > 1:
            self._look(*args[:2])
        return func(*args, **(kwargs or {}))

    def _look(self, ids: Tensor, table: Tensor) -> None:
        if ids.numel() != self._num_tokens:
            return
        first = int(ids.flatten()[0])
        if (ids.flatten() - first).tolist() == list(range(self._num_tokens)):
            count = table.shape[0] - first
            self.fewest = count if self.fewest is None else min(count, self.fewest)


class _GivenHidden(nn.Module):
    """Takes the place of a causal LM's base model and returns the hidden states it was handed."""

    hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> _BaseOutput:
        assert self.hidden is not None
        return _BaseOutput(self.hidden)


class _BaseOutput:
    """A base model's output of which only the hidden states are known; the rest (cross attentions,
    router logits, whatever a model has) is None."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


def _with_submodule(module: Any, path: str, other: nn.Module) -> Any:
    """A copy that shares all of the module but the submodule at `path`."""
    changed = copy.copy(module)
    name, _, rest = path.partition(".")
    inner = _with_submodule(module._modules[name], rest, other) if rest else other
    changed._modules = {**module._modules, name: inner}
    return changed
