"""Pages of a file in this process's memory, on huge pages where the file system keeps files in such.

For: image_file.py. Does not know: what the file holds. Why: processes that map the same pages share them, nothing is
copied, and a CPU reads huge pages about a quarter faster than small ones. Invariant: whether pages are huge is not
assumed but read from /proc/self/smaps, as it depends on the kernel, the file system, and how the file came into memory.
"""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np

from .checksums import Bytes

HUGE_PAGE_BYTES: Final = 2 << 20


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
