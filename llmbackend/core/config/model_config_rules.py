"""The rules for model configurations, checked before a load and again after auto-complete.

A field for a feature that this host lacks is refused here, or ignored with a WARNING (IGNORED_FIELDS in served_config).
Source: ValidateModelConfig and its neighbours in Triton's model_config_utils.cc, texts verbatim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import PurePath
from typing import Any

from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import (
    BatchInput,
    BatchOutput,
    DataType,
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelQueuePolicy,
    ModelSequenceBatching,
)

from ..errors import TritonError, invalid_argument
from ..requests.request_validation import VARIABLE, reshape_fault

PLATFORM = "ensemble"
_StepsOfTensor = dict[str, set[int]]
"""Ensemble tensor → indices of the steps that read it, or that write it."""


def composing_models(config: ModelConfig) -> dict[str, set[int]]:
    """The models of the steps, in order, each with its versions (-1 = any)."""
    models: dict[str, set[int]] = {}
    for step in config.ensemble_scheduling.step:
        models.setdefault(step.model_name, set()).add(step.model_version)
    return models


def validate_scheduling(config: ModelConfig) -> None:
    """Raises TritonError INVALID_ARG for an invalid ensemble."""
    name = config.name
    if not config.HasField("ensemble_scheduling"):
        raise invalid_argument(f"ensemble scheduling must be set for ensemble {name} whose platform is {PLATFORM}")
    if config.platform != PLATFORM:
        raise invalid_argument(f"ensemble scheduling cannot be set for model '{name}' whose platform is not {PLATFORM}")
    if config.instance_group:
        raise invalid_argument(f"instance group should not be specified for ensemble '{name}'")
    if config.HasField("optimization"):
        raise invalid_argument(f"optimization should not be specified for ensemble '{name}'")
    if config.model_warmup:
        raise invalid_argument(f"model_warmup can not be specified for ensemble '{name}'")
    if not config.ensemble_scheduling.step:
        raise invalid_argument(f"must specify 'step' for ensemble '{name}'")
    readers, writers = _read_steps(config)
    _check_flow(config, readers, writers)


def _read_steps(config: ModelConfig) -> tuple[_StepsOfTensor, _StepsOfTensor]:
    readers: _StepsOfTensor = {}
    writers: _StepsOfTensor = {}
    for index, step in enumerate(config.ensemble_scheduling.step):
        for field_name in ("model_name", "input_map", "output_map"):
            if not getattr(step, field_name):
                raise invalid_argument(f"must specify '{field_name}' in step {index} of ensemble '{config.name}'")
        for tensor in step.output_map.values():
            if tensor in writers:
                raise invalid_argument(
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{config.name}' "
                    f"step {index}"
                )
            writers[tensor] = {index}
        for tensor in step.input_map.values():
            readers.setdefault(tensor, set()).add(index)
    return readers, writers


def _check_flow(config: ModelConfig, readers: _StepsOfTensor, writers: _StepsOfTensor) -> None:
    name, known = config.name, {*readers, *writers}
    for tensor in config.input:
        if tensor.name not in known:
            raise invalid_argument(f"ensemble input '{tensor.name}' for ensemble {name}' is not used")
    written = _written(config)
    for tensor in config.output:
        if tensor.name not in known:
            raise invalid_argument(f"ensemble output '{tensor.name}' for ensemble {name}' is not used")
        if tensor.name not in written:
            raise invalid_argument(f"output '{tensor.name}' for ensemble '{name}' is not written")
    outputs = {tensor.name for tensor in config.output}
    for unused in sorted(known - outputs):
        if unused not in written or unused not in readers:
            raise invalid_argument(f"ensemble tensor '{unused}' is unused in ensemble '{name}'")


def _written(config: ModelConfig) -> set[str]:
    """The tensors that receive values: the inputs, and the outputs of every step whose inputs all receive values."""
    written = {tensor.name for tensor in config.input}
    waiting = list(config.ensemble_scheduling.step)
    while True:
        runnable = [step for step in waiting if written.issuperset(step.input_map.values())]
        if not runnable:
            return written
        for step in runnable:
            written.update(step.output_map.values())
        waiting = [step for step in waiting if step not in runnable]


MAX_INSTANCES = 1024
"""Per model. Each has at least one thread, and the number may come from a client."""

_Control = ModelSequenceBatching.Control
_BOOLEAN_KINDS = (_Control.CONTROL_SEQUENCE_START, _Control.CONTROL_SEQUENCE_END, _Control.CONTROL_SEQUENCE_READY)
_VALUE_FIELDS = ("int32_false_true", "fp32_false_true", "bool_false_true")
_ID_TYPES = (DataType.TYPE_UINT64, DataType.TYPE_INT64, DataType.TYPE_UINT32, DataType.TYPE_INT32, DataType.TYPE_STRING)
_NOT_A_DIMENSION = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def validate_config(config: ModelConfig) -> None:
    """Raises TritonError INVALID_ARG for a broken rule. Initial states are checked by StateRules."""
    name = config.name
    if config.HasField("ensemble_scheduling") or config.platform == PLATFORM:
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
    validate_response_cache(config)
    validate_sequence_batching(config)
    for group in config.instance_group:
        if group.count < 0:
            raise invalid_argument(f"instance group '{group.name}' of model '{name}' has invalid count {group.count}")
    count = sum(max(group.count, 1) * max(len(group.gpus), 1) for group in config.instance_group)
    if count > MAX_INSTANCES:
        raise invalid_argument(f"model '{name}' asks for {count} instances, expected at most {MAX_INSTANCES}")
    validate_batch_io(config)


def _validate_enums(model: str, message: Message) -> None:
    """Refuses unknown numbers, which protobuf's open enums accept."""
    field: Any
    for field, value in message.ListFields():
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        for item in (value.values() if is_map else value) if field.is_repeated else [value]:
            if field.enum_type is not None and item not in field.enum_type.values_by_number:
                raise invalid_argument(f"model '{model}': '{field.name}' has no value {item} in model configuration")
            if isinstance(item, Message):
                _validate_enums(model, item)


