"""A tensor as it goes through a packet.

For: both ends. Does not know: Tensor classes. Invariants: a small tensor is part of the pickled message, a large one is
a part of its own, copied into the packet once; both come out writable. BF16, which numpy does not know, travels as
UINT16 where the reader has no better dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PackedTensor = tuple[str, str, tuple[int, ...], Any]
"""Name, datatype, shape, and the data: a bytearray, the number of a part, or the elements of a BYTES tensor."""

SMALL_BYTES = 4096


def pack_tensor(name: str, datatype: str, data: np.ndarray[Any, Any], parts: list[Any]) -> PackedTensor:
    """Appends the data to `parts` where it is large."""
    shape = data.shape
    if datatype == "BYTES":
        return name, datatype, shape, data.ravel().tolist()
    if data.nbytes <= SMALL_BYTES:
        return name, datatype, shape, bytearray(data.tobytes())
    parts.append(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    return name, datatype, shape, len(parts) - 1


def unpack_data(
    packed: PackedTensor, parts: Sequence[Any], dtypes: Mapping[str, np.dtype[Any]]
) -> np.ndarray[Any, Any]:
    """Raises KeyError, TypeError, ValueError or IndexError for what is no tensor."""
    _, datatype, shape, data = packed
    if datatype == "BYTES":
        elements = np.empty(len(data), dtype=np.object_)
        elements[:] = data
        return elements.reshape(shape)
    buffer = parts[data] if isinstance(data, int) else data
    return np.ndarray(shape, dtypes[datatype], buffer=buffer)
