"""Shared memory regions of clients, and the tensors read from and written to them.

Invariants: a region is closed exactly once; an input is copied before its request is accepted; an output is written
before its response is sent. Source: Triton's shared_memory_manager.cc (which maps the memory), texts of release 2.73;
golden transcript 40.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

from .errors import ErrorCode, TritonError, internal, invalid_argument, not_found, unavailable, unsupported
from .messages import InferenceRequest, InferenceResponse, ResponseCallback
from .requests.responses import TransformedCallback
from .tensors import RawTensor, SharedInput, SharedRange, wire_view

DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
MAX_REGIONS = 4096
"""Each region has a file descriptor."""
CUDA_HANDLE_BYTES = 64
DIRECTORY = "/dev/shm"
MAX_NAME_BYTES = 255
RESERVED_PREFIX = "triton_python_backend_shm_region_"
"""Prefix of the regions that a Triton shares with its python models."""
MAX_SIZE = (1 << 64) - 1
"""The largest value of Triton's size_t."""
MAX_TRANSFER_BYTES = 1 << 30
"""One system call transfers at most 2 GiB."""
Submitted = TypeVar("Submitted")


class MemoryKind(Enum):
    """`value` is Triton's word for it in texts."""

    SYSTEM = "system"
    CUDA = "CUDA"


