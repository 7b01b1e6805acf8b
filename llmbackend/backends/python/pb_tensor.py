"""`pb_utils.Tensor` and the datatype helpers of Triton's python backend.

For: model code. Does not know: requests and responses. Invariant: a Tensor wraps exactly one host tensor, made
once, so that BYTES data is an object array of `bytes` whatever the model gave (str, numpy strings).
Source: Triton python_backend documentation and transcript 61.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from llmbackend.core.backend_api import CONFIG_TYPE_OF_DATATYPE, DATATYPE_OF_DTYPE, NUMPY_DTYPE, TritonError
from llmbackend.core.backend_api import Tensor as HostTensor

TRITON_STRING_TO_NUMPY: dict[str, type] = {
    config_type: NUMPY_DTYPE[datatype].type if datatype != "BOOL" else bool
    for datatype, config_type in CONFIG_TYPE_OF_DATATYPE.items()
}

_DATATYPES_BY_NUMBER = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES", "BF16"),
)
_DATATYPE_NUMBERS = {name: number for number, name in enumerate(_DATATYPES_BY_NUMBER, start=1)}
"""TRITONSERVER_DataType of tritonserver.h."""
_DATATYPE_OF_NUMBER = {number: name for name, number in _DATATYPE_NUMBERS.items()}


class Tensor:
    """A named tensor: `Tensor(name, numpy_array)`. Shapes include the batch dimension when the model batches."""

    def __init__(self, name: str, array: npt.NDArray[Any]) -> None:
        if not isinstance(name, str):
            raise TypeError(f"Tensor name must be a str, got {type(name).__name__}")
        if not isinstance(array, np.ndarray):
            raise TypeError(f"Tensor '{name}' needs a numpy array, got {type(array).__name__}")
        try:
            self._host = HostTensor.of(name, _bytes_elements(array))
        except TritonError as error:
            raise ValueError(str(error)) from error

    @classmethod
    def wrap(cls, host: HostTensor) -> Tensor:
        """The model's view of a tensor of the host, without a copy."""
        tensor = cls.__new__(cls)
        tensor._host = host
        return tensor

    @property
    def host(self) -> HostTensor:
        return self._host

    def name(self) -> str:
        return self._host.name

    def shape(self) -> list[int]:
        return list(self._host.shape)

    def triton_dtype(self) -> int:
        """The number of TRITONSERVER_DataType."""
        return _DATATYPE_NUMBERS[self._host.datatype]

    def as_numpy(self) -> npt.NDArray[Any]:
        """The data; writable, as in Triton: a read-only view of the wire's bytes is copied at the first call."""
        if not self._host.data.flags.writeable:
            self._host = dataclasses.replace(self._host, data=self._host.data.copy())
        return self._host.data

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule that shares this tensor's memory. BYTES tensors have none."""
        return self.__dlpack__()

    def __dlpack__(self, **options: Any) -> Any:
        if self._host.datatype == "BYTES":
            raise ValueError(f"tensor '{self.name()}' of type BYTES cannot be given as DLPack")
        return self.as_numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    @staticmethod
    def from_dlpack(name: str, source: Any) -> Tensor:
        """A tensor over `source`: a DLPack capsule, or any object with `__dlpack__` whose memory is in the CPU's."""
        exporter = source if hasattr(source, "__dlpack__") else _CpuCapsule(source)
        return Tensor(name, np.from_dlpack(exporter))


class _CpuCapsule:
    """Lets numpy, which only takes exporters, read a bare capsule."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _bytes_elements(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype != np.object_ or all(isinstance(item, bytes) for item in array.flat):
        return array
    converted = np.empty(array.size, dtype=np.object_)
    converted[:] = [item if isinstance(item, bytes) else str(item).encode() for item in array.flat]
    return converted.reshape(array.shape)


def triton_string_to_numpy(triton_type_string: str) -> type:
    """`TYPE_FP32` → numpy.float32. Raises KeyError for an unknown name, as Triton's does."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def np_to_triton_dtype(np_dtype: Any) -> str | None:
    """numpy dtype → wire datatype (`FP32`), None when Triton has no name for it."""
    dtype = np.dtype(np_dtype)
    return "BYTES" if dtype.kind in "US" else DATATYPE_OF_DTYPE.get(dtype)


def numpy_to_triton_type(data_type: Any) -> int:
    """numpy dtype → the number of TRITONSERVER_DataType. Raises KeyError for a dtype Triton has no name for."""
    return _DATATYPE_NUMBERS[np_to_triton_dtype(data_type) or str(data_type)]


def triton_to_numpy_type(data_type: int) -> type:
    return NUMPY_DTYPE[_DATATYPE_OF_NUMBER[data_type]].type


def serialize_byte_tensor(input_tensor: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """The elements in C order, each behind its uint32 length, as one object element; None for an empty tensor."""
    if input_tensor.size == 0:
        return None
    flat = _bytes_elements(input_tensor.astype(np.object_)).ravel()
    return np.asarray(b"".join(struct.pack("<I", len(item)) + item for item in flat), dtype=np.object_)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> npt.NDArray[Any]:
    """The inverse: an object array [n] of bytes. Raises ValueError when a length reaches beyond the buffer."""
    items = list(_split(memoryview(encoded_tensor)))
    array = np.empty(len(items), dtype=np.object_)
    array[:] = items
    return array


def _split(buffer: memoryview) -> Iterator[bytes]:
    offset = 0
    while offset < len(buffer):
        if len(buffer) - offset < 4:
            raise ValueError(f"incomplete string length at byte {offset} of {len(buffer)}")
        (length,) = struct.unpack_from("<I", buffer, offset)
        offset += 4
        if len(buffer) - offset < length:
            raise ValueError(f"string of {length} bytes at byte {offset} reaches beyond the {len(buffer)} bytes given")
        yield bytes(buffer[offset : offset + length])
        offset += length
