"""The rows of a GGUF model's tensor: their bytes in the mapped file, and their order in the model.

Independent of tensor types and of torch.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .families import ModelTensor

Bytes = npt.NDArray[np.uint8]


def mapped_rows(tensor: ModelTensor) -> Bytes:
    """Bytes by row, in the file's order."""
    info = tensor.info
    if len(info.shape) == 1:
        item = info.size_bytes // info.shape[0]
        begin = info.offset + tensor.first_row * item
        return np.memmap(info.file, np.uint8, "r", begin, (1, tensor.num_rows * item))
    row_bytes = info.size_bytes // math.prod(info.shape[:-1])
    begin = info.offset + tensor.first_row * row_bytes
    return np.memmap(info.file, np.uint8, "r", begin, (tensor.num_rows, row_bytes))


def ordered_rows(tensor: ModelTensor) -> Bytes:
    """Bytes by row of a matrix, in the model's order: `blocks_fit`."""
    rows = mapped_rows(tensor)
    if tensor.rows is not None:
        rows = rows[tensor.rows.of(len(rows))]
    if (order := _order_of_blocks(tensor)) is not None:
        rows = rows.reshape(len(rows), len(order), -1)[:, order].reshape(len(rows), -1)
    return np.ascontiguousarray(rows)


def blocks_fit(tensor: ModelTensor) -> bool:
    """Whether the blocks of a row in the file are whole blocks of the model's row, possibly reordered."""
    if tensor.is_transposed:
        return False
    return tensor.columns is None or _order_of_blocks(tensor) is not None


def _order_of_blocks(tensor: ModelTensor) -> npt.NDArray[np.int64] | None:
    block, width = tensor.info.type.block, tensor.info.shape[-1]
    if tensor.columns is None:
        return None
    columns = tensor.columns.of(width).reshape(-1, block)
    fits = (columns[:, :1] + np.arange(block) == columns).all() and not (columns[:, 0] % block).any()
    return columns[:, 0] // block if fits else None
