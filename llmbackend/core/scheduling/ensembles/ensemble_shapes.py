"""How a tensor goes from a model that batches to one that does not, and back.

For: runs of ensembles, and the check of an ensemble before it is loaded. Does not know: requests. Invariant: only the
leading batch dimension is added or taken away, the elements stay.
Source: ReshapeTensorDims in Triton's ensemble_scheduler.cc, CompareDimsWithWildcard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.tensors import Tensor, reshaped


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """What an ensemble has to know of a composing model."""

    is_batching: bool
    is_decoupled: bool
    input_dims: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, config: ModelConfig) -> ModelShapes:
        dims = {tensor.name: tuple(tensor.dims) for tensor in config.input}
        return cls(config.max_batch_size > 0, config.model_transaction_policy.decoupled, dims)


def dims_agree(some: Sequence[int], others: Sequence[int]) -> bool:
    """Whether both can be the same shape; -1 stands for any size."""
    return len(some) == len(others) and all(
        one == other or -1 in (one, other) for one, other in zip(some, others, strict=True)
    )


def passed_on(tensor: Tensor, name: str, batch_size: int, dims: Sequence[int], is_batching: bool) -> Tensor:
    """`tensor`, made with `batch_size` (0 = by a model that does not batch), as the tensor `name` of a model that has
    `dims` for it."""
    shape = tensor.shape
    if is_batching and not batch_size and dims_agree(dims, shape):
        shape = (1, *shape)
    elif not is_batching and batch_size == 1 and not dims_agree(dims, shape):
        shape = shape[1:]
    data = tensor.data if shape == tensor.shape else reshaped(name, tensor.data, shape)
    return Tensor(name, tensor.datatype, shape, data)
