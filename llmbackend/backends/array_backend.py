"""Common code of backends that compute on numpy arrays: entry points, `parameters`, Execute from tensors to tensors.

Invariants: if the model batches, the requests of a call are concatenated along their first dimension and computed
together; if that fails, each is computed alone, so that an error reaches only its own request. Every request gets
exactly one FINAL and is released once. Ragged inputs (`allow_ragged_batch`) are flattened and concatenated;
`batch_input` describes them to the model, and `batch_output` splits its outputs.
Source: Triton's framework backends (ModelInstanceState: ProcessRequests, SetInputTensors, Execute, ReadOutputTensors);
BackendInputCollector and BackendOutputResponder of its backend utilities; model_config.proto.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc.model_config_pb2 import BatchInput, DataType, ModelInput, ModelOutput

from llmbackend.core.backend_api import (
    DATATYPE_OF_CONFIG_TYPE,
    NUMPY_DTYPE,
    Backend,
    MemoryUsage,
    Model,
    ModelConfig,
    ModelInstance,
    Request,
    ResponseFlag,
    Tensor,
    TritonError,
    check_api_version,
    element_count,
    internal,
    invalid_argument,
)

_log = logging.getLogger(__name__)
BUILT_FOR_API = (1, 19)
LLMBACKEND_API_VERSION = (1, 0)
Readers = Mapping[str, Callable[[str], Any]]
Array = npt.NDArray[Any]
Arrays = dict[str, Array]

# --- entry points that backends export in addition to their own ------------------------------------------------------


def TRITONBACKEND_Initialize(backend: Backend) -> None:
    check_api_version(backend, BUILT_FOR_API)


def TRITONBACKEND_ModelFinalize(model: Model) -> None:
    model.state = None


def TRITONBACKEND_ModelInstanceExecute(instance: ModelInstance, requests: Sequence[Request]) -> None:
    instance.state.process_requests(requests)


def LLMBACKEND_ModelInstanceMemoryUsage(instance: ModelInstance) -> Sequence[MemoryUsage]:
    return () if instance.state is None else [*instance.state.memory_usage()]


def TRITONBACKEND_ModelInstanceFinalize(instance: ModelInstance) -> None:
    instance.state = None


# --- the `parameters` of a model configuration ------------------------------------------------------------------------


def boolean(text: str) -> bool:
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise ValueError("expected true or false")
    return values[text.lower()]


def thread_count(text: str) -> int:
    """0 means the framework's default. Negative numbers mean 0, as in Triton."""
    return max(int(text), 0)


def read_parameters(config: ModelConfig, readers: Readers) -> dict[str, Any]:
    """The values of the parameters that are set, by key. As in Triton, an unknown key is logged and ignored.

    Raises TritonError INVALID_ARG.
    """
    found = {}
    for key, value in config.parameters.items():
        if key in readers:
            found[key] = _read(config.name, key, value.string_value, readers[key])
        else:
            _log.warning("model '%s': parameter '%s' has no effect in this server", config.name, key)
    return found


def _read(model: str, key: str, text: str, reader: Callable[[str], Any]) -> Any:
    try:
        return reader(text)
    except ValueError as error:
        refusal: TritonError = invalid_argument(f"model '{model}': parameter '{key}' is '{text}': {error}")
        raise refusal from None


# --- the tensors of a model: configured, controls and states of sequences ---------------------------------------------


def sequence_inputs(config: ModelConfig) -> list[str]:
    """Names of inputs that the host adds to every request."""
    batching = config.sequence_batching
    return [*(control.name for control in batching.control_input), *(state.input_name for state in batching.state)]


def state_types(config: ModelConfig) -> dict[str, int]:
    """The data type of each state, by output name."""
    return {state.output_name: state.data_type for state in config.sequence_batching.state}


def output_names(config: ModelConfig) -> list[str]:
    """The outputs that the program must have: the configured ones, then those states that are not among them."""
    outputs = [output.name for output in config.output]
    return [*outputs, *(name for name in state_types(config) if name not in outputs)]


# --- an instance ------------------------------------------------------------------------------------------------------


