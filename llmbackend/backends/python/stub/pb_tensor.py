"""`pb_utils.Tensor`, the datatype helpers of Triton's python backend, and tensors in packets.

Invariants: BYTES data is an object array of `bytes`, even if the model passed str or numpy strings; BF16 data may be
given as ml_dtypes' bfloat16, is stored as uint16, and is returned only through DLPack, because numpy has no such type.
A small tensor is part of the pickled message, a large one is a separate part, copied once; both arrive writable. DLPack
shares memory, except that device memory is copied to the CPU.
Source: Triton python_backend documentation and golden transcript 61; dlpack.h, in which a capsule contains a
DLManagedTensor, whose first member is the DLTensor.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .errors import TritonModelException, text

PackedTensor = tuple[str, str, tuple[int, ...], Any]
"""Name, datatype, shape, and the data: a bytearray, the number of a part, or the elements of a BYTES tensor."""

SMALL_BYTES = 4096

Array = np.ndarray[Any, Any]
_TYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BYTES": np.object_,
}
TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}": bool if name == "BOOL" else numpy_type
    for name, numpy_type in _TYPES.items()
}
_DATATYPE_OF_NUMBER = dict(enumerate((*_TYPES, "BF16"), start=1))
"""TRITONSERVER_DataType of tritonserver.h."""
_NUMBER_OF_DATATYPE = {name: number for number, name in _DATATYPE_OF_NUMBER.items()}
_DATATYPE_OF_DTYPE = {np.dtype(numpy_type): name for name, numpy_type in _TYPES.items()}
_DTYPE_ON_WIRE = {**{name: np.dtype(numpy_type) for name, numpy_type in _TYPES.items()}, "BF16": np.dtype(np.uint16)}
_BFLOAT16 = "bfloat16"


def pack_tensor(name: str, datatype: str, data: np.ndarray[Any, Any], parts: list[Any]) -> PackedTensor:
    """Appends large data to `parts`."""
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
    """Raises KeyError, TypeError, ValueError or IndexError for a malformed tensor."""
    _, datatype, shape, data = packed
    if datatype == "BYTES":
        elements = np.empty(len(data), dtype=np.object_)
        elements[:] = data
        return elements.reshape(shape)
    buffer = parts[data] if isinstance(data, int) else data
    return np.ndarray(shape, dtypes[datatype], buffer=buffer)


class Tensor:
    """A named tensor. Its shape includes the batch dimension if the model batches."""

    __slots__ = ("_data", "_datatype", "_name")

    def __init__(self, name: str | bytes, array: Array) -> None:
        if not isinstance(array, np.ndarray):  # types first, as in Triton's C++ signature
            raise TypeError(f"Tensor {name!r} needs a numpy array, got {type(array).__name__}")
        name = _name(name)
        datatype = _DATATYPE_OF_DTYPE.get(array.dtype) or np_to_triton_dtype(array.dtype)
        if datatype is None:
            raise ValueError(f"tensor '{name}' has numpy dtype {array.dtype}, which has no Triton datatype")
        self._name = name
        self._datatype = datatype
        self._data = _of_bytes(array) if datatype == "BYTES" else array

    @classmethod
    def _of(cls, name: str, datatype: str, data: Array) -> Tensor:
        tensor = cls.__new__(cls)
        tensor._name, tensor._datatype, tensor._data = name, datatype, data
        return tensor

    @classmethod
    def _unpack(cls, packed: PackedTensor, parts: Sequence[Any]) -> Tensor:
        return cls._of(packed[0], packed[1], unpack_data(packed, parts, _DTYPE_ON_WIRE))

    def _pack(self, parts: list[Any]) -> PackedTensor:
        return pack_tensor(self._name, self._datatype, self._data, parts)

    def name(self) -> str:
        return self._name

    def shape(self) -> list[int]:
        return list(self._data.shape)

    def triton_dtype(self) -> int:
        """The number of TRITONSERVER_DataType."""
        return _NUMBER_OF_DATATYPE[self._datatype]

    def as_numpy(self) -> Array:
        """The data; writable as in Triton: a read-only array is copied once. Raises TritonModelException for BF16."""
        if self._datatype == "BF16":
            raise TritonModelException(
                f"tensor '{self._name}' has type BF16, which numpy does not have; use to_dlpack()"
            )
        if not self._data.flags.writeable:
            self._data = self._data.copy()
        return self._data

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule that shares this tensor's memory. Not available for BYTES tensors."""
        return self.__dlpack__()

    def __dlpack__(self, **_options: Any) -> Any:
        if self._datatype == "BYTES":
            raise ValueError(f"tensor '{self._name}' of type BYTES cannot be given as DLPack")
        if not self._data.flags.writeable:
            self._data = self._data.copy()
        is_bfloat16 = self._datatype == "BF16"
        return _to_capsule(self._data.view(np.uint16) if is_bfloat16 else self._data, is_bfloat16)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)

    @staticmethod
    def from_dlpack(name: str | bytes, source: Any) -> Tensor:
        """A tensor that shares memory with `source`: a DLPack capsule, or an object with `__dlpack__`. Device memory is
        copied. Raises TritonModelException for another type."""
        name = _name(name)
        data, is_bfloat16 = _from_capsule(name, source)
        return Tensor._of(name, "BF16", data) if is_bfloat16 else Tensor(name, data)


