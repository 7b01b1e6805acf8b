"""The file of a packed model: a header, two memories, their checksums, a description.

For: the cache, and engines that pass packed weights on without a disk (a memfd). Does not know: what a description
says, where files lie. Layout: one page of header (magic, length, CRC, msgpack), the resident memory, the mapped memory,
both in whole pages, a CRC-like sum of each MiB of both (uint32), the description. Invariants: the header is written
last, so that a file which was not finished has none; nothing is used before its checksum was compared; no byte is
unpickled or executed. Pages are written by system calls: writing through a mapping costs a page fault each, and a full
disk would be a SIGBUS.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from .checksums import CHUNK_BYTES, PAGE_BYTES, Bytes, Sums, chunk_checksum, num_chunks, whole_pages

FORMAT: Final = 1
_MAGIC: Final = b"llmbimg" + bytes([FORMAT])
_HEAD: Final = struct.Struct("<8sII")
_MAX_DESCRIPTION_BYTES: Final = 64 << 20
_PUNCH_HOLE_AND_KEEP_SIZE: Final = 3


class ImageDamagedError(Exception):
    """What is wrong with an image's file: it was not finished, or has changed."""


class _Part(msgspec.Struct, frozen=True, array_like=True):
    offset_bytes: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset_bytes + self.size_bytes


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    resident: _Part
    mapped: _Part
    checksums: _Part
    checksums_crc: int
    description: _Part
    description_crc: int


_decode_header = msgspec.msgpack.Decoder(_Header).decode


def image_bytes(resident_bytes: int, mapped_bytes: int, description_bytes: int) -> int:
    """Size of the file with these parts."""
    return _layout(resident_bytes, mapped_bytes, description_bytes)[3].end


def write_image(
    descriptor: int, key: str, description: bytes, resident: Bytes, mapped: Bytes, num_threads: int
) -> None:
    """Raises OSError; the file is then no image. Written, but not on the disk yet."""
    parts = resident_part, mapped_part, sums_part, description_part = _layout(
        len(resident), len(mapped), len(description)
    )
    os.ftruncate(descriptor, 0)
    os.ftruncate(descriptor, description_part.end)
    sums = _write_memories(descriptor, ((resident, resident_part), (mapped, mapped_part)), num_threads)
    _write_all(descriptor, sums.tobytes(), sums_part.offset_bytes)
    _write_all(descriptor, description, description_part.offset_bytes)
    header = msgspec.msgpack.encode(
        _Header(key, *parts[:3], zlib.crc32(sums.tobytes()), description_part, zlib.crc32(description))
    )
    _write_all(descriptor, _HEAD.pack(_MAGIC, len(header), zlib.crc32(header)) + header, 0)


def _layout(resident_bytes: int, mapped_bytes: int, description_bytes: int) -> tuple[_Part, _Part, _Part, _Part]:
    resident = _Part(PAGE_BYTES, whole_pages(resident_bytes))
    mapped = _Part(resident.end, whole_pages(mapped_bytes))
    checksums = _Part(mapped.end, 4 * (num_chunks(resident.size_bytes) + num_chunks(mapped.size_bytes)))
    return resident, mapped, checksums, _Part(checksums.end, description_bytes)


def _write_memories(descriptor: int, memories: tuple[tuple[Bytes, _Part], ...], num_threads: int) -> Sums:
    """The checksums of all chunks."""
    chunks = [
        (part.offset_bytes + start, memory[start : start + CHUNK_BYTES])
        for memory, part in memories
        for start in range(0, len(memory), CHUNK_BYTES)
    ]
    sums = np.zeros(len(chunks), np.uint32)

    def write(index: int) -> None:
        offset_bytes, chunk = chunks[index]
        if len(chunk) % PAGE_BYTES:
            chunk = np.pad(chunk, (0, -len(chunk) % PAGE_BYTES))
        sums[index] = chunk_checksum(chunk)
        _write_all(descriptor, chunk.data, offset_bytes)

    _in_threads(write, len(chunks), num_threads)
    return sums


def _write_all(descriptor: int, data: bytes | memoryview, offset_bytes: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset_bytes)
        view, offset_bytes = view[written:], offset_bytes + written


