"""Tensors from JSON values and back.

For: /infer, /generate and /generate_stream. Does not know: requests, models. Invariant: an element is accepted only
as the JSON type of its datatype; numbers too wide for a narrower integer type wrap and wide floats become infinite,
as in Triton's casts.
Source: KServe v2 "Tensor Data"; error texts as recorded from Triton 2.51.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llmbackend.core.errors import TritonError, internal, invalid_argument
from llmbackend.core.requests.request_bounds import check_strings
from llmbackend.core.tensors import NUMPY_DTYPE, Tensor, element_count, reshaped

from ..http.json_reader import parsing

_BINARY_ONLY: Final = frozenset({"FP16", "BF16"})


def tensor_from_json(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> Tensor:
    """The tensor of `shape` from a nested or flat JSON array (row-major) or, for one element, a bare scalar.

    Raises TritonError INTERNAL for an element of the wrong JSON type, INVALID_ARG for a wrong number of elements, FP16
    and BF16.
    """
    if datatype == "BYTES":
        array: npt.NDArray[Any] = _bytes_array(name, flatten(data), shape)
    else:
        array = _number_array(name, datatype, flatten(data), shape)
    return Tensor(name, datatype, shape, reshaped(name, array, shape))


def flatten(data: Any) -> list[Any]:
    """The leaves of nested lists in row-major order; a bare value is one leaf."""
    leaves = data if isinstance(data, list) else [data]
    while list in set(map(type, leaves)):
        leaves = [leaf for item in leaves for leaf in (item if type(item) is list else (item,))]
    return leaves


def _number_array(name: str, datatype: str, leaves: list[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if datatype in _BINARY_ONLY and leaves:
        raise invalid_argument(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    dtype = NUMPY_DTYPE[datatype]
    with parsing("data"):
        wide = _wide_array(dtype, leaves)
        _check_count(len(leaves), shape)
    with np.errstate(over="ignore"):
        return wide.astype(dtype)


def _wide_array(dtype: np.dtype[Any], leaves: list[Any]) -> npt.NDArray[Any]:
    """The leaves in the widest type of the dtype's kind: the type RapidJSON's accessors would give."""
    types = set(map(type, leaves))
    if dtype.kind == "b":
        return np.array(_require(leaves, types <= {bool}, "non-boolean as boolean"), dtype=np.bool_)
    if dtype.kind == "u":
        fits = types <= {int} and (not leaves or (min(leaves) >= 0 and max(leaves) < 1 << 64))
        return np.array(_require(leaves, fits, "non-unsigned-integer as unsigned-integer"), dtype=np.uint64)
    if dtype.kind == "i":
        fits = types <= {int} and (not leaves or (min(leaves) >= -(1 << 63) and max(leaves) < 1 << 63))
        return np.array(_require(leaves, fits, "non-signed-integer as signed-integer"), dtype=np.int64)
    try:
        return np.array(_require(leaves, types <= {int, float}, "non-number as double"), dtype=np.float64)
    except OverflowError:  # an integer beyond the range of doubles
        raise internal("attempt to access JSON non-number as double") from None


def _require(leaves: list[Any], right: bool, mismatch: str) -> list[Any]:
    if not right:
        raise internal(f"attempt to access JSON {mismatch}")
    return leaves


def _bytes_array(name: str, leaves: list[Any], shape: tuple[int, ...]) -> npt.NDArray[np.object_]:
    if not set(map(type, leaves)) <= {str}:
        raise internal("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
    with parsing("data"):
        _check_count(len(leaves), shape)
    check_strings(len(leaves), f"input '{name}' has")
    data = np.empty(len(leaves), dtype=np.object_)
    data[:] = [leaf.encode() for leaf in leaves]
    return data


def _check_count(count: int, shape: tuple[int, ...]) -> None:
    if count != element_count(shape):
        raise invalid_argument("Shape does not match true shape of 'data' field")


def json_from_tensor(tensor: Tensor) -> list[Any]:
    """The elements as one flat JSON array.

    Raises TritonError INVALID_ARG for FP16 and BF16, INTERNAL for a BYTES element that is not UTF-8 text.
    """
    if tensor.datatype in _BINARY_ONLY:
        raise invalid_argument(
            f"sending {tensor.datatype} data via JSON is not supported. "
            f"Please use the binary data format for output {tensor.name}"
        )
    if tensor.datatype == "BYTES":
        return [_text(tensor.name, element) for element in tensor.data.ravel()]
    if tensor.datatype == "FP32":  # Triton writes the shortest text of the double, not of the float
        return list(tensor.data.astype(np.float64).ravel().tolist())
    return list(tensor.data.ravel().tolist())


def _text(name: str, element: Any) -> str:
    if isinstance(element, str):
        return element
    try:
        return str(element, "utf-8")
    except UnicodeDecodeError:
        raise _not_text(name) from None


def _not_text(name: str) -> TritonError:
    return internal(
        f"output '{name}' is not valid UTF-8 and can not be sent as JSON. Please use the binary data format"
    )


def has_nan_or_inf(tensors: Sequence[Tensor]) -> bool:
    """Whether some element is NaN or infinite, for which `dump` needs to be told."""
    return any(tensor.data.dtype.kind == "f" and not np.isfinite(tensor.data).all() for tensor in tensors)
