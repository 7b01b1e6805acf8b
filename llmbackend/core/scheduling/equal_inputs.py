"""What two requests must have in common to share a batch.

For: the dynamic batcher. Does not know: queues, sizes, tensors' contents. Invariants: requests with equal keys can be
joined along the batch dimension, apart from inputs that the model takes ragged; a model whose inputs can not differ
(fixed shapes, none optional) has one key for all, so that nothing is compared.
Source: SetConfiguredScheduler in Triton's backend_model.cc and RequiredEqualInputs in scheduler_utils.cc.
"""

from __future__ import annotations

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.requests.infer_request import InferRequest

BatchKey = tuple[tuple[str, tuple[int, ...] | None], ...]


class EqualInputs:
    """The inputs of one model that matter: those of variable shape that are not `allow_ragged_batch`, and, where inputs
    are optional, which ones a request has."""

    def __init__(self, config: ModelConfig) -> None:
        self._of_equal_shape = frozenset(
            tensor.name for tensor in config.input if -1 in tensor.dims and not tensor.allow_ragged_batch
        )
        self._has_optional = any(tensor.optional for tensor in config.input)

    def key(self, request: InferRequest) -> BatchKey:
        """Equal for requests that may share a batch."""
        if not self._of_equal_shape and not self._has_optional:
            return ()
        return tuple(
            (name, tensor.shape[1:] if name in self._of_equal_shape else None)
            for name, tensor in request.inputs.items()  # in order of name, as the validator left them
            if name in self._of_equal_shape or self._has_optional
        )
