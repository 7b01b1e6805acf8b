"""How the engine's process uses the CPU's memory and threads.

For: a runner on CPU. Does not know: models. Invariant: changes process-wide settings only, and only when asked.
"""

from __future__ import annotations

import ctypes

import torch

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> None:
    """Tells glibc to keep large freed buffers for the next allocation; does nothing where there is no mallopt.

    By default a buffer of more than 32 MiB, such as a step's logits, goes back to the kernel when it is freed, and the
    next one costs a page fault per 4 KiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)


def describe() -> str:
    """Threads and the widest instruction set that torch uses."""
    isa = torch.backends.cpu.get_cpu_capability()
    if torch.cpu._is_amx_tile_supported():
        isa += "+AMX"
    return f"{torch.get_num_threads()} threads, {isa}"
