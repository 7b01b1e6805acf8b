"""A device on CPU tensors that runs work as late as possible, so that races beside a GPU fail here every time.

For: tests of the accelerator path where there is no GPU. Does not know: what the work is. Invariant: enqueued work runs
in order, and only when its event is waited for. Host code that changes memory too early, or reads it before the event
behind it, gets wrong numbers every time; on a GPU it would only sometimes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

from .device import Event, Graph, Memory


class FakeDevice:
    def __init__(self, memory_bytes: int = 1 << 30, used_bytes: int = 0) -> None:
        """memory_bytes: the size that `memory` reports; used_bytes of it are used."""
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
        """Runs all work up to the `place`-th piece ever enqueued."""
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
