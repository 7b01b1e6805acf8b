"""Ragged batches, for backends that join requests: `allow_ragged_batch`, `batch_input` and `batch_output`.

For: any backend; the host only lets requests with unequal ragged inputs share a batch. Does not know: models,
frameworks. Invariants: all results follow the order of `requests`; requests are not changed.
Source: BackendInputCollector and BackendOutputResponder of Triton's backend utilities, and the comments in
model_config.proto.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc.model_config_pb2 import DataType

from llmbackend.core.backend_api import (
    DATATYPE_OF_CONFIG_TYPE,
    NUMPY_DTYPE,
    ModelConfig,
    Request,
    Tensor,
    element_count,
    internal,
)

Array = npt.NDArray[Any]


class RaggedBatch:
    """The ragged inputs and outputs of one model, read once from its configuration."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._inputs = [tensor.name for tensor in config.input if tensor.allow_ragged_batch]
        self.outputs = frozenset(name for item in config.batch_output for name in item.target_name)
        """The outputs that `split` cuts; the others have rows."""

    def inputs(self, requests: Sequence[Request]) -> dict[str, Array]:
        """The ragged inputs that these requests have, and the batch inputs, by name."""
        names = [name for name in self._inputs if name in requests[0].inputs]
        joined = [ragged_input(requests, name) for name in names]
        return {tensor.name: tensor.data for tensor in (*joined, *batch_inputs(self._config, requests))}

    def split(self, name: str, joined: Array, requests: Sequence[Request]) -> list[Array]:
        return scattered_output(self._config, name, joined, requests)


def batch_input_names(config: ModelConfig) -> list[str]:
    """Inputs of the model that no request has."""
    return [name for item in config.batch_input for name in item.target_name]


def ragged_input(requests: Sequence[Request], name: str) -> Tensor:
    """An `allow_ragged_batch` input of the whole batch: all elements in one dimension, request after request."""
    parts = [request.inputs[name] for request in requests]
    joined = np.concatenate([part.data.reshape(-1) for part in parts])
    return Tensor(name, parts[0].datatype, joined.shape, joined)


def batch_inputs(config: ModelConfig, requests: Sequence[Request]) -> list[Tensor]:
    """The tensors of `batch_input`, which the model reads beside its ragged inputs."""
    return [
        Tensor.of(target, _MAKERS[item.Kind.Name(item.kind)](requests, item.source_input[0]).astype(_dtype(item)))
        for item in config.batch_input
        for target in item.target_name
    ]


def scattered_output(config: ModelConfig, name: str, joined: Array, requests: Sequence[Request]) -> list[Array]:
    """An output of `batch_output` cut into one array per request: variable dimensions are those of the source input.

    Raises TritonError INTERNAL when the model gave another number of elements than the requests ask for.
    """
    item = next(item for item in config.batch_output if name in item.target_name)
    dims = next(output.dims for output in config.output if output.name == name)
    pattern = [-1, *dims] if config.max_batch_size else list(dims)
    shapes = [_filled(pattern, request.inputs[item.source_input[0]].shape, name) for request in requests]
    sizes = [element_count(shape) for shape in shapes]
    flat = joined.reshape(-1)
    if sum(sizes) != flat.size:
        raise internal(f"batch output '{name}' has {flat.size} elements, expected {sum(sizes)}")
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _filled(pattern: Sequence[int], source: Sequence[int], name: str) -> tuple[int, ...]:
    if any(dim == -1 and index >= len(source) for index, dim in enumerate(pattern)):
        raise internal(f"batch output '{name}' has more dimensions than its source input")
    return tuple(source[index] if dim == -1 else dim for index, dim in enumerate(pattern))


def _dtype(item: Any) -> np.dtype[Any]:
    return NUMPY_DTYPE[DATATYPE_OF_CONFIG_TYPE[DataType.Name(item.data_type)]]


def _counts(requests: Sequence[Request], source: str) -> list[int]:
    return [element_count(request.inputs[source].shape) for request in requests]


def _element_count(requests: Sequence[Request], source: str) -> Array:
    return np.array(_counts(requests, source))


def _accumulated(requests: Sequence[Request], source: str) -> Array:
    return np.cumsum(_counts(requests, source))


def _accumulated_with_zero(requests: Sequence[Request], source: str) -> Array:
    return np.cumsum([0, *_counts(requests, source)])


def _max_count_as_shape(requests: Sequence[Request], source: str) -> Array:
    """The shape is the information; the elements mean nothing."""
    return np.zeros(max(_counts(requests, source)))


def _item_shape(requests: Sequence[Request], source: str) -> Array:
    """One row per item of the batch: its shape without the batch dimension."""
    shapes = [request.inputs[source].shape for request in requests]
    return np.array([shape[1:] for shape in shapes for _ in range(shape[0])]).reshape(-1, len(shapes[0]) - 1)


def _item_shape_flattened(requests: Sequence[Request], source: str) -> Array:
    return _item_shape(requests, source).reshape(-1)


_MAKERS: dict[str, Callable[[Sequence[Request], str], Array]] = {
    "BATCH_ELEMENT_COUNT": _element_count,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": _accumulated,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": _accumulated_with_zero,
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": _max_count_as_shape,
    "BATCH_ITEM_SHAPE": _item_shape,
    "BATCH_ITEM_SHAPE_FLATTEN": _item_shape_flattened,
}
