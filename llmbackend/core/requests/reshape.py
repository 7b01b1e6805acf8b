"""`reshape` of inputs and outputs: the shape that a model sees, where it differs from the one that clients see.

For: RequestValidator (inputs, after their checks), ResponseTransforms (outputs) and model_config_rules. Does not
know: requests. Invariants: a tensor keeps its elements and their order; dimensions of variable size keep their values,
in order. Source: ModelTensorReshape in Triton's model configuration, ValidateIOShape, PrepareForInference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.tensors import Tensor

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
    """Why `dims` can not be seen as `shape`; "" = they can."""
    if not shape and not batches:
        return "cannot have empty reshape for non-batching model as scalar tensors are not supported"
    counts = list(shape).count(VARIABLE), list(dims).count(VARIABLE)
    if all(counts) and counts[0] != counts[1]:
        return "has different number of variable-size dimensions for dims and reshape"
    if _sizes(shape) != _sizes(dims):
        return "has different size for dims and reshape"
    return ""


def _sizes(dims: Sequence[int]) -> list[int]:
    """The elements before, between and behind the dimensions of variable size: [8, 6] for [2, 4, -1, 6]."""
    sizes = [1]
    for dim in dims:
        if dim == VARIABLE:
            sizes.append(1)
        else:
            sizes[-1] *= dim
    return sizes
