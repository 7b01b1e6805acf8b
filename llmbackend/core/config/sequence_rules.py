"""What `sequence_batching` in a model configuration must fulfil, and its defaults.

For: the rules and defaults of model configurations. Does not know: the batcher. Invariant: what passes here has at
most one tensor for each control, with two values of one type, or an id type that the batcher can write. Initial states
are checked where they are made (scheduling.sequence_state).
Source: ValidateModelConfig, NormalizeModelConfig and Get*SequenceControlProperties of Triton's model_config_utils.
"""

from __future__ import annotations

from typing import Any

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInstanceGroup, ModelSequenceBatching

from llmbackend.core.errors import invalid_argument

DEFAULT_IDLE_US = 1_000_000
_Control = ModelSequenceBatching.Control
_BOOLEAN_KINDS = (_Control.CONTROL_SEQUENCE_START, _Control.CONTROL_SEQUENCE_END, _Control.CONTROL_SEQUENCE_READY)
_VALUE_FIELDS = ("int32_false_true", "fp32_false_true", "bool_false_true")
_ID_TYPES = (DataType.TYPE_UINT64, DataType.TYPE_INT64, DataType.TYPE_UINT32, DataType.TYPE_INT32, DataType.TYPE_STRING)


def set_sequence_defaults(config: ModelConfig) -> None:
    """The defaults that Triton shows in /config."""
    if not config.HasField("sequence_batching"):
        return
    batching = config.sequence_batching
    batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or DEFAULT_IDLE_US
    if batching.HasField("oldest") and not batching.oldest.preferred_batch_size and config.max_batch_size > 0:
        batching.oldest.preferred_batch_size.append(config.max_batch_size)


def validate_sequence_batching(config: ModelConfig) -> None:
    """Raises TritonError INVALID_ARG with Triton's text for the first rule that is broken."""
    if not config.HasField("sequence_batching"):
        return
    name, batching = config.name, config.sequence_batching
    if config.response_cache.enable:
        raise invalid_argument(
            f"Response Cache does not currently support model {name} with sequence batching scheduler. Please disable "
            f"the response cache."
        )
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
                _validate_values(model, control)
            else:
                _validate_id(model, control)


def _validate_values(model: str, control: Any) -> None:
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


def _validate_id(model: str, control: Any) -> None:
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
    """Growable memory is GPU memory, which states of this host are not in; Triton finds out at the first request."""
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
