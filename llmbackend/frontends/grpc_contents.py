"""Typed contents of an input (InferTensorContents) as the raw bytes that they stand for.

For: grpc_codec, and the worker process that parses large requests. Does not know: requests. Invariant: contents are
those of the datatype or refused. Source: grpc_service.proto and Triton's infer_handler; texts as recorded from Triton
2.51.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from llmbackend.core.errors import invalid_argument
from llmbackend.core.requests.request_bounds import check_strings
from llmbackend.core.tensors import NUMPY_DTYPE

_CONTENTS_FIELD: Final[Mapping[str, str]] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_DATATYPE_OF_FIELD: Final[Mapping[str, str]] = {
    "bool_contents": "BOOL",
    "int_contents": "INT32",
    "int64_contents": "INT64",
    "uint_contents": "UINT32",
    "uint64_contents": "UINT64",
    "fp32_contents": "FP32",
    "fp64_contents": "FP64",
    "bytes_contents": "BYTES",
}


def where(tensor: Any, model_name: str) -> str:
    return f"'{tensor.name}' for model '{model_name}'"


def raw_contents(tensor: Any, model_name: str) -> bytes:
    """Raises TritonError INVALID_ARG for a field that is not the datatype's, or for too many strings."""
    expected = _CONTENTS_FIELD.get(tensor.datatype)
    for field, _ in tensor.contents.ListFields():
        if field.name != expected:
            raise invalid_argument(
                f"unexpected explicit tensor data for input tensor {where(tensor, model_name)} of type "
                f"'{_DATATYPE_OF_FIELD[field.name]}', expected datatype '{tensor.datatype}'"
            )
    if expected is None:
        return b""
    values = getattr(tensor.contents, expected)
    if tensor.datatype == "BYTES":
        check_strings(len(values), f"input '{tensor.name}' has")
        return b"".join(struct.pack("<I", len(value)) + value for value in values)
    wide = NUMPY_DTYPE[_DATATYPE_OF_FIELD[expected]]
    return np.fromiter(values, wide, len(values)).astype(NUMPY_DTYPE[tensor.datatype]).tobytes()
