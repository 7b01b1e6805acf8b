"""Auto-complete inside Triton: what the adapter adds to a configuration, said in pb_utils' words.

For: TritonPythonModel.auto_complete_config, which Triton calls in a process of its own before the model is loaded.
Invariant: nothing that the user configured is changed.
"""

from __future__ import annotations

from typing import Any

from tritonclient.grpc.model_config_pb2 import DataType

from llmbackend.adapter.tensor_schemas import schema_for

from .host import parse_config


def complete(model_config: Any) -> Any:
    """`model_config`: a pb_utils.ModelConfig. Raises TritonError for a declared tensor that does not fit."""
    config = parse_config(model_config.as_dict())
    completed = schema_for(config).complete(config)
    declared = {tensor.name for tensor in (*config.input, *config.output)}
    for tensor in completed.input:
        if tensor.name not in declared:
            model_config.add_input(_described(tensor) | {"optional": tensor.optional})
    for tensor in completed.output:
        if tensor.name not in declared:
            model_config.add_output(_described(tensor))
    model_config.set_max_batch_size(completed.max_batch_size)
    if not config.HasField("model_transaction_policy"):
        decoupled = completed.model_transaction_policy.decoupled
        model_config.set_model_transaction_policy({"decoupled": decoupled})
    return model_config


def _described(tensor: Any) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": DataType.Name(tensor.data_type), "dims": list(tensor.dims)}