class ArrayInstance(ABC):
    """An instance's state. Execute comes from the instance's own thread, one call at a time."""

    def __init__(self, instance: ModelInstance) -> None:
        self._instance = instance
        config = instance.model.config
        self._batches = config.max_batch_size > 0
        self._states = state_types(config)
        types = {**self._states, **{output.name: output.data_type for output in config.output}}
        self._outputs = {name: _dtype(data_type) for name, data_type in types.items()}
        self._config = config
        self._ragged_inputs = [tensor.name for tensor in config.input if tensor.allow_ragged_batch]
        self._ragged_outputs = frozenset(name for item in config.batch_output for name in item.target_name)

    def memory_usage(self) -> Sequence[MemoryUsage]:
        """The known memory usage of the instance, which has no process of its own."""
        return ()

    @abstractmethod
    def execute(self, inputs: Arrays) -> Mapping[str, Array]:
        """The model's outputs by name. Raises the framework's errors."""

    def process_requests(self, requests: Sequence[Request]) -> None:
        """Takes over the requests: on return, each has been answered and released."""
        exec_start_ns = time.monotonic_ns()
        for group in [requests] if self._batches else [[request] for request in requests]:
            self._execute_together(group, exec_start_ns)

    def _execute_together(self, requests: Sequence[Request], exec_start_ns: int) -> None:
        try:
            inputs = self.set_input_tensors(requests)
            compute_start_ns = time.monotonic_ns()
            outputs = self.execute(inputs)
            compute_end_ns = time.monotonic_ns()
            answers = self.read_output_tensors(outputs, requests)
            self.update_states(outputs, requests)
        except Exception as error:
            if len(requests) == 1:
                self._fail(requests[0], error)
                return
            for request in requests:
                self._execute_together([request], exec_start_ns)
            return
        times_ns = (exec_start_ns, compute_start_ns, compute_end_ns, time.monotonic_ns())
        self._instance.report_batch_statistics(sum(map(self._num_rows, requests)), *times_ns)
        for request, tensors in zip(requests, answers, strict=True):
            self._instance.report_statistics(request, True, *times_ns)
            self._respond(request, tensors)

    def set_input_tensors(self, requests: Sequence[Request]) -> Arrays:
        """The inputs of all requests by name (concatenated by rows, ragged ones flattened), and the batch inputs."""
        first = requests[0].inputs
        ragged = {name: ragged_input(requests, name) for name in self._ragged_inputs if name in first}
        ragged |= batch_inputs(self._config, requests)
        names = [name for name in first if name not in ragged]
        if len(requests) == 1:
            return {**ragged, **{name: first[name].data for name in names}}
        return {**ragged, **{name: np.concatenate([each.inputs[name].data for each in requests]) for name in names}}

    def read_output_tensors(self, outputs: Mapping[str, Array], requests: Sequence[Request]) -> list[list[Tensor]]:
        """Each request's part of the outputs that it requested. Raises TritonError INTERNAL for an output that does not
        match the configuration."""
        wanted = {name for request in requests for name in request.requested_outputs}
        parts = {name: self._parts(name, outputs, requests) for name in wanted}
        return [
            [Tensor.of(name, parts[name][index]) for name in request.requested_outputs]
            for index, request in enumerate(requests)
        ]

    def update_states(self, outputs: Mapping[str, Array], requests: Sequence[Request]) -> None:
        """Passes the new states of each sequence to the host."""
        for name in self._states:
            for request, part in zip(requests, self._parts(name, outputs, requests), strict=True):
                request.new_state(Tensor.of(name, part)).update()

    def _parts(self, name: str, outputs: Mapping[str, Array], requests: Sequence[Request]) -> list[Array]:
        """One output, request by request."""
        counts = [self._num_rows(request) for request in requests]
        is_ragged = name in self._ragged_outputs
        self._check_output(name, outputs, None if is_ragged or not self._batches else sum(counts))
        if is_ragged:
            return scattered_output(self._config, name, outputs[name], requests)
        return np.split(outputs[name], np.cumsum(counts)[:-1]) if self._batches else [outputs[name]]

    def _check_output(self, name: str, outputs: Mapping[str, Array], num_rows: int | None) -> None:
        model = self._instance.model.name
        if name not in outputs:
            raise internal(f"model '{model}' did not return output '{name}'")
        array = outputs[name]
        if array.dtype != self._outputs[name]:
            raise internal(f"model '{model}' returned output '{name}' as {array.dtype}, expected {self._outputs[name]}")
        if num_rows is not None and (array.ndim == 0 or len(array) != num_rows):
            raise internal(f"model '{model}' returned output '{name}' in shape {array.shape}, expected {num_rows} rows")

    def _num_rows(self, request: Request) -> int:
        """The request's batch dimension; 1 if the model does not batch."""
        first = next(iter(request.inputs.values()), None)
        return first.shape[0] if self._batches and first is not None else 1

    def _respond(self, request: Request, tensors: Sequence[Tensor]) -> None:
        response = request.new_response()
        for tensor in tensors:
            response.add_output(tensor)
        response.send(ResponseFlag.FINAL)
        request.release()

    def _fail(self, request: Request, error: Exception) -> None:
        if not isinstance(error, TritonError):
            error = internal(f"model '{self._instance.model.name}' failed: {type(error).__name__}: {error}")
        self._instance.report_statistics(request, False, 0, 0, 0, 0)
        request.new_response().send(ResponseFlag.FINAL, error)
        request.release()