class ImageFile:
    """An image that was written whole, as far as its header says. Owns the descriptor."""

    def __init__(self, descriptor: int, key: str) -> None:
        """Raises ImageDamagedError; the descriptor is then the caller's."""
        self.descriptor = descriptor
        self._header = _read_header(descriptor)
        if self._header.key != key:
            raise ImageDamagedError(f"it is the image of another model ({self._header.key})")

    @property
    def size_bytes(self) -> int:
        return self._header.description.end

    def read(self, new_memory: Callable[[int], Bytes], num_threads: int) -> tuple[bytes, Bytes, Bytes]:
        """The description, and both memories: the resident one in `new_memory(size_bytes)`, the other one mapped.
        All of it was compared with its checksums. Its threads have ended. Raises ImageDamagedError or MemoryError."""
        header = self._header
        description = self._read_part(header.description)
        sums = np.frombuffer(self._read_part(header.checksums), np.uint32)
        if zlib.crc32(description) != header.description_crc or zlib.crc32(sums.tobytes()) != header.checksums_crc:
            raise ImageDamagedError("its description has changed")
        resident = new_memory(header.resident.size_bytes)
        self._read_memory(header.resident, sums, num_threads, resident)
        self._read_memory(header.mapped, sums[num_chunks(header.resident.size_bytes) :], num_threads, None)
        return description, resident, self._map(header.mapped)

    def release_resident(self) -> None:
        """Frees the memory of the resident part, which is not read again, of an image that lies in memory."""
        part = self._header.resident
        arguments = (ctypes.c_int64(part.offset_bytes), ctypes.c_int64(part.size_bytes))
        ctypes.CDLL(None).fallocate(self.descriptor, _PUNCH_HOLE_AND_KEEP_SIZE, *arguments)

    def close(self) -> None:
        """Memories that were read stay."""
        os.close(self.descriptor)

    def _read_part(self, part: _Part) -> bytes:
        data = os.pread(self.descriptor, part.size_bytes, part.offset_bytes)
        if len(data) != part.size_bytes:
            raise ImageDamagedError("it is cut short")
        return data

    def _read_memory(self, part: _Part, sums: Sums, num_threads: int, memory: Bytes | None) -> None:
        """memory: where the part goes; None: it is only compared."""
        buffers = threading.local()

        def read(index: int) -> None:
            start = index * CHUNK_BYTES
            size_bytes = min(CHUNK_BYTES, part.size_bytes - start)
            if memory is not None:
                chunk = memory[start : start + size_bytes]
            else:
                if not hasattr(buffers, "chunk"):
                    buffers.chunk = np.empty(CHUNK_BYTES, np.uint8)
                chunk = buffers.chunk[:size_bytes]
            if os.preadv(self.descriptor, [chunk.data], part.offset_bytes + start) != size_bytes:
                raise ImageDamagedError("it is cut short")
            if chunk_checksum(chunk) != sums[index]:
                raise ImageDamagedError(f"the weights at byte {part.offset_bytes + start} have changed")

        _in_threads(read, num_chunks(part.size_bytes), num_threads)

    def _map(self, part: _Part) -> Bytes:
        if not part.size_bytes:
            return np.empty(0, np.uint8)
        pages = mmap.mmap(self.descriptor, part.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=part.offset_bytes)
        return np.frombuffer(pages, np.uint8)


def _read_header(descriptor: int) -> _Header:
    size_bytes = os.fstat(descriptor).st_size
    page = os.pread(descriptor, PAGE_BYTES, 0)
    if len(page) < PAGE_BYTES or size_bytes < PAGE_BYTES:
        raise ImageDamagedError("it is cut short")
    magic, length, crc = _HEAD.unpack_from(page)
    if magic != _MAGIC:
        raise ImageDamagedError("it was not finished, or is no image of this version")
    encoded = page[_HEAD.size : _HEAD.size + length]
    if length > PAGE_BYTES - _HEAD.size or zlib.crc32(encoded) != crc:
        raise ImageDamagedError("its header has changed")
    try:
        header = _decode_header(encoded)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ImageDamagedError(f"its header is broken: {error}") from None
    _check_layout(header, size_bytes)
    return header


def _check_layout(header: _Header, size_bytes: int) -> None:
    parts = (header.resident, header.mapped, header.checksums, header.description)
    if any(part.size_bytes < 0 for part in parts) or header.description.size_bytes > _MAX_DESCRIPTION_BYTES:
        raise ImageDamagedError("its header states impossible sizes")
    expected = _layout(header.resident.size_bytes, header.mapped.size_bytes, header.description.size_bytes)
    if parts != expected:
        raise ImageDamagedError("its header states parts that do not lie one behind the other")
    if size_bytes != header.description.end:
        raise ImageDamagedError(f"it has {size_bytes} bytes, expected {header.description.end}")


def _in_threads(work: Callable[[int], None], count: int, num_threads: int) -> None:
    """Calls work(0 … count - 1) on threads that have ended when this returns. Raises what one of them raised."""
    indices = itertools.count()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not errors and (index := next(indices)) < count:
                work(index)
        except BaseException as error:  # raised below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, name="weight-image") for _ in range(min(num_threads, count) - 1)]
    for thread in threads:
        thread.start()
    run()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
