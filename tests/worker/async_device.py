"""A device whose results cannot be seen before they are waited for, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from serve.worker.device.cpu_device import CpuDevice
from serve.worker.device.device import Mark, Uploads
from serve.worker.device.uploads import StagedUploads


class LateCopy:
    """Takes a tensor's contents when made, as a copy on the one ordered stream does, and gives them
    only to who waits: steps launched in between overwrite the tensor, not the copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._contents = tensor.clone()

    def wait(self) -> Tensor:
        return self._contents


@dataclass
class CountedMark:
    """A mark that is always past, and remembers that it was set and waited for."""

    num_set: int = 0
    num_waits: int = 0

    def set(self) -> None:
        self.num_set += 1

    def wait(self) -> None:
        self.num_waits += 1


class AsyncDevice(CpuDevice):
    """Copies in both directions, so that host and device never share memory."""

    def __init__(self) -> None:
        super().__init__(num_threads=1)
        self.marks: list[CountedMark] = []

    def make_mark(self) -> Mark:
        self.marks.append(CountedMark())
        return self.marks[-1]

    def uploads(self, num_bytes: int) -> Uploads:
        return StagedUploads(self, num_bytes)

    def to_device(self, host: Tensor) -> Tensor:
        return host.clone()

    def to_host(self, tensor: Tensor) -> LateCopy:
        return LateCopy(tensor)


@dataclass
class Replay:
    """Recorded work of a fake graph. Doing it again fills the tensor that recording returned, with
    what the tensors it was recorded over hold by now; its shapes and host numbers stay."""

    work: Callable[[], Tensor]
    result: Tensor
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.result.copy_(self.work())


class FakeRecorder:
    """Graphs as a GPU has them: what is recorded keeps its shapes, addresses and host numbers."""

    def __init__(self) -> None:
        self.graphs: list[Replay] = []

    def capture(self, work: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        graph = Replay(work, work())
        self.graphs.append(graph)
        return graph, graph.result

    def free_bytes(self) -> int:
        return 2**30 - 2**20 * len(self.graphs)


class GraphDevice(AsyncDevice):
    """An AsyncDevice that can record."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder = FakeRecorder()

    def graph_recorder(self) -> FakeRecorder:  # type: ignore[override]
        return self.recorder
