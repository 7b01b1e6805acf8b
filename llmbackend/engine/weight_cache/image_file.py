"""The file of a packed model: a header, two memory regions, their checksums, a description; and its pages in memory.

Used by the cache, and by engines that pass packed weights on without a disk (a memfd). Layout: a header (magic, length,
CRC, msgpack); from 2 MiB on, the resident memory, then the mapped memory, both in whole pages; a checksum of each 2 MiB
of both (uint32); the description. Invariants: the header is written last, so an unfinished file has none; nothing is
used before its checksum was verified; nothing is unpickled or executed; a mapping is only written to if the disk has
space for it (else: SIGBUS).

Checksums are computed by word and by page, at memory speed; a CRC of the bytes takes three times as long. They detect a
changed word or two exchanged pages, but are no protection against deliberate collisions (the folder's owner and mode
are). Processes that map the same pages share them, and a CPU reads huge pages about a quarter faster than small ones.
Whether pages are huge is read from /proc/self/smaps: it depends on the kernel, the file system, and how the file came
into memory.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint32]

CHUNK_BYTES: Final = 2 << 20
PAGE_BYTES: Final = 4096
"""Chunks are whole pages."""


def chunk_checksum(chunk: Bytes) -> int:
    """For whole pages: a CRC of their sums, per word position over all pages and per page over all words."""
    words = chunk.view(np.uint64).reshape(-1, PAGE_BYTES // 8)
    return zlib.crc32(words.sum(axis=1), zlib.crc32(words.sum(axis=0)))


def num_chunks(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


def whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


HUGE_PAGE_BYTES: Final = 2 << 20
_PREFAULT_BYTES: Final = 8 << 20
_MADV_POPULATE_WRITE: Final = 23


def map_pages(
    descriptor: int, offset_bytes: int, size_bytes: int, *, writable: bool = False, huge: bool = False
) -> Bytes:
    """Maps a part of the file. All processes that map it share its pages. huge: asks for huge pages, which begin at
    the file's multiples of 2 MiB. Raises OSError."""
    rights = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    pages = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, rights, offset=offset_bytes)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


class Prefault:
    """Populates the pages of a writable mapping on a thread, until `stop`: clearing them takes longer than filling
    them, especially in virtual machines."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; pages already populated stay in the file."""
        self._is_stopped = True
        self._thread.join()

    def _run(self) -> None:
        madvise = ctypes.CDLL(None).madvise  # unlike mmap's own method, releases the interpreter lock
        address = int(self._memory.ctypes.data)
        for start in range(0, len(self._memory), _PREFAULT_BYTES):
            size_bytes = min(_PREFAULT_BYTES, len(self._memory) - start)
            arguments = (ctypes.c_void_p(address + start), ctypes.c_size_t(size_bytes), _MADV_POPULATE_WRITE)
            if self._is_stopped or madvise(*arguments):
                return


def huge_bytes(memory: Bytes) -> int:
    """Resident bytes on huge pages in the mapping that contains `memory`."""
    address, found = int(memory.ctypes.data), 0
    is_ours = False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):  # the first line of a mapping: its addresses
                if is_ours:
                    break
                begin, _, end = name.partition("-")
                is_ours = int(begin, 16) <= address < int(end, 16)
            elif is_ours and name in ("FilePmdMapped:", "ShmemPmdMapped:"):
                found += 1024 * int(rest.split()[0])
    return found


FORMAT: Final = 2
_MAGIC: Final = b"llmbimg" + bytes([FORMAT])
_HEAD: Final = struct.Struct("<8sII")
RESIDENT_OFFSET_BYTES: Final = HUGE_PAGE_BYTES
_SPARSE_PIECE_BYTES: Final = 64 << 10
"""The mapped part is written in pieces of this size, because the page cache then keeps it in small units, so that
looking up a row brings little else into a process's memory."""
_MAX_DESCRIPTION_BYTES: Final = 64 << 20
_PUNCH_HOLE_AND_KEEP_SIZE: Final = 3
_MIN_HUGE_SHARE: Final = 0.9
"""Fraction of huge pages from which on a mapping is as fast as anonymous memory."""


class ImageDamagedError(Exception):
    """What is wrong with an image's file: it is unfinished, or has changed."""


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
    """Size of a file with these parts."""
    return _layout(resident_bytes, mapped_bytes, description_bytes)[3].end