def _validate_paths(config: ModelConfig) -> None:
    """Paths must stay within the version directory, because a configuration may come from a client."""
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


def validate_instance_groups(config: ModelConfig, gpus: Sequence[int], min_compute_capability: float) -> None:
    """Validates groups that set_instance_groups has completed. gpus: the host's GPU ids. Raises TritonError INVALID_ARG
    with the texts of ValidateInstanceGroup in Triton's core."""
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


def validate_response_cache(config: ModelConfig) -> None:
    """Raises TritonError INVALID_ARG for a model whose responses cannot be cached."""
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
        _check_batch_io(config)
    except TritonError as error:
        raise invalid_argument(f"{error.message} for {config.name}") from None


def _check_batch_io(config: ModelConfig) -> None:
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    tensors = (*config.input, *config.output)
    if any(tensor.is_shape_tensor for tensor in tensors):
        raise invalid_argument("shape tensors are only supported for TensorRT platform")
    if any(tensor.is_non_linear_format_io for tensor in tensors):
        raise invalid_argument("Non-linear IO format is only supported for TensorRT platform")
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


def validate_sequence_batching(config: ModelConfig) -> None:
    """Raises TritonError INVALID_ARG with Triton's text for the first broken rule."""
    if not config.HasField("sequence_batching"):
        return
    name, batching = config.name, config.sequence_batching
    for kind in (*_BOOLEAN_KINDS, _Control.CONTROL_SEQUENCE_CORRID):
        _validate_control(name, batching, kind)
    for size in batching.oldest.preferred_batch_size:
        if size <= 0:
            raise invalid_argument(f"sequence batching preferred batch size must be positive for {name}")
        if size > config.max_batch_size:
            raise invalid_argument(f"sequence batching preferred batch size must be <= max batch size for {name}")
    if batching.oldest.max_candidate_sequences < 0:
        raise invalid_argument(f"sequence batching max candidate sequences must not be negative for {name}")
    if not 0.0 <= batching.direct.minimum_slot_utilization <= 1.0:
        raise invalid_argument(f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}")
    _validate_state_memory(config)


def _validate_control(model: str, batching: ModelSequenceBatching, kind: int) -> None:
    names: set[str] = set()
    is_known = False
    for item in batching.control_input:
        if not item.name:
            raise invalid_argument(f"sequence batching control tensor must have a name for {model}")
        if item.name in names:
            raise invalid_argument(
                f"sequence batching control tensor '{item.name}' is specified for multiple control kinds for {model}"
            )
        names.add(item.name)
        for control in item.control:
            if control.kind != kind:
                continue
            if is_known:
                raise invalid_argument(
                    f"sequence batching specifies multiple {_Control.Kind.Name(kind)} tensors for {model}"
                )
            is_known = True
            if kind in _BOOLEAN_KINDS:
                _validate_control_values(model, control)
            else:
                _validate_correlation_id(model, control)


