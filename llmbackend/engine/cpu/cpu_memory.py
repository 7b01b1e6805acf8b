"""How the engine's process uses the CPU's memory and threads.

For: a runner on CPU, and linear layers that pack their weights. Does not know: models. Invariant: process-wide settings
are changed by `keep_freed_memory` alone.
"""

from __future__ import annotations

import ctypes
import mmap

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MAX_INT = 2**31 - 1


def keep_freed_memory() -> None:
    """Tells glibc to keep large freed buffers for the next allocation; does nothing where there is no mallopt.

    By default a buffer of more than 32 MiB, such as a step's logits, goes back to the kernel when it is freed, and the
    next one costs a page fault per 4 KiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, _MAX_INT)


def release_pages(address: int, size_bytes: int) -> None:
    """Gives the whole pages of memory that is not read again back to the system.

    For weights mapped from a file: they would stay in memory beside their packed form until all are packed.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if madvise is not None and end > start:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
