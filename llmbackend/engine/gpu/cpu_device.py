"""The processor in the place of an accelerator: work is done when it is enqueued.

For: the ranks of a model that is split over processors. Does not know: what the work is. Invariant: what `Device`
promises of order holds, because nothing is left to do when a call returns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from .device import Event, Graph, Lane, Mark, Memory


class CpuDevice:
    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def name(self) -> str:
        return f"cpu, {torch.get_num_threads()} threads"

    def enqueue(self, work: Callable[[], None]) -> None:
        work()

    @property
    def beside(self) -> Lane:
        return self

    def mark(self) -> Mark:
        return _Passed()

    def follow(self, mark: Mark) -> None:
        pass

    def record(self) -> Event:
        return _Passed()

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def capture(self, work: Callable[[], None]) -> Graph:
        work()
        return _Repeated(work)

    def synchronize(self) -> None:
        pass

    def memory(self) -> Memory:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return Memory(os.sysconf("SC_AVPHYS_PAGES") * page_bytes, os.sysconf("SC_PHYS_PAGES") * page_bytes)

    @property
    def held_bytes(self) -> int:
        return 0

    @property
    def has_float8(self) -> bool:
        return True

    def trim(self) -> None:
        pass


class _Passed:
    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        pass

    @property
    def is_done(self) -> bool:
        return True

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _Passed)
        return self._at_s - earlier._at_s


class _Repeated:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()