def _name(value: str | bytes) -> str:
    name = text(value, "Tensor name")
    if not name:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return name


def _of_bytes(array: Array) -> Array:
    if array.dtype == np.object_ and all(type(item) is bytes for item in array.flat):
        return array
    items = [bytes(item) if isinstance(item, bytes) else str(item).encode() for item in array.flat]
    return np.array(items, np.object_).reshape(array.shape)


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError:
        return None
    return ml_dtypes.bfloat16


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """`TYPE_FP32` → numpy.float32. Raises KeyError for an unknown name; BF16 needs ml_dtypes."""
    if triton_type_string == "TYPE_BF16" and (bfloat16 := _bfloat16()) is not None:
        return bfloat16
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def np_to_triton_dtype(np_dtype: Any) -> str | None:
    """numpy dtype → wire datatype (`FP32`); None if there is none."""
    dtype = np.dtype(np_dtype)
    if (datatype := _DATATYPE_OF_DTYPE.get(dtype)) is not None:
        return datatype
    if dtype.kind in "US":
        return "BYTES"
    return "BF16" if dtype.name == _BFLOAT16 else None  # last, because numpy builds the name each time


def numpy_to_triton_type(data_type: Any) -> int | None:
    """numpy dtype → the number of TRITONSERVER_DataType; None if there is none."""
    try:
        datatype = np_to_triton_dtype(data_type)
    except TypeError:  # not a dtype
        return None
    return None if datatype is None else _NUMBER_OF_DATATYPE[datatype]


def triton_to_numpy_type(data_type: int) -> Any:
    """The inverse; None for an unknown number, and for BF16 without ml_dtypes."""
    datatype = _DATATYPE_OF_NUMBER.get(data_type, "")
    return _bfloat16() if datatype == "BF16" else _TYPES.get(datatype)


def serialize_byte_tensor(input_tensor: Array) -> Array | None:
    """The elements in C order, each preceded by its uint32 length, as one object element; None for an empty tensor."""
    if input_tensor.size == 0:
        return None
    flat = _of_bytes(input_tensor.astype(np.object_)).ravel()
    return np.asarray(b"".join(struct.pack("<I", len(item)) + item for item in flat), dtype=np.object_)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """The inverse: an object array [n] of bytes. Raises ValueError if a length exceeds the buffer."""
    return np.array(list(_split(memoryview(encoded_tensor))), np.object_)


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


# --- DLPack with numpy, which can neither express bfloat16 nor read a bare capsule ------------------------------------

_CPU, _CUDA_HOST = 1, 3
_UINT, _BFLOAT = 1, 4


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Exporter:
    """Lets numpy, which accepts only exporters, read a capsule."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)


def _to_capsule(data: Array, is_bfloat16: bool) -> Any:
    """A capsule of `data`; if `is_bfloat16`, `data` contains it as uint16."""
    capsule = data.__dlpack__()
    if is_bfloat16:
        _tensor_of(capsule).code = _BFLOAT
    return capsule


def _from_capsule(name: str, source: Any) -> tuple[Array, bool]:
    """The data, and whether it is bfloat16 (as uint16). Raises ValueError for memory that cannot be copied to the CPU,
    TritonModelException for another type."""
    if hasattr(source, "__dlpack__"):
        if _is_device(source.__dlpack_device__()[0]):
            source = source.cpu() if hasattr(source, "cpu") else _copied_to_cpu(name, source)
        source = source.__dlpack__()
    elif type(source).__name__ != "PyCapsule":
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__` and "
            f"`__dlpack_device__` attributes, got {type(source).__name__}"
        )
    elif _is_device(_tensor_of(source).device_type):
        source = _copied_to_cpu(name, source).__dlpack__()
    tensor = _tensor_of(source)
    is_bfloat16 = tensor.code == _BFLOAT and tensor.bits == 16
    if is_bfloat16:
        tensor.code = _UINT
    return np.from_dlpack(_Exporter(source)), is_bfloat16


def _copied_to_cpu(name: str, source: Any) -> Any:
    """`source` is a capsule or an exporter in a device's memory; the framework that made it is loaded."""
    if (torch := sys.modules.get("torch")) is not None:
        return torch.utils.dlpack.from_dlpack(source).cpu()
    if (cupy := sys.modules.get("cupy")) is not None:
        return cupy.from_dlpack(source).get()
    raise ValueError(f"tensor '{name}' is in the memory of a device: copy it to the CPU first")


def _is_device(device_type: int) -> bool:
    return int(device_type) not in (_CPU, _CUDA_HOST)


def _tensor_of(capsule: Any) -> _DLTensor:
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return _DLTensor.from_address(get_pointer(capsule, b"dltensor"))
