"""The fields of a model configuration that this host ignores: each one that is set is logged as a warning at load.

For: model loading. Does not know: backends, what the other fields do. Invariant: a field of the ModelConfig message is
in IGNORED_FIELDS, acted on, or refused by model_config_rules.py; tests/core/test_config_fields.py walks the message.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import ModelConfig

log = logging.getLogger(__name__)

IGNORED_FIELDS: Final[Mapping[str, str]] = {
    "cc_model_filenames": "every device uses 'default_model_filename'",
    "ensemble_scheduling.step.model_namespace": "a model is looked up in the ensemble's namespace first",
    "instance_group.profile": "only TensorRT engines have profiles, and this server does not run them",
    "instance_group.secondary_devices": "instances use no DLA cores",
    "model_operations": "libraries of custom operations are not loaded",
    "optimization.cuda": "CUDA graphs are set by the engine arguments of the llm backend",
    "optimization.eager_batching": "a batch grows until an instance is free",
    "optimization.execution_accelerators": "backends run a model with their own framework only",
    "optimization.gather_kernel_buffer_threshold": "inputs are not gathered by a kernel",
    "optimization.graph": "how far a graph is optimized is a parameter of the backend",
    "optimization.priority": "instances have no priority on their device",
    "sequence_batching.state.use_growable_memory": "states are kept in ordinary memory",
    "sequence_batching.state.use_same_buffer_for_input_output": "each state has one buffer, which is replaced",
}
"""Path of the field → what happens instead. `input_pinned_memory` and `output_pinned_memory` are not among them: Triton
sets them to true in every configuration, and false is what this host does anyway."""


def warn_of_ignored_fields(config: ModelConfig) -> None:
    """Logs one WARNING for each ignored field that is set."""
    for path, instead in IGNORED_FIELDS.items():
        if _is_set(config, path):
            log.warning("model '%s': '%s' in the model configuration has no effect: %s", config.name, path, instead)


def _is_set(message: Message, path: str) -> bool:
    """Of a path through repeated messages, whether it is set in one of them."""
    name, _, rest = path.partition(".")
    for field, value in message.ListFields():
        if field.name == name:
            return not rest or any(_is_set(item, rest) for item in (value if field.is_repeated else [value]))
    return False
