"""What a model configuration must fulfil for the response cache, and for what backends make of whole batches.

For: validate_config. Does not know: caches, backends. Invariant: a rule names the field, its value and the model.
Source: ValidateModelConfig and ValidateBatchIO in Triton's model_config_utils.cc, texts verbatim.
"""

from __future__ import annotations

from tritonclient.grpc.model_config_pb2 import BatchInput, BatchOutput, DataType, ModelConfig

from llmbackend.core.errors import TritonError, invalid_argument


def validate_response_cache(config: ModelConfig) -> None:
    """Raises TritonError INVALID_ARG for a model whose answers can not be kept."""
    if not config.response_cache.enable:
        return
    reason = ""
    if config.HasField("sequence_batching"):
        reason = "sequence batching scheduler"
    elif config.model_transaction_policy.decoupled:
        reason = "'decoupled' transaction policy"
    if reason:
        raise invalid_argument(
            f"Response Cache does not currently support model {config.name} with {reason}. Please disable the response "
            f"cache."
        )


def validate_batch_io(config: ModelConfig) -> None:
    """The rules for `batch_input`, `batch_output` and shape tensors. Raises TritonError INVALID_ARG."""
    try:
        _validate(config)
    except TritonError as error:
        raise invalid_argument(f"{error.message} for {config.name}") from None


def _validate(config: ModelConfig) -> None:
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    if any(tensor.is_shape_tensor for tensor in (*config.input, *config.output)):
        raise invalid_argument("shape tensors are only supported for TensorRT platform")
    for item in config.batch_input:
        _validate_sources("input", BatchInput.Kind.Name(item.kind), list(item.source_input), inputs)
        if item.data_type not in (DataType.TYPE_INT32, DataType.TYPE_FP32):
            raise invalid_argument("batch input data type must be TYPE_INT32 or TYPE_FP32")
    for item in config.batch_output:
        _validate_sources("output", BatchOutput.Kind.Name(item.kind), list(item.source_input), inputs)
        _validate_targets(list(item.target_name), outputs)


def _validate_sources(what: str, kind: str, sources: list[str], inputs: set[str]) -> None:
    if len(sources) != 1:
        raise invalid_argument(f"batch {what} kind '{kind}' expects 1 source input, got {len(sources)}")
    if sources[0] not in inputs:
        raise invalid_argument(f"unknown source input name '{sources[0]}'")


def _validate_targets(targets: list[str], outputs: set[str]) -> None:
    for index, target in enumerate(targets):
        if target not in outputs:
            raise invalid_argument(f"unknown target output name '{target}'")
        if target in targets[:index]:
            raise invalid_argument(f"target output name '{target}' can only be specified once")
