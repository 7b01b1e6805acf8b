"""A device on CPU tensors that runs work as late as possible, so that races with a GPU always fail here.

Used by tests of the accelerator path where there is no GPU. Independent of what the work is. Invariant: enqueued work
runs in order, and only when its event is waited for, or another lane's work behind it. Host code that changes memory
too early, or reads it before its event, always gets wrong numbers; on a GPU, only sometimes. As in torch, a handle of
graph memory disappears with its last graph, and a capture with it fails.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from llmbackend.engine.gpu.device import Event, Graph, GraphPool, Lane, Mark, Memory


class FakeDevice:
    def __init__(self, memory_bytes: int = 1 << 30, used_bytes: int = 0) -> None:
        """memory_bytes: the size that `memory` reports; used_bytes of it are used."""
        self.memory_bytes, self.used_bytes = memory_bytes, used_bytes
        self.num_graph_replays = 0
        self._lane, self._beside = _FakeLane(), _FakeLane()
        self._graph_pool = GraphPool(_FakePool)

    @property
    def beside(self) -> Lane:
        return self._beside

    def mark(self) -> Mark:
        return self._lane.mark()

    def follow(self, mark: Mark) -> None:
        self._lane.follow(mark)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def name(self) -> str:
        return "fake device"

    def enqueue(self, work: Callable[[], None]) -> None:
        self._lane.enqueue(work)

    def record(self) -> Event:
        event = _FakeEvent(self)
        self.enqueue(event.stamp)
        event.place = self._lane.num_enqueued
        return event

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def capture(self, work: Callable[[], None]) -> Graph:
        self.synchronize()
        work()
        graph = _FakeGraph(self, work)
        self._graph_pool.handle().add(graph)
        self._graph_pool.add(graph)
        return graph

    def synchronize(self) -> None:
        self._lane.run_until(self._lane.num_enqueued)
        self.hurry_copies()

    def hurry_copies(self) -> None:
        """Runs what is beside the device's work before all of that which it need not follow."""
        self._beside.run_until(self._beside.num_enqueued)

    def memory(self) -> Memory:
        return Memory(self.memory_bytes - self.used_bytes, self.memory_bytes, self.used_bytes)

    @property
    def held_bytes(self) -> int:
        return 0

    @property
    def has_float8(self) -> bool:
        return True

    def trim(self) -> None:
        pass

    def run_until(self, place: int) -> None:
        """Runs all work up to the `place`-th piece ever enqueued."""
        self._lane.run_until(place)


class _FakeLane:
    def __init__(self) -> None:
        self.num_enqueued = 0
        self.num_done = 0
        self._work: deque[Callable[[], None]] = deque()

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self.num_enqueued += 1

    def mark(self) -> Mark:
        return _FakeMark(self, self.num_enqueued)

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, _FakeMark)
        self.enqueue(lambda: mark.lane.run_until(mark.place))

    def run_until(self, place: int) -> None:
        while self.num_done < place:
            self.num_done += 1
            self._work.popleft()()


class _FakeMark(NamedTuple):
    lane: _FakeLane
    place: int


class _FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.place = 0
        self.passed_s = 0.0

    def stamp(self) -> None:
        self.passed_s = time.perf_counter()

    def wait(self) -> None:
        self._device.run_until(self.place)

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _FakeEvent)
        return self.passed_s - earlier.passed_s


class _FakePool:
    """Of one handle: dead for good once its graphs are gone, as torch's."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[_FakeGraph] = weakref.WeakSet()
        self._is_used = False

    def add(self, graph: _FakeGraph) -> None:
        assert self._graphs or not self._is_used, "use_count > 0: this handle's last graph is gone"
        self._is_used = True
        self._graphs.add(graph)


class _FakeGraph:
    def __init__(self, device: FakeDevice, work: Callable[[], None]) -> None:
        self._device, self._captured = device, work

    def replay(self) -> None:
        self._device.num_graph_replays += 1
        self._captured()
