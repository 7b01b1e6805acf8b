"""What the accelerator path needs from a device: ordered asynchronous work, events, and detection of its loss.

Used by everything that loads a model on a GPU, and by the runner and its parts. Invariants: work runs in the order in
which it was enqueued; it reads no host memory that changes later, except pinned memory that its owner leaves unchanged
until an event after that work has passed. A process that computes on `cuda:3` makes it its current device before
anything else, because Triton launches kernels on a thread's current device and pinned memory belongs to the context of
that device. Ids number GPUs in bus order, as the host does (core/gpus.py), unless CUDA_DEVICE_ORDER says otherwise.

A kernel that fails (an illegal address, an assertion, a hardware error) makes the device unusable for its whole
process: every later call fails with the same error, and only a new process can recover. A runner then raises
DeviceLostError, so that no row is blamed; other errors, such as lack of memory, affect only one call.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch

from ..errors import DeviceLostError


def use_gpu(device: torch.device) -> torch.device:
    """Makes it the current device of this thread; returns it with its index. Raises ValueError as `check_gpu` does."""
    check_gpu(device)
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    return device


def check_gpu(device: torch.device) -> None:
    """Raises ValueError if this torch cannot compute on the device."""
    subject = f"engine argument 'device' is '{device}', but this torch ({torch.__version__})"
    if torch.version.hip is not None:
        raise ValueError(f"{subject} is built for ROCm, expected a CUDA build: the kernels require NVIDIA GPUs")
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # read when torch first enumerates devices
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError(f"{subject} sees no CUDA device")
    if (device.index or 0) >= count:
        raise ValueError(f"{subject} sees {count} CUDA devices, from 0 on")


_NO_MEMORY = 2
"""cudaErrorMemoryAllocation, raised for memory outside of torch's allocator, such as pinned memory."""


@contextmanager
def noticing_loss(synchronize: Callable[[], None]) -> Iterator[None]:
    """Turns an exception inside into a DeviceLostError if the device is lost. synchronize: waits for the device, and
    raises if it is lost; libraries report a lost device as errors of their own types."""
    try:
        yield
    except DeviceLostError:
        raise
    except Exception as error:
        if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) != _NO_MEMORY:
            raise _lost(error) from error
        try:
            synchronize()
        except Exception as loss:
            raise _lost(loss) from error
        raise


def _lost(error: Exception) -> DeviceLostError:
    return DeviceLostError(f"this process lost the device: {str(error).partition(chr(10))[0]}")


class Event(Protocol):
    """A point in the device's work."""

    def wait(self) -> None:
        """Returns once all work enqueued before it is complete. Raises what that work raised."""

    def seconds_since(self, earlier: Event) -> float:
        """Device time in seconds between two events that have passed."""


class Graph(Protocol):
    """Captured work that can be replayed on the same memory."""

    def replay(self) -> None:
        """Called inside enqueued work."""


class Memory(NamedTuple):
    free_bytes: int
    total_bytes: int
    own_bytes: int
    """Of this process: tensors, and what libraries have allocated since the device was opened."""


class Mark(Protocol):
    """A point in the work of a lane that other lanes can wait for without involving the host."""


class Lane(Protocol):
    """A sequence of work that runs in order."""

    def enqueue(self, work: Callable[[], None]) -> None: ...

    def mark(self) -> Mark:
        """The end of the work enqueued so far."""

    def follow(self, mark: Mark) -> None:
        """Work enqueued from now on runs after the mark, which may be of any lane of the device."""


class Device(Lane, Protocol):
    @property
    def beside(self) -> Lane:
        """A lane for copies that run concurrently with other work of the device."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def name(self) -> str:
        """For the log."""

    def enqueue(self, work: Callable[[], None]) -> None:
        """work: calls operations on device tensors, and copies between them and pinned memory with non_blocking.

        After an exception, such as torch.OutOfMemoryError, the work is partly enqueued.
        """

    def record(self) -> Event: ...

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros [size] in host memory that can be copied to and from the device asynchronously."""

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Called inside enqueued work: a copy in host memory, complete once a later event has passed."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Runs the work once and then records it. Nothing else may be enqueued meanwhile."""

    def synchronize(self) -> None:
        """Waits for all work."""

    @property
    def has_float8(self) -> bool:
        """Whether the device computes with float8_e4m3fn."""

    def memory(self) -> Memory:
        """The device's memory. Memory freed by this process counts as used until `trim`."""

    @property
    def held_bytes(self) -> int:
        """Memory of this process for tensors, including those of graphs and freed memory until `trim`."""

    def trim(self) -> None:
        """Returns unused memory of this process to the device."""


