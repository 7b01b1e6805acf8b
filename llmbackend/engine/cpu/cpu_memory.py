"""Pages of files in the engine's process: given back where they are not read again, or have become many.

For: a runner on CPU, and linear layers that pack their weights. Does not know: models. Invariant: what is given back is
still in the file.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

import numpy as np
import numpy.typing as npt


def release_pages(address: int, size_bytes: int) -> None:
    """Gives the whole pages of memory that is not read again back to the system.

    For weights mapped from a file: they would stay in memory beside their packed form until all are packed.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if madvise is not None and end > start:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


class FilePages:
    """A file's pages in the memory of this process, given back when they have become many.

    They stay in the system's cache, from where they come back in a microsecond; but each row that is read brings its
    neighbours, so that an embedding would be in the process as a whole after some thousand different tokens.
    """

    LIMIT_BYTES: Final = 16 << 20
    _ROWS_PER_CHECK: Final = 64

    def __init__(self, pages: npt.NDArray[np.uint8]) -> None:
        """pages: of a file, never written to"""
        self._pages = pages
        self._rows_left = self._ROWS_PER_CHECK
        self._others_bytes = _file_bytes()
        """Of other files, such as libraries."""

    def read(self, num_rows: int) -> None:
        """So many more rows are read."""
        self._rows_left -= num_rows
        if self._rows_left > 0:
            return
        self._rows_left = self._ROWS_PER_CHECK
        if _file_bytes() - self._others_bytes > self.LIMIT_BYTES:
            release_pages(int(self._pages.ctypes.data), len(self._pages))
            self._others_bytes = _file_bytes()


def _file_bytes() -> int:
    """Memory of this process that is files' pages; 0 where it cannot be known."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[2]) * mmap.PAGESIZE
    except OSError:
        return 0
