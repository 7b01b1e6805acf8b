"""How much of a tensor each program of each kernel reads, counted by Triton's interpreter.

Used by tests and tables that say how work is shared by programs, where no device can say how long it takes. Independent
of which kernels. A number that is read twice counts twice, even if a device would have it in a cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

Reads = Counter[tuple[str, tuple[int, ...]]]
"""Elements that were read, by kernel and program."""


@contextmanager
def counted_reads(tensor: torch.Tensor) -> Iterator[Reads]:
    """Of the launches inside."""
    reads: Reads = Counter()
    begin = tensor.data_ptr()
    end = begin + tensor.numel() * tensor.element_size()
    running = ""
    load, run = interpreter.InterpreterBuilder.create_masked_load, interpreter.InterpretedFunction.run

    def counted_load(self: Any, ptrs: Any, mask: Any, *options: Any) -> Any:
        inside = (ptrs.data >= begin) & (ptrs.data < end) & mask.data
        if count := int(np.count_nonzero(inside)):
            reads[running, tuple(self.grid_idx)] += count
        return load(self, ptrs, mask, *options)

    def named_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal running
        running = self.fn.__name__
        return run(self, *args, **kwargs)

    with (
        mock.patch.object(interpreter.InterpreterBuilder, "create_masked_load", counted_load),
        mock.patch.object(interpreter.InterpretedFunction, "run", named_run),
    ):
        yield reads
