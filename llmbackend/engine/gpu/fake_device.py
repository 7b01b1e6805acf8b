"""A device on CPU tensors whose work is done late, so that host code that is wrong beside a GPU is wrong here too.

For: tests of the accelerator path where there is no GPU. Does not know: what the work is. Invariants: enqueued work is
done in order, and not before somebody waits for it: whoever changes host memory too early, or reads it before the event
behind it, sees wrong numbers every time, where a GPU would give them some of the time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

from .device import Event, Graph, Memory


class FakeDevice:
    """memory_bytes: what it says is free and has; `used_bytes` of it are taken."""

    def __init__(self, memory_bytes: int = 1 << 30, used_bytes: int = 0) -> None:
        self.memory_bytes, self.used_bytes = memory_bytes, used_bytes
        self.num_graph_replays = 0
        self._work: deque[Callable[[], None]] = deque()
        self._num_enqueued = 0
        self._num_done = 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def name(self) -> str:
        return "fake device"

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self._num_enqueued += 1

    def record(self) -> Event:
        event = _FakeEvent(self)
        self.enqueue(event.stamp)
        event.place = self._num_enqueued
        return event

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def capture(self, work: Callable[[], None]) -> Graph:
        self.synchronize()
        work()
        return _FakeGraph(self, work)

    def synchronize(self) -> None:
        self.run_until(self._num_enqueued)

    def memory(self) -> Memory:
        return Memory(self.memory_bytes - self.used_bytes, self.memory_bytes)

    @property
    def has_float8(self) -> bool:
        return True

    def trim(self) -> None:
        pass

    def is_done(self, place: int) -> bool:
        return self._num_done >= place

    def run_until(self, place: int) -> None:
        """Does the first `place` pieces of all work ever enqueued."""
        while self._num_done < place:
            self._num_done += 1
            self._work.popleft()()


class _FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.place = 0
        self.passed_s = 0.0

    def stamp(self) -> None:
        self.passed_s = time.perf_counter()

    def wait(self) -> None:
        self._device.run_until(self.place)

    @property
    def is_done(self) -> bool:
        return self._device.is_done(self.place)

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _FakeEvent)
        return self.passed_s - earlier.passed_s


class _FakeGraph:
    def __init__(self, device: FakeDevice, work: Callable[[], None]) -> None:
        self._device, self._captured = device, work

    def replay(self) -> None:
        self._device.num_graph_replays += 1
        self._captured()
