"""Implicit state: tensors that the host keeps for a sequence, from one of its requests to the next.

For: the sequence batcher (it hands states to requests as inputs) and requests (a backend sets new states through
them). Does not know: slots, batches, what a state means. Invariants: a state belongs to one sequence and begins anew
with each START; a request sees what the requests before it set with `update`, and nothing else; tensors are replaced,
never written to.
Source: Triton's sequence_state.cc and GenerateInitialStateData. By design different: a state without an initial value
begins as zeros (Triton: whatever was in the memory), and one with a variable dimension begins in the shape of its
initial value (Triton: its bytes, in the shape [1]).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from llmbackend.core.errors import invalid_argument
from llmbackend.core.tensors import DATATYPE_OF_CONFIG_TYPE, NUMPY_DTYPE, Tensor, from_wire

INITIAL_STATE_DIRECTORY = "initial_state"
"""Beside the version directories; `data_file` names a file in it."""


class SequenceStates:
    """The states of one sequence; requests of it that are with a backend hold them too."""

    def __init__(self, initial: Mapping[str, Tensor], input_of_output: Mapping[str, str]) -> None:
        self._inputs = dict(initial)
        self._input_of_output = input_of_output

    def inputs(self) -> dict[str, Tensor]:
        """By input name, as the next request gets them."""
        return dict(self._inputs)

    def new_state(self, tensor: Tensor) -> SequenceState:
        """Raises TritonError INVALID_ARG for a name that is no state's output."""
        if tensor.name not in self._input_of_output:
            raise invalid_argument(f"state '{tensor.name}' is not a valid state name.")
        data = tensor.data.copy()  # the backend may use its memory again
        data.flags.writeable = False
        return SequenceState(self, replace(tensor, data=data))

    def put(self, tensor: Tensor) -> None:
        name = self._input_of_output[tensor.name]
        self._inputs[name] = replace(tensor, name=name)


class SequenceState:
    """One new state, not yet seen by anybody."""

    def __init__(self, states: SequenceStates, tensor: Tensor) -> None:
        self._states = states
        self._tensor = tensor

    def update(self) -> None:
        self._states.put(self._tensor)


@dataclass(frozen=True, slots=True)
class StateRules:
    """The `state` fields of one model's configuration."""

    initial: Mapping[str, Tensor]
    input_of_output: Mapping[str, str]

    @classmethod
    def of(cls, config: ModelConfig, model_directory: Path) -> StateRules:
        """Reads the initial states. Raises TritonError INVALID_ARG for a configuration or file that does not fit."""
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
        """For a sequence that starts; None for a model without states."""
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
    data.flags.writeable = False  # every sequence begins with it
    return Tensor.of(name, data)


def _from_file(name: str, datatype: str, shape: tuple[int, ...], raw: bytes, file: str) -> Tensor:
    """A file may be longer than the state, as in Triton; strings are length-prefixed, as on the wire."""
    if datatype == "BYTES":
        return from_wire(name, datatype, shape, raw)
    size = math.prod(shape) * NUMPY_DTYPE[datatype].itemsize
    if len(raw) < size:
        raise invalid_argument(
            f"initial_state setting expects {size} bytes, but the data provided from {file}only has {len(raw)} bytes."
        )
    return from_wire(name, datatype, shape, raw[:size])


def _read(model_directory: Path, file: str, name: str) -> bytes:
    """A configuration may come from a client: the file that it names must lie in the model's directory for it."""
    path = PurePath(file)
    if path.is_absolute() or ".." in path.parts or "\0" in file:
        raise invalid_argument(
            f"'data_file' of state input '{name}' must stay inside '{INITIAL_STATE_DIRECTORY}', got {file!a}"
        )
    try:
        return (model_directory / INITIAL_STATE_DIRECTORY / file).read_bytes()
    except OSError as error:
        raise invalid_argument(f"failed to open initial_state file '{file}': {error.strerror}") from None
