"""The `onnxruntime` backend, with one session per instance.

Missing parts of a configuration are completed. A configured tensor that the graph does not have is refused at load.
Only configured outputs are computed. Source: the parameters and auto-complete rules of Triton's ONNX Runtime backend.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tritonclient.grpc.model_config_pb2 import DataType, ModelInput

from llmbackend.backends.array_backend import TRITONBACKEND_ModelFinalize as TRITONBACKEND_ModelFinalize
from llmbackend.backends.array_backend import TRITONBACKEND_ModelInstanceExecute as TRITONBACKEND_ModelInstanceExecute
from llmbackend.backends.array_backend import TRITONBACKEND_ModelInstanceFinalize as TRITONBACKEND_ModelInstanceFinalize
from llmbackend.core.backend_api import (
    ACCELERATORS_FIELD,
    Backend,
    BackendAttributes,
    Model,
    ModelConfig,
    ModelInstance,
    check_api_version,
    invalid_argument,
    not_found,
)

from ..array_backend import (
    BUILT_FOR_API,
    Array,
    ArrayInstance,
    Arrays,
    add_dims,
    boolean,
    output_names,
    read_parameters,
    sequence_inputs,
    thread_count,
)
from .accelerators import providers, warn_of_accelerators

_log = logging.getLogger(__name__)
_FILE = "model.onnx"
_TYPES = {
    "tensor(bool)": "BOOL", "tensor(uint8)": "UINT8", "tensor(uint16)": "UINT16", "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64", "tensor(int8)": "INT8", "tensor(int16)": "INT16", "tensor(int32)": "INT32",
    "tensor(int64)": "INT64", "tensor(float16)": "FP16", "tensor(float)": "FP32", "tensor(double)": "FP64",
    "tensor(string)": "STRING",
}  # fmt: skip
_LEVELS = {
    "-1": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "0": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "1": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "2": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
_GRAPH_LEVELS = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
"""`optimization.graph.level`, as in Triton; all others, also 0, enable all optimizations."""
_MODES = {"0": onnxruntime.ExecutionMode.ORT_SEQUENTIAL, "1": onnxruntime.ExecutionMode.ORT_PARALLEL}
_THREAD_POOL = frozenset({"enable-global-threadpool", "intra_op_thread_count", "inter_op_thread_count"})
"""Settings of the global thread pool of Triton's backend."""
_QUIET = 3
"""ONNX Runtime's log level for errors only."""


def _one_of(values: dict[str, Any]) -> Any:
    def read(text: str) -> Any:
        if text not in values:
            raise ValueError(f"expected one of {', '.join(values)}")
        return values[text]

    return read


_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "intra_op_thread_count": ("intra_op_num_threads", thread_count),
    "inter_op_thread_count": ("inter_op_num_threads", thread_count),
    "execution_mode": ("execution_mode", _one_of(_MODES)),
    "level": ("graph_optimization_level", _one_of(_LEVELS)),
    "enable_mem_arena": ("enable_cpu_mem_arena", boolean),
    "enable_mem_pattern": ("enable_mem_pattern", boolean),
}
"""By parameter: the option of a session, and how its value is read."""


class ModelState:
    def __init__(self, model: Model) -> None:
        """Raises TritonError that names the wrong file or field."""
        self.name = model.name
        self.path = _find(model)
        settings = read_parameters(model.config, {name: read for name, (_, read) in _OPTIONS.items()})
        warn_of_accelerators(model.config)
        all_levels = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        self._options = {
            "graph_optimization_level": _GRAPH_LEVELS.get(model.config.optimization.graph.level, all_levels),
            **{_OPTIONS[name][0]: value for name, value in settings.items()},
        }

    def load_model(self, instance: ModelInstance) -> onnxruntime.InferenceSession:
        """Raises TritonError INVALID_ARG if the graph lacks configured tensors."""
        config = instance.model.config
        session = self._session(providers(config, instance.kind, instance.device_id))
        inputs = [*(tensor.name for tensor in config.input), *sequence_inputs(config)]
        _check_names(self.name, "input", inputs, _possible_inputs(session))
        _check_names(self.name, "output", output_names(config), session.get_outputs())
        return session

    def auto_complete(self, model: Model) -> None:
        """Takes tensors from the graph, which can batch if all tensors' first dimension is variable (Triton's
        AutoCompleteMaxBatch). Raises TritonError INVALID_ARG for a `max_batch_size` of a graph that cannot."""
        config = model.config
        if config.input and config.output:
            return
        session = self._session(["CPUExecutionProvider"])
        tensors = [*session.get_inputs(), *session.get_outputs()]
        batches = all(tensor.shape and not isinstance(tensor.shape[0], int) for tensor in tensors)
        if config.max_batch_size > 0 and not batches:
            raise invalid_argument(
                f"autofill failed for model '{self.name}': model does not support batching while non-zero "
                "max_batch_size is specified"
            )
        if batches and config.max_batch_size == 0 and not (config.input or config.output):
            config.max_batch_size = int(model.backend.config.get("default-max-batch-size", "4"))
        if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
            config.dynamic_batching.SetInParent()
        self._complete(config, session)
        model.set_config(config)

    def _complete(self, config: ModelConfig, session: onnxruntime.InferenceSession) -> None:
        for target, tensors in ((config.input, session.get_inputs()), (config.output, session.get_outputs())):
            if target:
                continue
            for tensor in tensors:
                added = target.add(name=tensor.name, data_type=_data_type(self.name, tensor))
                shape = [dim if isinstance(dim, int) else -1 for dim in tensor.shape]
                add_dims(added, shape, batches=config.max_batch_size > 0)

    def _session(self, chosen: Sequence[Any]) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _QUIET
        for name, value in self._options.items():
            setattr(options, name, value)
        try:
            return onnxruntime.InferenceSession(str(self.path), options, providers=chosen)
        except Exception as error:  # its errors have no common base class
            raise invalid_argument(f"failed to load model '{self.name}': {error}") from None


