"""The rows of a GGUF model's tensor: their bytes in the mapped file, and their order in the model.

Does not know: types. Invariant: needs no torch.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .families import ModelTensor


def mapped_rows(tensor: ModelTensor) -> npt.NDArray[np.uint8]:
    """Bytes by row."""
    info = tensor.info
    if len(info.shape) == 1:
        item = info.size_bytes // info.shape[0]
        begin = info.offset + tensor.first_row * item
        return np.memmap(info.file, np.uint8, "r", begin, (1, tensor.num_rows * item))
    row_bytes = info.size_bytes // math.prod(info.shape[:-1])
    begin = info.offset + tensor.first_row * row_bytes
    return np.memmap(info.file, np.uint8, "r", begin, (tensor.num_rows, row_bytes))


def row_order(tensor: ModelTensor) -> npt.NDArray[np.int64]:
    """Which row of the file each of the model's rows is: of each head, the first rows of all pairs come first."""
    rows = np.arange(tensor.num_rows)
    if not tensor.num_heads:
        return rows
    return rows.reshape(tensor.num_heads, -1, 2).transpose(0, 2, 1).reshape(-1)