class _CudaEvent:
    def __init__(self) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1000.0


class _CudaLane:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def enqueue(self, work: Callable[[], None]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Mark:
        return cast(Mark, self._stream.record_event())

    def follow(self, mark: Any) -> None:
        self._stream.wait_event(mark)


class GraphPool:
    """The memory that the graphs of an engine share. A handle is valid only while one of its graphs is alive: torch's
    host allocator erases a pool with its last graph, and a capture with its handle fails an assertion."""

    def __init__(self, new_handle: Callable[[], Any]) -> None:
        self._new_handle = new_handle
        self._handle: Any = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def handle(self) -> Any:
        """The handle of the living graphs, or a new one."""
        if not self._graphs:
            self._handle = self._new_handle()
        return self._handle

    def add(self, graph: Any) -> None:
        self._graphs.add(graph)


_MAX_LIBRARY_BYTES = 1 << 30
"""Loaded kernels, workspaces of libraries. The driver does not say whose memory is used, so that of a process that
starts at the same time is counted as well, up to this limit."""


class CudaDevice:
    """An NVIDIA GPU: all work is on the current stream of the calling thread, except copies in `beside`."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._capture_stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._graph_pool = GraphPool(torch.cuda.graph_pool_handle)
        self._beside = _CudaLane(self._device)
        self._foreign_bytes = self._used_beside_tensors()

    @property
    def beside(self) -> Lane:
        return self._beside

    def mark(self) -> Mark:
        return cast(Mark, torch.cuda.current_stream(self._device).record_event())

    def follow(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self._device)

    def enqueue(self, work: Callable[[], None]) -> None:
        with torch.cuda.device(self._device):
            work()

    def record(self) -> Event:
        with torch.cuda.device(self._device):
            return _CudaEvent()

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        # torch does not reuse the pinned memory until the copy is complete.
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def capture(self, work: Callable[[], None]) -> Graph:
        """The first run compiles kernels and allocates the workspaces of libraries, which a capture must not do. Graphs
        share one memory pool: they never run concurrently, and none reads what another left there."""
        with torch.cuda.device(self._device):
            stream, current = self._capture_stream, torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                work()
                stream.synchronize()
                graph = self._captured(work)
            current.wait_stream(stream)
            return graph

    def _captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Errors of `work`, such as torch.OutOfMemoryError, are raised unchanged: the failed capture is ended so that
        the allocator stops recording, ignoring errors from doing so."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Other engines in this process may use their devices meanwhile.
            graph.capture_begin(pool=self._graph_pool.handle(), capture_error_mode="thread_local")
            work()
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        self._graph_pool.add(graph)
        return graph

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    @property
    def has_float8(self) -> bool:
        return torch.cuda.get_device_capability(self._device) >= (8, 9)

    def memory(self) -> Memory:
        of_libraries = min(max(self._used_beside_tensors() - self._foreign_bytes, 0), _MAX_LIBRARY_BYTES)
        return Memory(*torch.cuda.mem_get_info(self._device), self.held_bytes + of_libraries)

    def _used_beside_tensors(self) -> int:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return total_bytes - free_bytes - self.held_bytes

    @property
    def held_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))

    def trim(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()


class CpuDevice:
    """The processor as a device, for ranks on processors: work is complete as soon as it is enqueued."""

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
        return Memory(os.sysconf("SC_AVPHYS_PAGES") * page_bytes, os.sysconf("SC_PHYS_PAGES") * page_bytes, 0)

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

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _Passed)
        return self._at_s - earlier._at_s


@dataclass(frozen=True, slots=True)
class _Repeated:
    replay: Callable[[], None]
