"""Whether glibc keeps freed memory for the next use or returns it to the system; process-wide settings are changed only
here."""

from __future__ import annotations

import ctypes

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


def give_back_freed_memory() -> None:
    """After work that leaves much garbage behind, which would stay in the process. Takes some milliseconds."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
