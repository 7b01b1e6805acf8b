"""Named tensors inside the host, and Triton's datatypes.

A tensor's `data` has the shape `shape` and the dtype `NUMPY_DTYPE[datatype]`; BYTES tensors are object arrays of
`bytes`. Tensors are never modified. Source: KServe v2 "Tensor Data Types" and Triton's model configuration.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .errors import invalid_argument

NUMPY_DTYPE: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BYTES": np.dtype(np.object_),
}
_LENGTH = struct.Struct("<I")
STRINGS_PER_CALL = 8192
"""Strings per C call, so that other threads can take the GIL in between."""
MAX_COUNT: Final = 2**63 - 1
DATATYPE_OF_DTYPE: dict[np.dtype[Any], str] = {dtype: name for name, dtype in NUMPY_DTYPE.items()}
"""Numpy dtype → datatype. Arrays of unicode or byte strings must be converted to object arrays of bytes first."""

CONFIG_TYPE_OF_DATATYPE: dict[str, str] = {
    name: "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}" for name in NUMPY_DTYPE
}
DATATYPE_OF_CONFIG_TYPE: dict[str, str] = {config: name for name, config in CONFIG_TYPE_OF_DATATYPE.items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """datatype: KServe's name (FP32, BYTES, …). shape: including the batch dimension, if there is one."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]

    @classmethod
    def of(cls, name: str, array: npt.NDArray[Any]) -> Tensor:
        """Raises TritonError INVALID_ARG for a dtype without a Triton datatype."""
        if array.dtype.kind in "US":
            array = np.array([_to_bytes(item) for item in array.ravel()], dtype=np.object_).reshape(array.shape)
        datatype = DATATYPE_OF_DTYPE.get(array.dtype)
        if datatype is None:
            raise invalid_argument(f"tensor '{name}' has numpy dtype {array.dtype}, which has no Triton datatype")
        return cls(name, datatype, tuple(array.shape), array)

    @classmethod
    def text(cls, name: str, *values: str | bytes) -> Tensor:
        """A BYTES tensor of shape [len(values)]."""
        data = np.array([_to_bytes(value) for value in values], np.object_)
        return cls(name, "BYTES", data.shape, data)


@dataclass(frozen=True, slots=True)
class JsonTensor(Tensor):
    """A BYTES tensor whose only element is the JSON text of `value`, which a local backend need not parse."""

    value: Any

    @classmethod
    def of_value(cls, name: str, value: Any, text: bytes) -> JsonTensor:
        tensor = Tensor.text(name, text)
        return cls(name, tensor.datatype, tensor.shape, tensor.data, value)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A client's tensor, neither decoded nor checked: `datatype` may be unknown, `shape` may contain negative numbers.

    The core checks it against the model's configuration, so that errors have Triton's order and texts.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes | memoryview


@dataclass(frozen=True, slots=True)
class SharedRange:
    """`byte_size` bytes, starting at `offset`, in a registered shared memory region."""

    region: str
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class SharedInput:
    """An input in shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    memory_range: SharedRange


def _to_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return str(value).encode()


def element_count(shape: tuple[int, ...]) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count


def shape_text(shape: Iterable[int]) -> str:
    """A shape in the notation of Triton's errors: [2,-1]."""
    return f"[{','.join(map(str, shape))}]"


def check_size(name: str, datatype: str, shape: Iterable[int]) -> None:
    """Raises TritonError INVALID_ARG with Triton's texts if the number of elements or bytes exceeds int64."""
    count = 1
    for dim in shape:
        count *= dim
        if count > MAX_COUNT:
            raise invalid_argument(
                f"shape of input '{name}' causes total element count to exceed maximum size of {MAX_COUNT}"
            )
    if datatype != "BYTES" and datatype in NUMPY_DTYPE and count * NUMPY_DTYPE[datatype].itemsize > MAX_COUNT:
        raise invalid_argument(f"byte size overflow for input '{name}'")


