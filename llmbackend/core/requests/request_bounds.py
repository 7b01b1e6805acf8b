"""Bounds of a request's tensors, and their shapes with `reshape`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Final

from tritonclient.grpc.model_config_pb2 import ModelConfig

from ..errors import invalid_argument, request_tag
from ..messages import InferenceRequest
from ..tensors import RawTensor, Tensor, element_count

MAX_ID_CHARACTERS: Final = 4096
"""Every response repeats the id of its request."""
MAX_TENSORS: Final = 4096
MAX_PARAMETERS: Final = 4096
MAX_DIMENSIONS: Final = 1024
"""numpy's own limit is 64; a shape up to this one gets Triton's text for a shape that does not match."""
MAX_STRINGS: Final = 1 << 20
"""Elements of all BYTES inputs together. Each becomes a Python object: a million of them take 50 MiB and 0.2 s."""


def check_request(request: InferenceRequest) -> None:
    """Raises TritonError INVALID_ARG for a request beyond one of the bounds."""
    check_id(request.id)
    tag = request_tag(request.id)
    check_count("inputs", request.inputs, MAX_TENSORS, tag)
    check_count("requested outputs", request.requested_outputs, MAX_TENSORS, tag)
    check_count("parameters", request.parameters, MAX_PARAMETERS, tag)
    for tensor in request.inputs:
        check_dimensions(tensor.name, tensor.shape, tag)
    check_strings(string_count_bound(request.inputs), f"{tag}the inputs with datatype BYTES have")


def check_id(request_id: str) -> None:
    """Raises TritonError INVALID_ARG, without the id in its text."""
    if len(request_id) > MAX_ID_CHARACTERS:
        raise invalid_argument(
            f"the request's id has {len(request_id)} characters, at most {MAX_ID_CHARACTERS} are accepted"
        )


def check_count(what: str, items: Sized, limit: int, tag: str = "") -> None:
    """Raises TritonError INVALID_ARG for more than `limit` items."""
    if len(items) > limit:
        raise invalid_argument(f"{tag}the request has {len(items)} {what}, at most {limit} are accepted")


def check_dimensions(name: str, shape: Sized, tag: str = "") -> None:
    """Raises TritonError INVALID_ARG for a shape of too many dimensions."""
    if len(shape) > MAX_DIMENSIONS:
        raise invalid_argument(
            f"{tag}the shape of input '{name[:MAX_ID_CHARACTERS]}' has {len(shape)} dimensions, at most "
            f"{MAX_DIMENSIONS} are accepted"
        )


def check_strings(count: int, subject: str) -> None:
    """Raises TritonError INVALID_ARG for more than MAX_STRINGS. subject: begins the error's text."""
    if count > MAX_STRINGS:
        raise invalid_argument(f"{subject} {count} elements, at most {MAX_STRINGS} are accepted in a request")


def string_count_bound(inputs: Iterable[Tensor | RawTensor]) -> int:
    """An upper bound of the elements of all BYTES inputs, by shape and size (each takes 4 bytes on the wire). The data
    is not read."""
    return sum(_elements(tensor) for tensor in inputs if tensor.datatype == "BYTES")


def _elements(tensor: Tensor | RawTensor) -> int:
    if isinstance(tensor, Tensor):
        return tensor.data.size
    return min(max(element_count(tensor.shape), 0), len(tensor.raw) // 4)


VARIABLE = -1


class Reshape:
    """Gives tensors with dimensions `before` the dimensions `after`, both without the batch dimension."""

    def __init__(self, before: Sequence[int], after: Sequence[int], batches: bool) -> None:
        self._before = tuple(before)
        self._after = tuple(after)
        self._batches = batches

    def apply(self, tensor: Tensor) -> Tensor:
        """Raises ValueError for a tensor that does not have the dimensions `before`."""
        batch, shape = (tensor.shape[:1], tensor.shape[1:]) if self._batches else ((), tensor.shape)
        if len(shape) != len(self._before):
            raise ValueError(f"expected {len(self._before)} dimensions, got {len(shape)}")
        variable = [value for dim, value in zip(self._before, shape, strict=True) if dim == VARIABLE]
        values = iter(variable)
        after = (*batch, *(next(values) if dim == VARIABLE else dim for dim in self._after))
        return Tensor(tensor.name, tensor.datatype, after, tensor.data.reshape(after))


def input_reshapes(config: ModelConfig) -> dict[str, Reshape]:
    """By input: from the client's shape to the model's."""
    batches = config.max_batch_size > 0
    return {
        item.name: Reshape(item.dims, item.reshape.shape, batches) for item in config.input if item.HasField("reshape")
    }


def output_reshapes(config: ModelConfig) -> dict[str, Reshape]:
    """By output: from the model's shape to the client's."""
    batches = config.max_batch_size > 0
    return {
        item.name: Reshape(item.reshape.shape, item.dims, batches) for item in config.output if item.HasField("reshape")
    }


def reshaped_inputs(reshapes: Mapping[str, Reshape], inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: reshapes[name].apply(tensor) if name in reshapes else tensor for name, tensor in inputs.items()}


def reshape_fault(dims: Sequence[int], shape: Sequence[int], batches: bool) -> str:
    """Why `dims` cannot be seen as `shape`; "" = they can."""
    if not shape and not batches:
        return "cannot have empty reshape for non-batching model as scalar tensors are not supported"
    counts = list(shape).count(VARIABLE), list(dims).count(VARIABLE)
    if all(counts) and counts[0] != counts[1]:
        return "has different number of variable-size dimensions for dims and reshape"
    if _sizes(shape) != _sizes(dims):
        return "has different size for dims and reshape"
    return ""


def _sizes(dims: Sequence[int]) -> list[int]:
    """The elements before, between and after the dimensions of variable size: [8, 6] for [2, 4, -1, 6]."""
    sizes = [1]
    for dim in dims:
        if dim == VARIABLE:
            sizes.append(1)
        else:
            sizes[-1] *= dim
    return sizes
