"""A steady decode step makes no tensor: everything it needs was allocated before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from serve.kernels.sampling import SamplingKernels
from serve.sampling_params import SamplingParams
from tests.worker.async_device import FakeRecorder, GraphDevice, LateCopy, Replay
from tests.worker.harness import Asked, RunnerStand, plan, row_data, share

GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=0.8, seed=1)


class FreshMemory(TorchDispatchMode):
    """Notes each operation whose result is not in memory that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.counting = True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = {memory_of(tensor) for tensor in tree_leaves((args, kwargs)) if is_tensor(tensor)}
        made = [t for t in tree_leaves(result) if is_tensor(t) and memory_of(t) not in given]
        if self.counting and any(tensor.numel() for tensor in made):
            self.operations.append(str(function))
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For work that is not this process's: a graph's own memory, pinned memory of results."""
        self.counting = False
        yield
        self.counting = True


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class WatchedDevice(GraphDevice):
    """A device with graphs, on which only the runner's own operations count."""

    def __init__(self, fresh: FreshMemory) -> None:
        super().__init__()
        self.fresh = fresh
        self.recorder = WatchedRecorder(fresh)

    def to_host(self, tensor: Tensor) -> LateCopy:
        with self.fresh.paused():
            return LateCopy(tensor)


class WatchedRecorder(FakeRecorder):
    def __init__(self, fresh: FreshMemory) -> None:
        super().__init__()
        self.fresh = fresh

    def capture(self, work: Any) -> tuple[Replay, Tensor]:
        def quietly() -> Tensor:
            with self.fresh.paused():
                return work()

        return super().capture(quietly)


def draw_first(logits: Tensor, controls: Tensor, keys: Tensor, out: Tensor | None = None) -> Tensor:
    """Stands for a device's own draw."""
    assert out is not None
    return out.fill_(7)


def penalize(*_: Tensor) -> None:
    raise AssertionError("nobody asked")


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize("known", [True, False], ids=["known tokens", "tokens in flight"])
def test_a_steady_decode_step_allocates_nothing(sampling: SamplingParams, known: bool) -> None:
    fresh = FreshMemory()
    stand = RunnerStand(
        device=WatchedDevice(fresh),
        graph_sizes=[4],
        sampling=SamplingKernels(draw_first, penalize),
    )
    names = ["a", "b", "c"]
    first = plan(
        [share(name, 0, [1, 2, 3]) for name in names],
        admitted=[
            row_data(name, Asked(sampling, [1, 2, 3]), [1 + 2 * n, 2 + 2 * n])
            for n, name in enumerate(names)
        ],
    )
    with fresh:
        fresh.operations.append("")
        tokens = stand.runner.execute(first).wait().token_ids
        for position in range(3, 7):
            step = plan(
                [share(n, position, tokens[n] if known else [], num_tokens=1) for n in names]
            )
            fresh.operations.clear()
            pending = stand.runner.execute(step)
            assert fresh.operations == []
            tokens = pending.wait().token_ids


def test_the_inputs_of_every_decode_step_lie_in_the_same_memory() -> None:
    """With graphs or without."""
    stand = RunnerStand(device=GraphDevice())
    places = []
    forward = stand.model.forward

    def watched(token_ids: Tensor, ctx: Any) -> Tensor:
        meta = ctx.attention
        inputs = (token_ids, ctx.positions, meta.slot_mapping, meta.seq_lens, meta.block_table)
        places.append([tensor.data_ptr() for tensor in inputs])
        return forward(token_ids, ctx)

    stand.model.forward = watched  # type: ignore[method-assign]
    admitted = [row_data("a", Asked(GREEDY, [1, 2]), [1, 2])]
    token = stand.runner.execute(plan([share("a", 0, [1, 2])], admitted=admitted)).wait()
    for position in range(2, 8):
        step = plan([share("a", position, token.token_ids["a"])])
        token = stand.runner.execute(step).wait()
    assert len(places) == 7
    assert all(place == places[1] for place in places[1:])


class Launches(TorchDispatchMode):
    """Counts operations that would be launched on a device: all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = function._schema.returns
        alias = results[0].alias_info if results else None
        if (alias is None or alias.is_write) and "lift_fresh" not in str(function):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("sampling", "count", "most"),
    [(GREEDY, 4, 10), (GREEDY, 3, 12), (RANDOM, 4, 12)],
    ids=["greedy", "greedy, padded", "random"],
)
def test_few_operations_are_launched_around_a_replay(
    sampling: SamplingParams, count: int, most: int
) -> None:
    """One copy of the step's numbers to the device, three or five into the recording's inputs, two
    for tokens in flight, the replay; then the draw and what keeps it. There were some 18."""
    stand = RunnerStand(
        device=GraphDevice(), graph_sizes=[4], sampling=SamplingKernels(draw_first, penalize)
    )
    names = ["a", "b", "c", "d"][:count]
    rows = [row_data(name, Asked(sampling, [1, 2]), [1 + n]) for n, name in enumerate(names)]
    stand.runner.execute(plan([share(name, 0, [1, 2]) for name in names], admitted=rows)).wait()
    step = plan([share(name, 2, [], num_tokens=1) for name in names])
    stand.device.recorder.graphs[-1].work = lambda: stand.device.recorder.graphs[-1].result  # type: ignore[attr-defined]
    with Launches() as launched:
        stand.runner.execute(step)
    assert len(launched.names) <= most, launched.names