def add_dims(tensor: ModelInput | ModelOutput, shape: Sequence[int], *, batches: bool) -> None:
    """Completes the `dims` of a configured tensor from the model's shape; -1 = variable. batches: its first dimension
    is that of the batch. Because `dims` cannot be empty, a tensor with one value per row has `reshape`, as in Triton.
    """
    dims = shape[1:] if batches else shape
    tensor.dims.extend(dims or [1])
    if batches and not dims:
        tensor.reshape.SetInParent()


def _dtype(data_type: int) -> np.dtype[Any]:
    return NUMPY_DTYPE[DATATYPE_OF_CONFIG_TYPE[DataType.Name(data_type)]]


# --- ragged batches: the host lets requests with unequal ragged inputs share a batch ----------------------------------


def batch_input_names(config: ModelConfig) -> list[str]:
    """Inputs of the model that are derived from a batch and that no request has."""
    return [name for item in config.batch_input for name in item.target_name]


def ragged_input(requests: Sequence[Request], name: str) -> Array:
    """An `allow_ragged_batch` input of the whole batch: all elements in one dimension, in request order."""
    return np.concatenate([request.inputs[name].data.reshape(-1) for request in requests])


def batch_inputs(config: ModelConfig, requests: Sequence[Request]) -> dict[str, Array]:
    """The tensors of `batch_input` by name."""
    return {
        target: _batch_input(item, requests).astype(_dtype(item.data_type))
        for item in config.batch_input
        for target in item.target_name
    }


def _batch_input(item: BatchInput, requests: Sequence[Request]) -> Array:
    shapes = [request.inputs[item.source_input[0]].shape for request in requests]
    counts = [element_count(shape) for shape in shapes]
    match kind := BatchInput.Kind.Name(item.kind):
        case "BATCH_ELEMENT_COUNT":
            return np.array(counts)
        case "BATCH_ACCUMULATED_ELEMENT_COUNT":
            return np.cumsum(counts)
        case "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
            return np.cumsum([0, *counts])
        case "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
            return np.zeros(max(counts))  # only its shape matters
    items = np.array([shape[1:] for shape in shapes for _ in range(shape[0])]).reshape(-1, len(shapes[0]) - 1)
    return items if kind == "BATCH_ITEM_SHAPE" else items.reshape(-1)  # BATCH_ITEM_SHAPE_FLATTEN


def scattered_output(config: ModelConfig, name: str, joined: Array, requests: Sequence[Request]) -> list[Array]:
    """An output of `batch_output`, split into one array per request. Variable dimensions are those of the source input.

    Raises TritonError INTERNAL if the number of elements does not match the requests.
    """
    item = next(item for item in config.batch_output if name in item.target_name)
    dims = next(output.dims for output in config.output if output.name == name)
    pattern = [-1, *dims] if config.max_batch_size else list(dims)
    shapes = [_filled(pattern, request.inputs[item.source_input[0]].shape, name) for request in requests]
    sizes = [element_count(shape) for shape in shapes]
    flat = joined.reshape(-1)
    if sum(sizes) != flat.size:
        raise internal(f"batch output '{name}' has {flat.size} elements, expected {sum(sizes)}")
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _filled(pattern: Sequence[int], source: Sequence[int], name: str) -> tuple[int, ...]:
    if any(dim == -1 and index >= len(source) for index, dim in enumerate(pattern)):
        raise internal(f"batch output '{name}' has more dimensions than its source input")
    return tuple(source[index] if dim == -1 else dim for index, dim in enumerate(pattern))
