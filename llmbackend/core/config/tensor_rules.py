"""What a model's inputs and outputs must fulfil: names, datatypes, dimensions, reshapes.

For: model loading, once the backend has completed the configuration. Does not know: requests. Source:
ValidateModelInput and ValidateModelOutput in Triton's core, which say the model's name without quotes and do not look
for a name that is given twice: TensorRT-LLM's `ensemble` gives one so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput

from llmbackend.core.errors import invalid_argument
from llmbackend.core.requests.reshape import VARIABLE, reshape_fault

NOT_A_DIMENSION = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def validate_tensors(config: ModelConfig) -> None:
    """Raises TritonError INVALID_ARG for the first rule that is broken."""
    faults = chain(
        _faults("model input", config.input, config.max_batch_size),
        _faults("model output", config.output, config.max_batch_size),
    )
    fault = next(faults, "")
    if fault:
        raise invalid_argument(f"{fault} for {config.name}")


def _faults(what: str, tensors: Sequence[ModelInput | ModelOutput], max_batch_size: int) -> Iterator[str]:
    seen: dict[str, ModelInput | ModelOutput] = {}
    for tensor in tensors:
        if not tensor.name:
            yield f"{what} must specify 'name'"
        if seen.setdefault(tensor.name, tensor) != tensor:
            yield f"{what} '{tensor.name}' is given twice, and differently"
        if fault := _fault(tensor, max_batch_size):
            yield f"{what} '{tensor.name}' {fault}"


def _fault(tensor: ModelInput | ModelOutput, max_batch_size: int) -> str:
    """What is wrong with one tensor; "" = nothing."""
    if tensor.data_type == DataType.TYPE_INVALID:
        return "must specify 'data_type'"
    if not tensor.dims:
        return "must specify 'dims'"
    if any(dim < 1 and dim != VARIABLE for dim in tensor.dims):
        return f"dimension {NOT_A_DIMENSION}"
    if not tensor.HasField("reshape"):
        return ""
    if any(dim < 1 and dim != VARIABLE for dim in tensor.reshape.shape):
        return f"reshape dimensions {NOT_A_DIMENSION}"
    return reshape_fault(tensor.dims, tensor.reshape.shape, max_batch_size > 0)
