"""Converts element types and tensors between OpenVINO and the host.

Tensors are copied: OpenVINO can share memory only with writable arrays, and reuses the memory of outputs.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from tritonclient.grpc.model_config_pb2 import DataType

from ..array_backend import Array
from .runtime import openvino

_TYPES = {
    "BOOL": "boolean", "UINT8": "u8", "UINT16": "u16", "UINT32": "u32", "UINT64": "u64", "INT8": "i8", "INT16": "i16",
    "INT32": "i32", "INT64": "i64", "FP16": "f16", "BF16": "bf16", "FP32": "f32", "FP64": "f64", "STRING": "string",
}  # fmt: skip
_CONFIG_TYPES = {name: f"TYPE_{config}" for config, name in _TYPES.items()}


def element_type(data_type: int) -> Any:
    """The element type for a data type of a model configuration."""
    return getattr(openvino.Type, _TYPES[DataType.Name(data_type).removeprefix("TYPE_")])


def data_type(element: Any) -> Any:
    """The configuration's data type. Raises ValueError for an element type without one."""
    name = element.get_type_name()
    if name not in _CONFIG_TYPES:
        raise ValueError(f"is of element type {name}, which has no Triton datatype")
    return DataType.Value(_CONFIG_TYPES[name])


def fill(tensor: Any, array: Array) -> None:
    """Gives an input tensor the shape and content of `array`. Raises OpenVINO's error for an unacceptable shape."""
    tensor.shape = array.shape
    if array.dtype == np.object_:
        tensor.bytes_data = array.tolist()
    elif array.dtype == ml_dtypes.bfloat16:
        tensor.data.view(np.uint16)[...] = array.view(np.uint16)
    else:
        tensor.data[...] = array


def to_array(tensor: Any) -> Array:
    """A scalar becomes an array of one element."""
    name = tensor.element_type.get_type_name()
    if name == "string":
        array = np.array(tensor.bytes_data, np.object_)
    else:
        array = np.array(tensor.data.view(ml_dtypes.bfloat16) if name == "bf16" else tensor.data)
    return array if array.ndim else array.reshape(1)