def reshaped(name: str, data: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """`data` with shape `shape`, which has the same number of elements. Raises TritonError INVALID_ARG for a shape that
    numpy does not support (more than 64 dimensions, or a huge dimension next to one of 0)."""
    if data.shape == shape:
        return data
    try:
        return data.reshape(shape)
    except (ValueError, OverflowError) as error:
        raise invalid_argument(f"invalid shape for input '{name}': {error}") from None


def to_wire(tensor: Tensor) -> bytes:
    """The raw little-endian bytes of a tensor; each BYTES element follows its uint32 length."""
    if tensor.datatype != "BYTES":
        return np.ascontiguousarray(tensor.data).tobytes()
    if tensor.data.size == 1:  # fast path: one token's text
        item = _to_bytes(tensor.data.item())
        return struct.pack("<I", len(item)) + item
    flat = tensor.data.reshape(-1)
    return b"".join(_packed(flat[start : start + STRINGS_PER_CALL]) for start in range(0, flat.size, STRINGS_PER_CALL))


def _packed(elements: npt.NDArray[np.object_]) -> bytes:
    parts: list[bytes] = []
    for element in elements:
        item = _to_bytes(element)
        parts.append(_LENGTH.pack(len(item)))
        parts.append(item)
    return b"".join(parts)


def wire_view(tensor: Tensor) -> memoryview:
    """The bytes of `to_wire`; copied only if the datatype is BYTES or the data is not contiguous."""
    if tensor.datatype == "BYTES":
        return memoryview(to_wire(tensor))
    return np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8).data


def split_strings(raw: bytes | memoryview, limit: int) -> tuple[list[bytes], int]:
    """Up to `limit` elements of a serialised BYTES tensor, and the offset after the last one."""
    elements: list[bytes] = []
    offset, end = 0, len(raw)
    while len(elements) < limit and offset + 4 <= end:
        start = offset + 4
        stop = start + _LENGTH.unpack_from(raw, offset)[0]
        if stop > end:
            break
        elements.append(bytes(raw[start:stop]))
        offset = stop
    return elements, offset


def count_strings(raw: bytes | memoryview, offset: int, limit: int) -> tuple[int, int]:
    """The number of complete elements from `offset` on, up to `limit`, and the offset after them."""
    count, end = 0, len(raw)
    while count < limit and offset + 4 <= end:
        stop = offset + 4 + _LENGTH.unpack_from(raw, offset)[0]
        if stop > end:
            break
        offset = stop
        count += 1
    return count, offset


def bytes_tensor(name: str, shape: tuple[int, ...], elements: list[bytes]) -> Tensor:
    """A BYTES tensor of `elements`, as many as `shape` has. Raises TritonError INVALID_ARG like `reshaped`."""
    data = np.empty(len(elements), dtype=np.object_)
    for start in range(0, len(elements), STRINGS_PER_CALL):
        data[start : start + STRINGS_PER_CALL] = elements[start : start + STRINGS_PER_CALL]
    return Tensor(name, "BYTES", shape, reshaped(name, data, shape))


def from_wire(name: str, datatype: str, shape: tuple[int, ...], raw: bytes | memoryview) -> Tensor:
    """The inverse of `to_wire`. Fixed-size data is a view of `raw`. Raises TritonError INVALID_ARG for an unknown
    datatype, and if the size of `raw` does not match `shape`."""
    dtype = NUMPY_DTYPE.get(datatype)
    if dtype is None:
        raise invalid_argument(f"invalid datatype for input {name}")
    count = element_count(shape)
    if datatype != "BYTES":
        if min(shape, default=0) < 0 or len(raw) != count * dtype.itemsize:
            raise invalid_argument(
                f"input byte size mismatch for input '{name}'. Expected {count * dtype.itemsize}, got {len(raw)}"
            )
        data = np.frombuffer(raw, dtype=dtype)
        if not data.flags.aligned:  # part of a body; backends' libraries may require aligned data
            data = data.copy()
        return Tensor(name, datatype, shape, reshaped(name, data, shape))
    elements, offset = split_strings(raw, max(count, 0))
    if min(shape, default=0) < 0 or len(elements) != count or offset != len(raw):
        raise invalid_argument(f"expected {count} string elements for inference input '{name}', got {len(elements)}")
    return bytes_tensor(name, shape, elements)
