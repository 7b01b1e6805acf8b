"""How the engine's process uses the CPU's memory and threads.

For: a runner on CPU, and linear layers that pack their weights. Does not know: models. Invariant: process-wide settings
are changed by `keep_freed_memory` alone.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

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


def release_pages(tensor: torch.Tensor) -> None:
    """Gives the whole pages of a tensor that is not read again back to the system.

    For weights mapped from a file: they would stay in memory beside their packed form until all are packed.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if madvise is not None and end > start:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def describe() -> str:
    """The number of threads and the widest instruction set that torch uses, for the log."""
    isa = torch.backends.cpu.get_cpu_capability()
    if torch.cpu._is_amx_tile_supported():
        isa += "+AMX"
    return f"{torch.get_num_threads()} threads, {isa}"
