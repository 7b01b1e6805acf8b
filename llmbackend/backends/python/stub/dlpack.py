"""DLPack with numpy, which can neither name bfloat16 nor read a bare capsule.

For: Tensor. Does not know: Triton. Invariant: memory is shared, never copied, except that of a device, which is copied
to the CPU's. How: a bfloat16 tensor passes through numpy as uint16; its capsule is relabelled before numpy reads it, or
after numpy made it. Source: dlpack.h; a capsule holds a DLManagedTensor, whose first member is the DLTensor.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .errors import TritonModelException

CPU, CUDA_HOST = 1, 3
_UINT, _BFLOAT = 1, 4


class _Tensor(ctypes.Structure):
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
    """Lets numpy, which only takes exporters, read a capsule."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0)


def to_capsule(data: np.ndarray[Any, Any], is_bfloat16: bool) -> Any:
    """A capsule over `data`, which holds bfloat16 as uint16."""
    capsule = data.__dlpack__()
    if is_bfloat16:
        _tensor_of(capsule).code = _BFLOAT
    return capsule


def from_capsule(name: str, source: Any) -> tuple[np.ndarray[Any, Any], bool]:
    """The data of a capsule or of an object with `__dlpack__`, and whether it is bfloat16 (then it is uint16 here).

    Raises ValueError for memory that can not be brought to the CPU, TritonModelException for what is neither.
    """
    if hasattr(source, "__dlpack__"):
        if _is_device(source.__dlpack_device__()[0]) and hasattr(source, "cpu"):
            source = source.cpu()
        source = source.__dlpack__()
    elif type(source).__name__ != "PyCapsule":
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__` and "
            f"`__dlpack_device__` attributes, got {type(source).__name__}"
        )
    tensor = _tensor_of(source)
    if _is_device(tensor.device_type):
        raise ValueError(f"tensor '{name}' is in the memory of a device: copy it to the CPU first")
    is_bfloat16 = tensor.code == _BFLOAT and tensor.bits == 16
    if is_bfloat16:
        tensor.code = _UINT
    return np.from_dlpack(_Exporter(source)), is_bfloat16


def _is_device(device_type: int) -> bool:
    return int(device_type) not in (CPU, CUDA_HOST)


def _tensor_of(capsule: Any) -> _Tensor:
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return _Tensor.from_address(get_pointer(capsule, b"dltensor"))
