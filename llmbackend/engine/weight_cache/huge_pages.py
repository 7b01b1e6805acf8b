"""Pages of a file in this process's memory, on huge pages where the file system keeps files in such.

For: image_file.py. Does not know: what the file holds. Why: processes that map the same pages share them, nothing is
copied, and a CPU reads huge pages about a quarter faster than small ones. Invariant: whether pages are huge is not
assumed but read from /proc/self/smaps, as it depends on the kernel, the file system, and how the file came into memory.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Final

import numpy as np

from .checksums import Bytes

HUGE_PAGE_BYTES: Final = 2 << 20
_PREFAULT_BYTES: Final = 8 << 20
_MADV_POPULATE_WRITE: Final = 23


def map_pages(descriptor: int, offset_bytes: int, size_bytes: int, *, writable: bool = False) -> Bytes:
    """A part of the file, shared with whoever maps it. Huge pages begin at its multiples of 2 MiB. Raises OSError."""
    rights = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    pages = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, rights, offset=offset_bytes)
    return np.frombuffer(pages, np.uint8)


def prefer_huge_pages(memory: Bytes) -> None:
    """For the whole of what `map_pages` gave."""
    pages = memory.base
    if isinstance(pages, memoryview):
        pages = pages.obj
    if isinstance(pages, mmap.mmap) and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)


class Prefault:
    """Has the system give a writable mapping its pages, on a thread, until `stop`: their clearing takes longer than
    anything else that is done to them, above all in virtual machines."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The thread has ended; the pages that it had come to stay in the file."""
        self._is_stopped = True
        self._thread.join()

    def _run(self) -> None:
        madvise = ctypes.CDLL(None).madvise  # unlike mmap's own method it lets other threads run
        address = int(self._memory.ctypes.data)
        for start in range(0, len(self._memory), _PREFAULT_BYTES):
            size_bytes = min(_PREFAULT_BYTES, len(self._memory) - start)
            arguments = (ctypes.c_void_p(address + start), ctypes.c_size_t(size_bytes), _MADV_POPULATE_WRITE)
            if self._is_stopped or madvise(*arguments):
                return


def huge_bytes(memory: Bytes) -> int:
    """Bytes of the mapping that `memory` lies in that were touched and are on huge pages."""
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
