"""What a model configuration must fulfil before a model is loaded from it.

For: the repository (before a load) and model loading (after auto-complete). Does not know: backends, files.
Invariant: a rule names the field, its value and the model; a field that this host does not serve is refused or warned
about, never ignored in silence. Source: ValidateModelConfig in Triton's core.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import (
    ModelConfig,
    ModelInstanceGroup,
    ModelQueuePolicy,
)

from llmbackend.core.errors import invalid_argument

from .batching_rules import validate_batch_io, validate_response_cache
from .ensemble_rules import is_ensemble, validate_scheduling
from .sequence_rules import validate_sequence_batching

log = logging.getLogger(__name__)

MOST_INSTANCES = 1024
"""Each has a thread at the least; a number from a client must not exhaust the machine."""


def validate_config(config: ModelConfig) -> None:
    """Raises TritonError INVALID_ARG for a broken rule."""
    name = config.name
    if is_ensemble(config):
        validate_scheduling(config)
    elif not config.backend:
        raise invalid_argument(f"must specify 'backend' for '{name}'")
    if config.max_batch_size < 0:
        raise invalid_argument(
            f"'max_batch_size' must be non-negative value in model configuration for '{name}', "
            f"got {config.max_batch_size}"
        )
    if config.version_policy.HasField("latest") and config.version_policy.latest.num_versions == 0:
        raise invalid_argument(f"version policy 'latest' must have 'num_versions' >= 1 for model '{name}'")
    if config.version_policy.HasField("specific") and not config.version_policy.specific.versions:
        raise invalid_argument(f"version policy 'specific' must list at least one version for model '{name}'")
    _validate_enums(name, config)
    _validate_paths(config)
    _validate_dynamic_batching(config)
    validate_sequence_batching(config)
    validate_response_cache(config)
    for group in config.instance_group:
        _validate_group(name, group)
    count = sum(max(group.count, 1) * max(len(group.gpus), 1) for group in config.instance_group)
    if count > MOST_INSTANCES:
        raise invalid_argument(f"model '{name}' asks for {count} instances, expected at most {MOST_INSTANCES}")
    validate_batch_io(config)


def _validate_enums(model: str, message: Message) -> None:
    """Protobuf's enums are open: a configuration may hold a number that has no name."""
    field: Any
    for field, value in message.ListFields():
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        for item in (value.values() if is_map else value) if field.is_repeated else [value]:
            if field.enum_type is not None and item not in field.enum_type.values_by_number:
                raise invalid_argument(f"model '{model}': '{field.name}' has no value {item} in model configuration")
            if isinstance(item, Message):
                _validate_enums(model, item)


def _validate_paths(config: ModelConfig) -> None:
    """A configuration may come from a client: the file that it names must lie in the version's directory."""
    path = PurePath(config.default_model_filename)
    if path.is_absolute() or ".." in path.parts or "\0" in config.default_model_filename:
        raise invalid_argument(
            f"'default_model_filename' of model '{config.name}' must stay inside the version directory, "
            f"got {config.default_model_filename!a}"
        )


def _validate_dynamic_batching(config: ModelConfig) -> None:
    for size in config.dynamic_batching.preferred_batch_size:
        if size <= 0:
            raise invalid_argument(f"dynamic batching preferred size must be positive for '{config.name}', got {size}")
        if size > config.max_batch_size:
            raise invalid_argument(
                f"dynamic batching preferred size must be <= max batch size for '{config.name}', "
                f"got {size} > {config.max_batch_size}"
            )
    _validate_queue_policies(config)


def _validate_queue_policies(config: ModelConfig) -> None:
    batching = config.dynamic_batching
    levels = batching.priority_levels
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if levels and not 1 <= batching.default_priority_level <= levels:
        raise invalid_argument(f"default priority level must be in range [1, {levels}] for {config.name}")
    if levels and not all(1 <= level <= levels for level in batching.priority_queue_policy):
        raise invalid_argument(
            f"priority queue policy must have priority level in range [1, {levels}] for {config.name}"
        )
    if batching.preserve_ordering and levels > 1:
        raise invalid_argument(f"Only one priority level is allowed when 'preserve_ordering' is true for {config.name}")
    if batching.preserve_ordering and any(
        policy.default_timeout_microseconds and policy.timeout_action == ModelQueuePolicy.DELAY for policy in policies
    ):
        raise invalid_argument(
            f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {config.name}"
        )


def _validate_group(model: str, group: ModelInstanceGroup) -> None:
    if group.count < 0:
        raise invalid_argument(f"instance group '{group.name}' of model '{model}' has invalid count {group.count}")


def validate_instance_groups(config: ModelConfig, gpus: Sequence[int], min_compute_capability: float) -> None:
    """For groups that have names, kinds and GPUs (set_instance_groups); `gpus` are the host's. Raises TritonError
    INVALID_ARG with the texts of ValidateInstanceGroup in Triton's core."""
    for group in config.instance_group:
        subject = f"instance group {group.name} of model {config.name}"
        kind = ModelInstanceGroup.Kind.Name(group.kind)
        if group.kind != ModelInstanceGroup.KIND_GPU:
            if group.gpus:
                raise invalid_argument(f"{subject} has kind {kind} but specifies one or more GPUs")
            continue
        if not group.gpus:
            raise invalid_argument(f"{subject} has kind {kind} but no GPUs are available")
        for gpu in group.gpus:
            if gpu not in gpus:
                raise invalid_argument(
                    f"{subject} specifies invalid or unsupported gpu id {gpu}. GPUs with at least the minimum required "
                    f"CUDA compute compatibility of {min_compute_capability:f} are: {', '.join(map(str, gpus))}"
                )


def warn_of_ignored_fields(config: ModelConfig) -> None:
    """One WARNING for each configured field that this host serves without."""
    ignored = {
        "model_operations": bool(config.model_operations.op_library_filename),
    }
    for field, is_set in ignored.items():
        if is_set:
            log.warning("model '%s': '%s' in the model configuration is not supported and ignored", config.name, field)