def _validate_control_values(model: str, control: Any) -> None:
    what = f"for {_Control.Kind.Name(control.kind)} for {model}"
    given = [field for field in _VALUE_FIELDS if getattr(control, field)]
    if not given:
        raise invalid_argument(
            f"sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' {what}"
        )
    if len(given) > 1:
        raise invalid_argument(
            f"sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' {what}"
        )
    if len(getattr(control, given[0])) != 2:
        raise invalid_argument(f"sequence batching control '{given[0]}' must have exactly 2 entries {what}")


def _validate_correlation_id(model: str, control: Any) -> None:
    kind = _Control.Kind.Name(control.kind)
    if any(getattr(control, field) for field in _VALUE_FIELDS):
        raise invalid_argument(
            f"sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            f"{kind} for {model}"
        )
    if control.data_type not in _ID_TYPES:
        raise invalid_argument(
            f"unexpected data type for control {kind} for {model}. Allowed data types are TYPE_UINT64, TYPE_INT64, "
            f"TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
        )


def _validate_state_memory(config: ModelConfig) -> None:
    """Growable memory is GPU memory; Triton refuses it on the first request."""
    kinds = {group.kind for group in config.instance_group}
    for state in config.sequence_batching.state:
        if state.use_growable_memory and not state.use_same_buffer_for_input_output:
            raise invalid_argument(
                f"In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state input name "
                f"'{state.input_name}'."
            )
        if state.use_growable_memory and kinds - {ModelInstanceGroup.KIND_GPU, ModelInstanceGroup.KIND_AUTO}:
            raise invalid_argument(
                f"'use_growable_memory' can only work with KIND_GPU model instances right now. Please either change "
                f"the instance type to KIND_GPU or set 'use_growable_memory' to false for state input name "
                f"'{state.input_name}'."
            )


def validate_tensors(config: ModelConfig) -> None:
    """Checks names, datatypes, dimensions and reshapes of inputs and outputs, after auto-complete.

    Raises TritonError INVALID_ARG for the first broken rule. As in Triton's core, texts name the model without quotes,
    and identical tensors may have the same name (as in TensorRT-LLM's `ensemble`)."""
    faults = chain(
        _tensor_faults("model input", config.input, config.max_batch_size),
        _tensor_faults("model output", config.output, config.max_batch_size),
    )
    fault = next(faults, "")
    if fault:
        raise invalid_argument(f"{fault} for {config.name}")


def _tensor_faults(what: str, tensors: Sequence[ModelInput | ModelOutput], max_batch_size: int) -> Iterator[str]:
    seen: dict[str, ModelInput | ModelOutput] = {}
    for tensor in tensors:
        if not tensor.name:
            yield f"{what} must specify 'name'"
        if isinstance(tensor, ModelInput) and tensor.format != ModelInput.FORMAT_NONE and len(tensor.dims) != 3:
            yield f"{what} NHWC/NCHW require 3 dims"
        if seen.setdefault(tensor.name, tensor) != tensor:
            yield f"{what} '{tensor.name}' is given twice with different values"
        if fault := _tensor_fault(tensor, max_batch_size):
            yield f"{what} '{tensor.name}' {fault}"


def _tensor_fault(tensor: ModelInput | ModelOutput, max_batch_size: int) -> str:
    """The first broken rule of one tensor; "" = none."""
    if tensor.data_type == DataType.TYPE_INVALID:
        return "must specify 'data_type'"
    if not tensor.dims:
        return "must specify 'dims'"
    if any(dim < 1 and dim != VARIABLE for dim in tensor.dims):
        return f"dimension {_NOT_A_DIMENSION}"
    if not tensor.HasField("reshape"):
        return ""
    if any(dim < 1 and dim != VARIABLE for dim in tensor.reshape.shape):
        return f"reshape dimensions {_NOT_A_DIMENSION}"
    return reshape_fault(tensor.dims, tensor.reshape.shape, max_batch_size > 0)
