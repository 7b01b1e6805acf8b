"""The regions of memory that clients share with the server, and tensors that are read from and written to them.

For: frontends (register, status, unregister, inputs) and InferenceServer (outputs). Does not know: protocols, what a
region is made of (system_memory).
Invariants: a region is closed exactly once: when it is unregistered or the server stops, or, if requests are still to
write to it then, when the last of them has ended. An input is a copy made before its request is accepted: what a client
does to its memory later does not reach a model. An output is in place before its response is sent.
Source: Triton's shared_memory_manager.cc; golden transcript 40. There is no CUDA memory in this host, so registering
some is refused, in the words of a Triton without GPU support.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

from llmbackend.core.errors import (
    ErrorCode,
    TritonError,
    internal,
    invalid_argument,
    not_found,
    unavailable,
    unsupported,
)
from llmbackend.core.messages import InferenceRequest, InferenceResponse, Place, RawTensor, SharedInput
from llmbackend.core.requests.delivery import Delivery
from llmbackend.core.tensors import wire_view

from .system_memory import Memory, SystemMemory

DISABLED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
MOST_REGIONS = 4096
"""Each holds a file descriptor."""
CUDA_HANDLE_BYTES = 64
Submitted = TypeVar("Submitted")


class MemoryKind(Enum):
    """`value` is the word in Triton's texts."""

    SYSTEM = "system"
    CUDA = "CUDA"


@dataclass(slots=True)
class Region:
    """A registered region. `users` are requests that may still write to it."""

    name: str
    key: str
    offset: int
    byte_size: int
    kind: MemoryKind = field(repr=False)
    memory: Memory = field(repr=False)
    users: int = 0
    is_unregistered: bool = False