class SystemMemory:
    """`byte_size` bytes, starting at `offset`, of the POSIX shared memory (`shm_open`) named `key`.

    A key names a plain file directly in /dev/shm, never a path, a link or a pipe. The memory is never mapped: if a
    client truncates its file, `read` and `write` raise TritonError, whereas access to a mapping would kill the process
    with SIGBUS. Their offsets are relative to the start of the region.
    """

    def __init__(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Raises TritonError: INVALID_ARG for an invalid or reserved key and for memory that is too small, INTERNAL if
        there is no such memory."""
        _check_key(name, key)
        self._key = key
        self._start = offset
        self._end = offset + byte_size
        self._descriptor = _open(key)
        if not self._is_whole():
            self.close()
            raise invalid_args(name)

    def read(self, offset: int, byte_size: int) -> bytes:
        parts: list[bytes] = []
        position, end = self._start + offset, self._start + offset + byte_size
        while position < end:
            part = os.pread(self._descriptor, min(end - position, MAX_TRANSFER_BYTES), position)
            if not part:
                raise self._shrunk()
            parts.append(part)
            position += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, offset: int, data: memoryview) -> None:
        if not self._is_whole():
            raise self._shrunk()  # writing would enlarge the client's file
        position = self._start + offset
        while data:
            try:
                written = os.pwrite(self._descriptor, data[:MAX_TRANSFER_BYTES], position)
            except OSError as error:  # a sparse file, and no memory left for its holes
                raise internal(f"cannot write to shared memory region '{self._key}': {error.strerror}") from None
            position += written
            data = data[written:]

    def close(self) -> None:
        os.close(self._descriptor)

    def _is_whole(self) -> bool:
        """Whether the file still has all bytes of the region."""
        return os.fstat(self._descriptor).st_size >= self._end

    def _shrunk(self) -> TritonError:
        return invalid_argument(f"shared memory region '{self._key}' has shrunk since it was registered")


def invalid_args(name: str) -> TritonError:
    return invalid_argument(f"failed to register shared memory region '{name}': invalid args")


def _check_key(name: str, key: str) -> None:
    if not key.strip("/"):
        raise invalid_argument(f"cannot register shared memory region '{name}' - invalid shm key '{key}'")
    if key.lstrip("/").startswith(RESERVED_PREFIX):
        raise invalid_argument(
            f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved prefix "
            f"'{RESERVED_PREFIX}'"
        )


def _open(key: str) -> int:
    """A descriptor of the file that `shm_open` would open. Leading slashes are ignored, others not allowed."""
    name = key.lstrip("/")
    refusal = internal(f"Unable to open shared memory region: '{key}'")
    if not name.isprintable() or "/" in name or name in ("", ".", "..") or len(name.encode()) > MAX_NAME_BYTES:
        raise refusal
    try:
        # Opening a named pipe would block without O_NONBLOCK.
        descriptor = os.open(f"{DIRECTORY}/{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        raise refusal from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refusal
    return descriptor


@dataclass(slots=True)
class Region:
    """A registered region. users: requests that may still read or write it."""

    name: str
    key: str
    offset: int
    byte_size: int
    kind: MemoryKind = field(repr=False)
    memory: SystemMemory = field(repr=False)
    users: int = 0
    is_unregistered: bool = False


class SharedMemoryManager:
    """Thread-safe. A region is closed when it has been unregistered (or the server stops) and no request uses it any
    more. CUDA memory is refused with the text of a Triton without GPU support."""

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}
        self._closed = False

    # --- control ----------------------------------------------------------------------------------------------------

    def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Raises TritonError: UNSUPPORTED if shared memory is disabled, ALREADY_EXISTS, INVALID_ARG, INTERNAL for a key
        without a file."""
        self._check_allowed()
        if not name:
            raise invalid_argument("'region name' is necessary to register system shared memory region")
        with self._lock:
            self._check_new(name)
            if byte_size <= 0 or offset < 0:
                raise invalid_args(name)
            memory = SystemMemory(name, key, offset, byte_size)
            self._regions[name] = Region(name, key, offset, byte_size, MemoryKind.SYSTEM, memory)

    def register_cuda(self, name: str, raw_handle: bytes, byte_size: int, device_id: int) -> None:
        """Always raises TritonError: this host does not map GPU memory."""
        self._check_allowed()
        if not name:
            raise invalid_argument("'region name' is necessary to register cuda shared memory region")
        if len(raw_handle) != CUDA_HANDLE_BYTES:
            raise invalid_argument("failed to register shared memory region: invalid args")
        raise invalid_argument(f"failed to register CUDA shared memory region: '{name}', GPUs not supported")

    def status(self, kind: MemoryKind, name: str = "") -> list[Region]:
        """The region of that name, or all of the kind sorted by name. Raises TritonError NOT_FOUND."""
        with self._lock:
            if name:
                return [self._named(kind, name)]
            return [region for _, region in sorted(self._regions.items()) if region.kind is kind]

    def unregister(self, kind: MemoryKind, name: str = "") -> None:
        """Removes the region with that name, or all regions of the kind; ignores an unknown name. A region still in use
        is closed later, but new requests cannot use it."""
        self._check_allowed()
        with self._lock:
            chosen = [self._regions[name]] if name in self._regions else []
            self._unregister(region for region in (chosen if name else self._regions.values()) if region.kind is kind)

    def close(self) -> None:
        """Unregisters all regions and refuses new ones."""
        with self._lock:
            self._closed = True
            self._unregister(self._regions.values())

    def leaked_resources(self) -> dict[str, int]:
        """Counts that are 0 while no request runs."""
        with self._lock:
            return {"uses of shared memory": sum(region.users for region in self._regions.values())}

    # --- tensors ----------------------------------------------------------------------------------------------------

    def with_inputs(self, request: InferenceRequest) -> InferenceRequest:
        """`request` with copies of its inputs in regions. Raises TritonError: NOT_FOUND for an unknown region,
        INVALID_ARG for a range outside it."""
        copies = tuple(map(self._copied, request.shared_inputs))
        return replace(request, inputs=(*request.inputs, *copies), shared_inputs=())

    def submit_with_outputs(
        self,
        outputs: Mapping[str, SharedRange],
        callback: ResponseCallback,
        submit: Callable[[ResponseCallback], Submitted],
    ) -> Submitted:
        """Calls `submit` with a callback that writes `outputs` to memory before it passes responses to `callback`. The
        regions stay open until the request has ended or was refused. Raises the same errors as `with_inputs`."""
        ranges = self._open(outputs)
        try:
            return submit(TransformedCallback(callback, ranges.write_outputs, on_final=lambda: self._release(ranges)))
        except BaseException:
            self._release(ranges)
            raise

    def _copied(self, item: SharedInput) -> RawTensor:
        ranges = self._open({item.name: item.memory_range})
        try:
            return RawTensor(item.name, item.datatype, item.shape, ranges.read(item.name))
        finally:
            self._release(ranges)

    def _open(self, ranges: Mapping[str, SharedRange]) -> _OpenRanges:
        """Marks all regions as used, or none if there is an error."""
        with self._lock:
            found = {name: (self._region_of(each), each) for name, each in ranges.items()}
            for region, _ in found.values():
                region.users += 1
        return _OpenRanges(found)

    def _release(self, ranges: _OpenRanges) -> None:
        with self._lock:
            regions = ranges.close()
            for region in regions:
                region.users -= 1
            self._unregister(region for region in regions if region.is_unregistered)

    # --- under the lock ---------------------------------------------------------------------------------------------

    def _unregister(self, regions: Iterable[Region]) -> None:
        for region in list(regions):
            region.is_unregistered = True
            if not region.users and self._regions.pop(region.name, None) is not None:
                region.memory.close()

    def _named(self, kind: MemoryKind, name: str) -> Region:
        region = self._regions.get(name)
        if region is None:
            raise not_found(f"Unable to find {kind.value.lower()} shared memory region: '{name}'")
        if region.kind is not kind:
            raise not_found(
                f"The region named '{name}' is registered as {region.kind.value} shared memory, not {kind.value} "
                f"shared memory"
            )
        return region

    def _region_of(self, wanted: SharedRange) -> Region:
        """The region that contains `wanted`. Raises TritonError."""
        region = self._regions.get(wanted.region)
        if region is None or region.is_unregistered:
            self._check_allowed()
            raise not_found(f"Unable to find shared memory region: '{wanted.region}'")
        if not 0 <= wanted.offset < region.byte_size:
            raise invalid_argument(f"Invalid offset for shared memory region: '{wanted.region}'")
        if wanted.byte_size > MAX_SIZE - wanted.offset:
            raise invalid_argument(
                f"Integer overflow detected: byte_size ({wanted.byte_size}) + offset ({wanted.offset}) exceeds maximum "
                f"value ({MAX_SIZE}) for region '{wanted.region}'"
            )
        if not 0 <= wanted.byte_size <= region.byte_size - wanted.offset:
            raise invalid_argument(f"Invalid offset + byte size for shared memory region: '{wanted.region}'")
        return region

    def _check_new(self, name: str) -> None:
        if self._closed:
            raise unavailable("Server is stopping")
        if name in self._regions:
            raise TritonError(f"shared memory region '{name}' already in manager", ErrorCode.ALREADY_EXISTS)
        if len(self._regions) >= MAX_REGIONS:
            raise unavailable(f"too many shared memory regions: {MAX_REGIONS} are registered")

    def _check_allowed(self) -> None:
        if not self._allowed:
            raise unsupported(DISABLED)


class _OpenRanges:
    """Ranges by tensor name; their regions stay open until `close`."""

    def __init__(self, ranges: dict[str, tuple[Region, SharedRange]]) -> None:
        self._ranges = ranges

    def read(self, name: str) -> bytes:
        region, wanted = self._ranges[name]
        return region.memory.read(wanted.offset, wanted.byte_size)

    def write_outputs(self, response: InferenceResponse) -> InferenceResponse:
        """Writes the outputs that have a range. Raises TritonError INTERNAL for one that does not fit."""
        for tensor in response.outputs:
            if tensor.name not in self._ranges:
                continue
            region, wanted = self._ranges[tensor.name]
            data = wire_view(tensor)
            if data.nbytes > wanted.byte_size:
                raise internal(
                    f"shared memory size specified with the request for output '{tensor.name}' ({wanted.byte_size} "
                    f"bytes) should be at least {data.nbytes} bytes to hold the results"
                )
            region.memory.write(wanted.offset, data)
        return response

    def close(self) -> list[Region]:
        """The regions to release: all of them on the first call, then none."""
        regions = [region for region, _ in self._ranges.values()]
        self._ranges = {}
        return regions
