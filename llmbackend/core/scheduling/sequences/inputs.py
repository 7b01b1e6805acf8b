"""Control inputs and implicit states, which the host adds to the inputs of sequence requests.

A request gets the states that earlier requests have set with `update`. Tensors are replaced, never modified. Source:
Triton's sequence batcher, sequence_state.cc, GenerateInitialStateData.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelSequenceBatching

from ...backend_api import RequestFlag
from ...errors import invalid_argument
from ...tensors import DATATYPE_OF_CONFIG_TYPE, NUMPY_DTYPE, Tensor, from_wire

_Control = ModelSequenceBatching.Control
_FLAG_VALUES = 4  # neither, START, END, both
_LENGTH_BYTES = 4  # precedes the characters of a string


INITIAL_STATE_DIRECTORY = "initial_state"
"""A directory in the model's directory, with the files that `data_file` names."""


@dataclass(frozen=True, slots=True)
class _Boolean:
    kind: int
    false: Tensor
    true: Tensor


class SequenceControls:
    """The control inputs of one model. Those that depend only on flags are built once.

    A control has the shape [1], or [1, 1] if the model batches. Deliberate difference from Triton: a string id that is
    too long for an integer control is replaced by a hash, so that two sequences never get the same id (Triton copies
    its bytes, even beyond the end of the control); a number for a string control is written in decimal.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._shape = (1, 1) if config.max_batch_size else (1,)
        self._correlation_id: tuple[str, str] | None = None
        booleans: list[_Boolean] = []
        for item in config.sequence_batching.control_input:
            for control in item.control:
                if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
                    self._correlation_id = (item.name, DATATYPE_OF_CONFIG_TYPE[DataType.Name(control.data_type)])
                else:
                    booleans.append(self._boolean(item.name, control))
        self._by_flags = [_of_flags(booleans, flags) for flags in range(_FLAG_VALUES)]
        self._not_ready = {control.false.name: control.false for control in booleans}

    def inputs(self, flags: RequestFlag, correlation_id: int | str) -> dict[str, Tensor]:
        return {**self._by_flags[int(flags) % _FLAG_VALUES], **self._id_input(correlation_id)}

    def not_ready(self) -> dict[str, Tensor]:
        """The controls for a slot without a request: all are false; the id is 0 or empty."""
        return {**self._not_ready, **self._id_input("")}

    def _boolean(self, name: str, control: Any) -> _Boolean:
        for values, dtype in (
            (control.int32_false_true, np.int32),
            (control.fp32_false_true, np.float32),
            (control.bool_false_true, np.bool_),
        ):
            if values:
                false, true = (self._tensor(name, np.array([value], dtype)) for value in values)
                return _Boolean(control.kind, false, true)
        raise AssertionError("a control that was not validated")

    def _id_input(self, correlation_id: int | str) -> dict[str, Tensor]:
        if self._correlation_id is None:
            return {}
        name, datatype = self._correlation_id
        if datatype == "BYTES":
            data = np.array([str(correlation_id).encode()], np.object_)
        else:
            dtype = NUMPY_DTYPE[datatype]
            data = np.frombuffer(_id_bytes(correlation_id, dtype.itemsize), dtype=dtype)
        return {name: Tensor(name, datatype, self._shape, data.reshape(self._shape))}

    def _tensor(self, name: str, data: npt.NDArray[Any]) -> Tensor:
        made = Tensor.of(name, data.reshape(self._shape))
        made.data.flags.writeable = False  # shared by all requests
        return made


def _of_flags(booleans: list[_Boolean], flags: int) -> dict[str, Tensor]:
    """The control inputs for these flags; READY is true for every request."""
    true_kinds = {_Control.CONTROL_SEQUENCE_READY}
    true_kinds |= {_Control.CONTROL_SEQUENCE_START} if flags & RequestFlag.SEQUENCE_START else set()
    true_kinds |= {_Control.CONTROL_SEQUENCE_END} if flags & RequestFlag.SEQUENCE_END else set()
    tensors = [control.true if control.kind in true_kinds else control.false for control in booleans]
    return {tensor.name: tensor for tensor in tensors}


def _id_bytes(correlation_id: int | str, size: int) -> bytes:
    if isinstance(correlation_id, int):
        return correlation_id.to_bytes(8, "little")[:size]
    text = correlation_id.encode()
    if not text:
        return bytes(size)
    if _LENGTH_BYTES + len(text) <= size:
        return (len(text).to_bytes(_LENGTH_BYTES, "little") + text).ljust(size, b"\0")
    return hashlib.blake2b(text, digest_size=size).digest()


class SequenceStates:
    """The states of one sequence, initialised by START.

    Deliberate difference from Triton: a state without an initial value is zero (Triton: uninitialised memory); one with
    a variable dimension starts with the shape of its initial value (Triton: its bytes with shape [1]).
    """

    def __init__(self, initial: Mapping[str, Tensor], input_of_output: Mapping[str, str]) -> None:
        self._inputs = dict(initial)
        self._input_of_output = input_of_output

    def inputs(self) -> dict[str, Tensor]:
        """The states by input name, for the next request."""
        return dict(self._inputs)

    def new_state(self, tensor: Tensor) -> SequenceState:
        """Raises TritonError INVALID_ARG for a name that is not a state's output."""
        if tensor.name not in self._input_of_output:
            raise invalid_argument(f"state '{tensor.name}' is not a valid state name.")
        data = tensor.data.copy()  # the backend may reuse its memory
        data.flags.writeable = False
        return SequenceState(self, replace(tensor, data=data))

    def put(self, tensor: Tensor) -> None:
        name = self._input_of_output[tensor.name]
        self._inputs[name] = replace(tensor, name=name)


