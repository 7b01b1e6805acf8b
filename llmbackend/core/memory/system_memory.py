"""One region of POSIX shared memory (`shm_open`), read and written by copying.

For: SharedMemory. Does not know: names of regions, requests, tensors.
Invariants: a key names a plain file directly in /dev/shm and nothing else: no path, no link, no pipe. The memory is
never mapped: `pread` and `pwrite` come back short or with an error where a mapping would end the process with SIGBUS,
so a client that truncates or unlinks its file harms only its own requests.
Source: Triton's shared_memory_manager.cc, which maps; golden transcript 40.
"""

from __future__ import annotations

import os
import stat
from typing import Protocol

from llmbackend.core.errors import TritonError, internal, invalid_argument

DIRECTORY = "/dev/shm"
LONGEST_NAME_BYTES = 255
RESERVED_PREFIX = "triton_python_backend_shm_region_"
"""Regions between a server and the processes of its python models."""
LARGEST_TRANSFER_BYTES = 1 << 30
"""One call of the kernel moves 2 GiB at most."""


class Memory(Protocol):
    """What SharedMemory needs of a region, whatever it is made of. Offsets count from the region's begin."""

    def read(self, offset: int, byte_size: int) -> bytes:
        """Raises TritonError when the memory is not there any more."""

    def write(self, offset: int, data: memoryview) -> None:
        """Raises TritonError when the memory is not there any more."""

    def close(self) -> None: ...


class SystemMemory:
    """`byte_size` bytes of the file behind `key`, from `offset` on. Open until `close`."""

    def __init__(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Raises TritonError: INVALID_ARG for a reserved key, INTERNAL when there is no such memory or it is too
        small."""
        _check_not_reserved(name, key)
        self._key = key
        self._start = offset
        self._end = offset + byte_size
        self._descriptor = _open(key)
        if not self._is_whole():
            self.close()
            raise internal(f"Invalid shared memory region: '{key}'")

    def read(self, offset: int, byte_size: int) -> bytes:
        parts: list[bytes] = []
        position, end = self._start + offset, self._start + offset + byte_size
        while position < end:
            part = os.pread(self._descriptor, min(end - position, LARGEST_TRANSFER_BYTES), position)
            if not part:
                raise self._shrunk()
            parts.append(part)
            position += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, offset: int, data: memoryview) -> None:
        if not self._is_whole():
            raise self._shrunk()  # writing would make the client's file grow again
        position = self._start + offset
        while data:
            try:
                written = os.pwrite(self._descriptor, data[:LARGEST_TRANSFER_BYTES], position)
            except OSError as error:  # a file with holes, and no memory left to fill them
                raise internal(f"can not write to shared memory region '{self._key}': {error.strerror}") from None
            position += written
            data = data[written:]

    def close(self) -> None:
        os.close(self._descriptor)

    def _is_whole(self) -> bool:
        """Whether the file still reaches to the region's end."""
        return os.fstat(self._descriptor).st_size >= self._end

    def _shrunk(self) -> TritonError:
        return invalid_argument(f"shared memory region '{self._key}' became smaller since it was registered")


def _check_not_reserved(name: str, key: str) -> None:
    if key.lstrip("/").startswith(RESERVED_PREFIX):
        raise invalid_argument(
            f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved prefix "
            f"'{RESERVED_PREFIX}'"
        )


def _open(key: str) -> int:
    """A descriptor of the file, as `shm_open` would find it: slashes before the name are ignored, none may follow."""
    name = key.lstrip("/")
    refusal = internal(f"Unable to open shared memory region: '{key}'")
    if not name.isprintable() or "/" in name or name in ("", ".", "..") or len(name.encode()) > LONGEST_NAME_BYTES:
        raise refusal
    try:
        # Without NONBLOCK a named pipe would block here until somebody reads it.
        descriptor = os.open(f"{DIRECTORY}/{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        raise refusal from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refusal
    return descriptor
