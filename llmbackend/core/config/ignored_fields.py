"""The fields of a model configuration that this host does not act on: each that is set gives one warning at load.

For: model loading. Does not know: backends, what the other fields do. Invariant: a field of the ModelConfig message is
in IGNORED_FIELDS, acted on, or refused by model_config_rules.py; tests/core/test_config_fields.py walks the message.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import ModelConfig

log = logging.getLogger(__name__)

IGNORED_FIELDS: Final[Mapping[str, str]] = {
    "cc_model_filenames": "every device uses 'default_model_filename'",
    "ensemble_scheduling.step.model_namespace": "a model is sought in the ensemble's namespace first",
    "instance_group.profile": "profiles are of TensorRT engines, which this server does not run",
    "instance_group.secondary_devices": "instances use no DLA cores",
    "model_operations": "libraries of custom operations are not loaded",
    "optimization.cuda": "CUDA graphs are set by the engine arguments of the llm backend",
    "optimization.eager_batching": "a batch grows until an instance is free",
    "optimization.execution_accelerators": "backends run a model with their own framework only",
    "optimization.gather_kernel_buffer_threshold": "inputs are not gathered by a kernel",
    "optimization.graph": "how far a graph is optimized is a parameter of the backend",
    "optimization.priority": "instances have no priority on their device",
    "sequence_batching.state.use_growable_memory": "states are in ordinary memory",
    "sequence_batching.state.use_same_buffer_for_input_output": "each state has one buffer, which is replaced",
}
"""Path of the field → what holds in its place. Of `input_pinned_memory` and `output_pinned_memory` nothing is said:
Triton shows them as true in each configuration, and false asks for what this host does."""


def warn_of_ignored_fields(config: ModelConfig) -> None:
    """Logs one WARNING for each configured field that this host does not act on."""
    for path, instead in IGNORED_FIELDS.items():
        if any(_values(config, path.split("."))):
            log.warning("model '%s': '%s' in the model configuration has no effect: %s", config.name, path, instead)


def _values(message: Message, path: Sequence[str]) -> Iterator[Any]:
    """The values at a path that are set, over all items of repeated messages."""
    for field, value in message.ListFields():
        if field.name == path[0] and len(path) == 1:
            yield True
        elif field.name == path[0]:
            for item in value if field.is_repeated else [value]:
                yield from _values(item, path[1:])