def _possible_inputs(session: onnxruntime.InferenceSession) -> list[Any]:
    """With the initializers that a request may replace."""
    return [*session.get_inputs(), *session.get_overridable_initializers()]


def _data_type(model: str, tensor: Any) -> Any:
    if tensor.type not in _TYPES:
        raise invalid_argument(
            f"model '{model}': tensor '{tensor.name}' is a {tensor.type}, which has no Triton datatype"
        )
    return DataType.Value(f"TYPE_{_TYPES[tensor.type]}")


def _check_names(model: str, what: str, configured: Sequence[str], tensors: Sequence[Any]) -> None:
    known = [tensor.name for tensor in tensors]
    if unknown := [name for name in configured if name not in known]:
        raise invalid_argument(
            f"model '{model}': {what} '{unknown[0]}' is not in the graph, expected one of {', '.join(known)}"
        )


def _find(model: Model) -> Path:
    path = model.version_directory / (model.config.default_model_filename or _FILE)
    if path.is_dir():  # a model with external weights
        path = path / _FILE
    if not path.is_file():
        raise not_found(f"unable to find '{path}' for model '{model.name}'")
    return path


class ModelInstanceState(ArrayInstance):
    def __init__(self, instance: ModelInstance, model_state: ModelState) -> None:
        super().__init__(instance)
        self.session = model_state.load_model(instance)
        config = instance.model.config
        self._names = output_names(config)
        self._scalars = frozenset() if self._batches else _scalars(config.input, _possible_inputs(self.session))
        self._dims = {output.name: [*(output.reshape.shape or output.dims)] for output in config.output}

    def execute(self, inputs: Arrays) -> Mapping[str, Array]:
        feed = {name: _texts(array) if array.dtype == np.object_ else array for name, array in inputs.items()}
        for name in self._scalars & feed.keys():
            feed[name] = feed[name].reshape(())
        outputs = dict(zip(self._names, map(_bytes, self.session.run(self._names, feed)), strict=True))
        if self._batches:
            return outputs
        return {name: self._with_dims(name, array) for name, array in outputs.items()}

    def _with_dims(self, name: str, array: Array) -> Array:
        """A scalar gets its configured dimensions."""
        return array if array.ndim else array.reshape(self._dims.get(name, [1]))


def _scalars(configured: Iterable[ModelInput], tensors: Iterable[Any]) -> frozenset[str]:
    """Names of the inputs that have no dimensions in the graph; as in Triton, their configured ones are 1."""
    names = {tensor.name for tensor in tensors if not tensor.shape}
    dims = {item.name: [*(item.reshape.shape or item.dims)] for item in configured}
    return frozenset(name for name in names & dims.keys() if {*dims[name]} == {1})


def _texts(array: Array) -> Array:
    return np.array([bytes(item).decode() for item in array.ravel()], np.object_).reshape(array.shape)


def _bytes(array: Array) -> Array:
    if array.dtype != np.object_:
        return array
    return np.array([str(item).encode() for item in array.ravel()], np.object_).reshape(array.shape)


def TRITONBACKEND_Initialize(backend: Backend) -> None:
    check_api_version(backend, BUILT_FOR_API)
    if ignored := sorted(_THREAD_POOL & backend.config.keys()):
        _log.warning(
            "--backend-config=onnxruntime: %s has no effect: each session has its own threads, set by the "
            "parameters of the model configuration",
            ", ".join(ignored),
        )


def TRITONBACKEND_GetBackendAttribute(backend: Backend, attributes: BackendAttributes) -> None:
    attributes.read_fields = frozenset({ACCELERATORS_FIELD, "optimization.graph"})


def TRITONBACKEND_ModelInitialize(model: Model) -> None:
    model.state = ModelState(model)
    if model.auto_complete_config:
        model.state.auto_complete(model)


def TRITONBACKEND_ModelInstanceInitialize(instance: ModelInstance) -> None:
    instance.state = ModelInstanceState(instance, instance.model.state)