def new_resident(descriptor: int, size_bytes: int) -> Bytes | None:
    """The resident memory of a new image, to be filled in place; None = not on huge pages, so not worth it. The disk
    must have space for it: see `CacheFolder.reserve`. Raises OSError."""
    memory = map_pages(descriptor, RESIDENT_OFFSET_BYTES, whole_pages(size_bytes), writable=True, huge=True)
    memory[0] = 0
    return memory[:size_bytes] if huge_bytes(memory) else None


def write_tables(
    descriptor: int, resident_bytes: int, tables: Sequence[tuple[int, Bytes]], size_bytes: int, num_threads: int
) -> Bytes:
    """The mapped memory, of size_bytes, of a new image after this much resident memory: these arrays at these offsets,
    zeros in between. Raises OSError."""
    part = _layout(resident_bytes, size_bytes, 0)[1]
    os.ftruncate(descriptor, part.offset_bytes)
    os.ftruncate(descriptor, part.end)
    pieces = [
        (offset_bytes + begin, table[begin : begin + CHUNK_BYTES])
        for offset_bytes, table in tables
        for begin in range(0, len(table), CHUNK_BYTES)
    ]

    def write(index: int) -> None:
        offset_bytes, piece = pieces[index]
        _write_in_pieces(descriptor, piece, part.offset_bytes + offset_bytes, _SPARSE_PIECE_BYTES)

    _in_threads(write, len(pieces), num_threads)
    return map_pages(descriptor, part.offset_bytes, part.size_bytes)[:size_bytes]


def write_image(
    descriptor: int, key: str, description: bytes, resident: Bytes, mapped: Bytes, num_threads: int,
    *, has_resident: bool = False, has_mapped: bool = False,
) -> None:  # fmt: skip
    """has_resident: `resident` is the beginning of this file's `new_resident`; has_mapped: `mapped` was returned by
    `write_tables`. Written, but not yet on disk. Raises OSError; the file is then not an image."""
    parts = resident_part, mapped_part, sums_part, description_part = _layout(
        len(resident), len(mapped), len(description)
    )
    if not has_resident:
        os.ftruncate(descriptor, 0)
    os.ftruncate(descriptor, description_part.end)
    sums = np.concatenate((
        _write_memory(None if has_resident else descriptor, resident, resident_part, CHUNK_BYTES, num_threads),
        _write_memory(None if has_mapped else descriptor, mapped, mapped_part, _SPARSE_PIECE_BYTES, num_threads),
    ))  # fmt: skip
    _write_all(descriptor, sums.tobytes(), sums_part.offset_bytes)
    _write_all(descriptor, description, description_part.offset_bytes)
    header = msgspec.msgpack.encode(
        _Header(key, *parts[:3], zlib.crc32(sums.tobytes()), description_part, zlib.crc32(description))
    )
    _write_all(descriptor, _HEAD.pack(_MAGIC, len(header), zlib.crc32(header)) + header, 0)


def _layout(resident_bytes: int, mapped_bytes: int, description_bytes: int) -> tuple[_Part, _Part, _Part, _Part]:
    resident = _Part(RESIDENT_OFFSET_BYTES, whole_pages(resident_bytes))
    mapped = _Part(resident.end, whole_pages(mapped_bytes))
    checksums = _Part(mapped.end, 4 * (num_chunks(resident.size_bytes) + num_chunks(mapped.size_bytes)))
    return resident, mapped, checksums, _Part(checksums.end, description_bytes)


def _write_memory(descriptor: int | None, memory: Bytes, part: _Part, piece_bytes: int, num_threads: int) -> Sums:
    """The checksums of all chunks. descriptor: None = the memory is already in the file."""
    sums = np.zeros(num_chunks(len(memory)), np.uint32)

    def write(index: int) -> None:
        start = index * CHUNK_BYTES
        chunk = memory[start : start + CHUNK_BYTES]
        if len(chunk) % PAGE_BYTES:
            chunk = np.pad(chunk, (0, -len(chunk) % PAGE_BYTES))
        sums[index] = chunk_checksum(chunk)
        if descriptor is not None:
            _write_in_pieces(descriptor, chunk, part.offset_bytes + start, piece_bytes)

    _in_threads(write, len(sums), num_threads)
    return sums


def _write_in_pieces(descriptor: int, data: Bytes, offset_bytes: int, piece_bytes: int) -> None:
    for begin in range(0, len(data), piece_bytes):
        _write_all(descriptor, data[begin : begin + piece_bytes].data, offset_bytes + begin)


def _write_all(descriptor: int, data: bytes | memoryview, offset_bytes: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset_bytes)
        view, offset_bytes = view[written:], offset_bytes + written