class SequenceState:
    """A new state, which takes effect with `update`."""

    def __init__(self, states: SequenceStates, tensor: Tensor) -> None:
        self._states = states
        self._tensor = tensor

    def update(self) -> None:
        self._states.put(self._tensor)


@dataclass(frozen=True, slots=True)
class StateRules:
    """The `state` fields in one model's configuration: initial values by input name, and output name → input name."""

    initial: Mapping[str, Tensor]
    input_of_output: Mapping[str, str]

    @classmethod
    def of(cls, config: ModelConfig, model_directory: Path) -> StateRules:
        """Reads the initial states. Raises TritonError INVALID_ARG for an invalid configuration or file."""
        initial: dict[str, Tensor] = {}
        input_of_output: dict[str, str] = {}
        for state in config.sequence_batching.state:
            if state.input_name in initial:
                raise invalid_argument(f"State input name '{state.input_name}' specified more than once.")
            if state.output_name in input_of_output:
                raise invalid_argument(f"State output name '{state.output_name}' specified more than once.")
            initial[state.input_name] = _initial_tensor(state, config.max_batch_size > 0, model_directory)
            input_of_output[state.output_name] = state.input_name
        return cls(initial, input_of_output)

    def new_states(self) -> SequenceStates | None:
        """None for a model without states."""
        return SequenceStates(self.initial, self.input_of_output) if self.initial else None


def _initial_tensor(state: Any, has_batch: bool, model_directory: Path) -> Tensor:
    name, batch = state.input_name, (1,) if has_batch else ()
    datatype = DATATYPE_OF_CONFIG_TYPE.get(DataType.Name(state.data_type))
    if datatype is None:
        raise invalid_argument(f"state input '{name}' must specify 'data_type'")
    if len(state.initial_state) > 1:
        raise invalid_argument(
            f"initial_state field for state input '{name}' must contain exactly one or zero element. "
            f"Found '{len(state.initial_state)}' elements."
        )
    if not state.initial_state:
        return _zeros(name, datatype, (*batch, *(1 if dim == -1 else dim for dim in state.dims)))
    initial = state.initial_state[0]
    _check_initial(initial, state)
    shape = (*batch, *initial.dims)
    if initial.WhichOneof("state_data") == "zero_data":
        return _zeros(name, datatype, shape)
    if initial.WhichOneof("state_data") == "data_file":
        raw = _read(model_directory, initial.data_file, name)
        return _from_file(name, datatype, shape, raw, initial.data_file)
    raise invalid_argument(f"initial_state setting expects state'{name}' to have state_data set")


def _check_initial(initial: Any, state: Any) -> None:
    name = state.input_name
    if initial.data_type != state.data_type:
        raise invalid_argument(
            f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
        )
    if not initial.name:
        raise invalid_argument(f"Field 'name' must be set when using initial_state for state input '{name}'.")
    if len(initial.dims) != len(state.dims):
        raise invalid_argument(
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{name}'. {len(initial.dims)} != {len(state.dims)}"
        )
    for dim, expected in zip(initial.dims, state.dims, strict=True):
        if dim == -1:
            raise invalid_argument(f"'initial_state' field for state input name '{name}' contains variable dimensions.")
        if expected not in (-1, dim):
            raise invalid_argument(
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. "
                f"{dim} != {expected}"
            )


def _zeros(name: str, datatype: str, shape: tuple[int, ...]) -> Tensor:
    dtype = NUMPY_DTYPE[datatype]
    data = np.full(shape, b"", dtype) if datatype == "BYTES" else np.zeros(shape, dtype)
    data.flags.writeable = False  # shared by all sequences
    return Tensor.of(name, data)


def _from_file(name: str, datatype: str, shape: tuple[int, ...], raw: bytes, file: str) -> Tensor:
    """As in Triton, a file may be longer than the state. Strings are in wire format."""
    if datatype == "BYTES":
        return from_wire(name, datatype, shape, raw)
    size = math.prod(shape) * NUMPY_DTYPE[datatype].itemsize
    if len(raw) < size:
        raise invalid_argument(
            f"initial_state setting expects {size} bytes, but the data provided from {file}only has {len(raw)} bytes."
        )
    return from_wire(name, datatype, shape, raw[:size])


def _read(model_directory: Path, file: str, name: str) -> bytes:
    """The file must be in INITIAL_STATE_DIRECTORY, because a configuration may come from a client."""
    path = PurePath(file)
    if path.is_absolute() or ".." in path.parts or "\0" in file:
        raise invalid_argument(
            f"'data_file' of state input '{name}' must stay inside '{INITIAL_STATE_DIRECTORY}', got {file!a}"
        )
    try:
        return (model_directory / INITIAL_STATE_DIRECTORY / file).read_bytes()
    except OSError as error:
        raise invalid_argument(f"failed to open initial_state file '{file}': {error.strerror}") from None