class SharedMemory:
    """Any thread may use it."""

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}
        self._closed = False

    # --- control ----------------------------------------------------------------------------------------------------

    def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Raises TritonError: UNSUPPORTED when switched off, ALREADY_EXISTS, INVALID_ARG, or INTERNAL for a key
        without memory of that size behind it."""
        self._check_allowed()
        if not name:
            raise invalid_argument("'region name' is necessary to register system shared memory region")
        with self._lock:
            self._check_new(name)
            if byte_size <= 0 or offset < 0:
                raise invalid_argument(f"failed to register shared memory region '{name}': invalid args")
            memory = SystemMemory(name, key, offset, byte_size)
            self._regions[name] = Region(name, key, offset, byte_size, MemoryKind.SYSTEM, memory)

    def register_cuda(self, name: str, raw_handle: bytes, byte_size: int, device_id: int) -> None:
        """Always raises TritonError: this host maps no memory of GPUs."""
        self._check_allowed()
        if not name:
            raise invalid_argument("'region name' is necessary to register cuda shared memory region")
        if len(raw_handle) != CUDA_HANDLE_BYTES:
            raise invalid_argument("failed to register shared memory region: invalid args")
        raise invalid_argument(f"failed to register CUDA shared memory region: '{name}', GPUs not supported")

    def status(self, kind: MemoryKind, name: str = "") -> list[Region]:
        """The region of that name, or every one of the kind, by name. Raises TritonError NOT_FOUND."""
        with self._lock:
            if name:
                return [self._named(kind, name)]
            return [region for _, region in sorted(self._regions.items()) if region.kind is kind]

    def unregister(self, kind: MemoryKind, name: str = "") -> None:
        """Forgets the region of that name, or every one of the kind; one that is not known is no error. A region that
        requests are to write to is forgotten when the last of them has ended; new requests may not use it."""
        self._check_allowed()
        with self._lock:
            chosen = [self._regions[name]] if name in self._regions else []
            self._unregister(region for region in (chosen if name else self._regions.values()) if region.kind is kind)

    def close(self) -> None:
        """When the server stops: no region is registered any more."""
        with self._lock:
            self._closed = True
            self._unregister(self._regions.values())

    def left_behind(self) -> dict[str, int]:
        """Counts that are 0 while no request runs."""
        with self._lock:
            return {"uses of shared memory": sum(region.users for region in self._regions.values())}

    # --- tensors ----------------------------------------------------------------------------------------------------

    def with_inputs(self, request: InferenceRequest) -> InferenceRequest:
        """`request` with a copy of every input that lies in a region. Raises TritonError: NOT_FOUND for an unknown
        region, INVALID_ARG for a place outside of it."""
        copies = tuple(map(self._copied, request.shared_inputs))
        return replace(request, inputs=(*request.inputs, *copies), shared_inputs=())

    def lend(self, request: InferenceRequest, submit: Callable[[InferenceRequest], Submitted]) -> Submitted:
        """`submit` for a request some of whose outputs go to regions. These stay open until the request has ended or
        was refused. Raises TritonError as `with_inputs` does."""
        loan = self._borrow(request.output_places)
        try:
            delivery = Delivery(request.response_callback, loan.place, on_final=lambda: self._give_back(loan))
            return submit(replace(request, response_callback=delivery))
        except BaseException:
            self._give_back(loan)
            raise

    def _copied(self, item: SharedInput) -> RawTensor:
        loan = self._borrow({item.name: item.place})
        try:
            return RawTensor(item.name, item.datatype, item.shape, loan.read(item.name))
        finally:
            self._give_back(loan)

    def _borrow(self, places: Mapping[str, Place]) -> _Loan:
        """Whole or not at all."""
        with self._lock:
            found = {name: (self._usable(place), place) for name, place in places.items()}
            for region, _ in found.values():
                region.users += 1
        return _Loan(found)

    def _give_back(self, loan: _Loan) -> None:
        with self._lock:
            regions = loan.end()
            for region in regions:
                region.users -= 1
            self._unregister(region for region in regions if region.is_unregistered)

    # --- inside: holds the lock -------------------------------------------------------------------------------------

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

    def _usable(self, place: Place) -> Region:
        """The region, if all of `place` lies in it."""
        region = self._regions.get(place.region)
        if region is None or region.is_unregistered:
            self._check_allowed()
            raise not_found(f"Unable to find shared memory region: '{place.region}'")
        if not 0 <= place.offset < region.byte_size:
            raise invalid_argument(f"Invalid offset for shared memory region: '{place.region}'")
        if not 0 <= place.byte_size <= region.byte_size - place.offset:
            raise invalid_argument(f"Invalid offset + byte size for shared memory region: '{place.region}'")
        return region

    def _check_new(self, name: str) -> None:
        if self._closed:
            raise unavailable("Server is stopping")
        if name in self._regions:
            raise TritonError(f"shared memory region '{name}' already in manager", ErrorCode.ALREADY_EXISTS)
        if len(self._regions) >= MOST_REGIONS:
            raise unavailable(f"too many shared memory regions: {MOST_REGIONS} are registered")

    def _check_allowed(self) -> None:
        if not self._allowed:
            raise unsupported(DISABLED)


class _Loan:
    """Tensors of one request, by name, in regions that stay open until it is given back."""

    def __init__(self, places: dict[str, tuple[Region, Place]]) -> None:
        self._places = places

    def read(self, name: str) -> bytes:
        region, place = self._places[name]
        return region.memory.read(place.offset, place.byte_size)

    def place(self, response: InferenceResponse) -> InferenceResponse:
        """Writes the outputs that have a place. Raises TritonError INTERNAL for one that does not fit."""
        for tensor in response.outputs:
            if tensor.name not in self._places:
                continue
            region, place = self._places[tensor.name]
            data = wire_view(tensor)
            if data.nbytes > place.byte_size:
                raise internal(
                    f"shared memory size specified with the request for output '{tensor.name}' ({place.byte_size} "
                    f"bytes) should be at least {data.nbytes} bytes to hold the results"
                )
            region.memory.write(place.offset, data)
        return response

    def end(self) -> list[Region]:
        """What is given back: everything the first time, nothing later."""
        regions = [region for region, _ in self._places.values()]
        self._places = {}
        return regions