class ImageFile:
    """An image that is complete according to its header. Owns the descriptor."""

    def __init__(self, descriptor: int, key: str) -> None:
        """Raises ImageDamagedError; the caller then keeps the descriptor."""
        self.descriptor = descriptor
        self._is_copied = False
        self._header = _read_header(descriptor)
        if self._header.key != key:
            raise ImageDamagedError(f"it is the image of another model ({self._header.key})")

    def read(self, new_memory: Callable[[int], Bytes], num_threads: int) -> tuple[bytes, Bytes, Bytes]:
        """The description and both memories, with verified checksums. The resident memory is mapped if the system keeps
        the file on huge pages, else copied to `new_memory(size_bytes)`; the other is mapped. Reader threads have ended.
        Raises ImageDamagedError, OSError or MemoryError."""
        header = self._header
        description = self._read_part(header.description)
        sums = np.frombuffer(self._read_part(header.checksums), np.uint32)
        if zlib.crc32(description) != header.description_crc or zlib.crc32(sums.tobytes()) != header.checksums_crc:
            raise ImageDamagedError("its description has changed")
        resident = self._map_resident(sums, num_threads)
        if resident is None:
            resident = new_memory(header.resident.size_bytes)
            self._read_memory(header.resident, sums, num_threads, resident)
            self._is_copied = True
        self._read_memory(header.mapped, sums[num_chunks(header.resident.size_bytes) :], num_threads, None)
        mapped = header.mapped
        if not mapped.size_bytes:
            return description, resident, np.empty(0, np.uint8)
        return description, resident, map_pages(self.descriptor, mapped.offset_bytes, mapped.size_bytes)

    def release_resident(self) -> None:
        """Frees the resident part of an in-memory image after it was copied."""
        part = self._header.resident
        if self._is_copied:
            arguments = (ctypes.c_int64(part.offset_bytes), ctypes.c_int64(part.size_bytes))
            ctypes.CDLL(None).fallocate(self.descriptor, _PUNCH_HOLE_AND_KEEP_SIZE, *arguments)

    def _map_resident(self, sums: Sums, num_threads: int) -> Bytes | None:
        """None = most of it is not on huge pages. Raises ImageDamagedError or OSError."""
        part = self._header.resident
        whole = part.size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if not whole:
            return None
        memory = map_pages(self.descriptor, part.offset_bytes, part.size_bytes, huge=True)
        memory[0]  # the first page, and the last whole one
        memory[whole - 1]
        if huge_bytes(memory) < min(whole, 2 * HUGE_PAGE_BYTES):
            return None

        def compare(index: int) -> None:
            start = index * CHUNK_BYTES
            if chunk_checksum(memory[start : start + CHUNK_BYTES]) != sums[index]:
                raise ImageDamagedError(f"the weights at byte {part.offset_bytes + start} have changed")

        _in_threads(compare, num_chunks(part.size_bytes), num_threads)
        return memory if huge_bytes(memory) >= _MIN_HUGE_SHARE * whole else None

    def close(self) -> None:
        """Memories that were read stay."""
        os.close(self.descriptor)

    def _read_part(self, part: _Part) -> bytes:
        data = os.pread(self.descriptor, part.size_bytes, part.offset_bytes)
        if len(data) != part.size_bytes:
            raise ImageDamagedError("it is truncated")
        return data

    def _read_memory(self, part: _Part, sums: Sums, num_threads: int, memory: Bytes | None) -> None:
        """memory: destination of the part; None = it is only verified."""
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
                raise ImageDamagedError("it is truncated")
            if chunk_checksum(chunk) != sums[index]:
                raise ImageDamagedError(f"the weights at byte {part.offset_bytes + start} have changed")

        _in_threads(read, num_chunks(part.size_bytes), num_threads)


def _read_header(descriptor: int) -> _Header:
    size_bytes = os.fstat(descriptor).st_size
    page = os.pread(descriptor, PAGE_BYTES, 0)
    if len(page) < PAGE_BYTES or size_bytes < PAGE_BYTES:
        raise ImageDamagedError("it is truncated")
    magic, length, crc = _HEAD.unpack_from(page)
    if magic != _MAGIC:
        raise ImageDamagedError("it is incomplete, or not an image of this version")
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
        raise ImageDamagedError("its header states parts that are not consecutive")
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
        except BaseException as error:  # re-raised below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, name="weight-image") for _ in range(min(num_threads, count) - 1)]
    for thread in threads:
        thread.start()
    run()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
