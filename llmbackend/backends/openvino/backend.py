"""The `openvino` backend: the model is compiled once, with one infer request per instance.

Missing parts of a configuration are completed, and it is checked against the model at load. Only configured outputs are
returned. Unlike in Triton's, a batch may have any number of rows, unless a parameter fixes it. Source: Triton's
OpenVINO backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmbackend.backends.array_backend import TRITONBACKEND_Initialize as TRITONBACKEND_Initialize
from llmbackend.backends.array_backend import TRITONBACKEND_ModelFinalize as TRITONBACKEND_ModelFinalize
from llmbackend.backends.array_backend import TRITONBACKEND_ModelInstanceExecute as TRITONBACKEND_ModelInstanceExecute
from llmbackend.backends.array_backend import TRITONBACKEND_ModelInstanceFinalize as TRITONBACKEND_ModelInstanceFinalize
from llmbackend.core.backend_api import (
    Backend,
    BackendAttributes,
    InstanceGroupKind,
    Model,
    ModelInstance,
    internal,
    invalid_argument,
    unavailable,
)

from ..array_backend import Array, ArrayInstance, Arrays, output_names
from .parameters import Settings
from .runtime import openvino, reason
from .shapes import by_name, check_names, check_shapes, complete, convert_types, dims_of, name_of, reshape_inputs
from .tensors import fill, to_array

_FILE = "model.xml"


class ModelState:
    def __init__(self, model: Model) -> None:
        """Raises TritonError that names the wrong file or field."""
        self.name = model.name
        self.settings = Settings.of(model)
        self._path = _find(model)
        self._core = openvino.Core()
        if self.settings.extension:
            self._add_extension(self.settings.extension)

    def load_model(self, model: Model) -> None:
        """Completes the configuration, if permitted, and compiles the model. Raises TritonError INVALID_ARG."""
        network = self._read()
        if model.auto_complete_config:
            config = model.config
            complete(config, network, int(model.backend.config.get("default-max-batch-size", "4")))
            model.set_config(config)
        config = model.config
        check_names(config, network, self.settings)
        reshape_inputs(config, network, self.settings)
        check_shapes(config, network, self.settings)
        self.compiled = self._compile(convert_types(config, network))

    def _add_extension(self, path: str) -> None:
        try:
            self._core.add_extension(path)
        except RuntimeError as error:
            raise invalid_argument(
                f"model '{self.name}': parameter 'CPU_EXTENSION_PATH' is '{path}': {reason(error)}"
            ) from None

    def _read(self) -> Any:
        try:
            return self._core.read_model(self._path)
        except RuntimeError as error:
            weights = self._path.with_suffix(".bin")
            absent = f" ('{weights.name}' is missing next to it)" if not _has_weights(self._path) else ""
            raise invalid_argument(
                f"failed to load model '{self.name}': {self._path.name}: {reason(error)}{absent}"
            ) from None

    def _compile(self, network: Any) -> Any:
        device = self.settings.device
        try:
            return self._core.compile_model(network, device, self.settings.supported_properties(self._core, self.name))
        except RuntimeError as error:
            available = ", ".join(self._core.available_devices)
            raise invalid_argument(
                f"failed to load model '{self.name}' on device '{device}' (available: {available}): {reason(error)}"
            ) from None


def _has_weights(path: Path) -> bool:
    return path.suffix != ".xml" or path.with_suffix(".bin").is_file()


def _find(model: Model) -> Path:
    path = model.version_directory / (model.config.default_model_filename or _FILE)
    if not path.exists():
        raise unavailable(
            f"unable to find '{path}' for model '{model.name}'; for a file in another format, set "
            "'default_model_filename'"
        )
    return path


class ModelInstanceState(ArrayInstance):
    def __init__(self, instance: ModelInstance, model_state: ModelState) -> None:
        """Raises TritonError INVALID_ARG for a GPU instance: OpenVINO's devices are not the host's."""
        super().__init__(instance)
        self._model = model_state.name
        if instance.kind is not InstanceGroupKind.CPU:
            raise invalid_argument(
                f"unable to load model '{self._model}': the openvino backend supports only instances of KIND_CPU, "
                f"got {instance.kind.value}; the parameter TARGET_DEVICE chooses OpenVINO's device"
            )
        config = instance.model.config
        self._rows = config.max_batch_size if model_state.settings.fixes_batch else 0
        self._pads = model_state.settings.pads_batch
        self._ports = model_state.compiled.inputs
        self._inputs = by_name(self._ports)
        indices = by_name(model_state.compiled.outputs)
        self._given = {name: indices[name] for name in output_names(config)}
        self._infer_request = model_state.compiled.create_infer_request()

    def execute(self, inputs: Arrays) -> Mapping[str, Array]:
        given = {index: self._as_scalar(index, inputs[name]) for name, index in self._inputs.items() if name in inputs}
        self._check(given)
        num_rows = len(given[0]) if self._rows else 0
        for index, array in given.items():
            fill(self._infer_request.get_input_tensor(index), self._padded(array))
        self._infer_request.start_async()
        self._infer_request.wait()
        outputs = {name: to_array(self._infer_request.get_output_tensor(index)) for name, index in self._given.items()}
        return {name: array[:num_rows] for name, array in outputs.items()} if self._rows else outputs

    def _check(self, given: Mapping[int, Array]) -> None:
        """If an input were missing, the model would silently use that of an earlier request."""
        for index, port in enumerate(self._ports):
            if index not in given:
                raise invalid_argument(f"model '{self._model}' needs a value for its input '{name_of(port)}'")
            shape = [*given[index].shape]
            if not _takes(port, [self._rows, *shape[1:]] if self._rows else shape):
                raise invalid_argument(
                    f"input '{name_of(port)}' of model '{self._model}' has shape {shape}, expected {dims_of(port)}"
                )
        if self._rows and not self._pads and len(given[0]) != self._rows:
            raise internal(
                f"expected requests with batch size '{self._rows}', got '{len(given[0])}'... this error can be avoided "
                "by setting 'ENABLE_BATCH_PADDING' parameter in model configuration to 'YES' at a performance cost."
            )

    def _as_scalar(self, index: int, array: Array) -> Array:
        """For tensors that have a dimension in the host but none in the model."""
        return array.reshape(()) if len(self._ports[index].partial_shape) == 0 and array.shape == (1,) else array

    def _padded(self, array: Array) -> Array:
        missing = self._rows - len(array) if self._rows else 0
        if missing <= 0:
            return array
        zero = b"" if array.dtype == np.object_ else 0
        return np.concatenate([array, np.full((missing, *array.shape[1:]), zero, array.dtype)])


def _takes(port: Any, shape: list[int]) -> bool:
    return bool(port.partial_shape.compatible(openvino.PartialShape(shape)))


def TRITONBACKEND_GetBackendAttribute(backend: Backend, attributes: BackendAttributes) -> None:
    attributes.preferred_groups = [(InstanceGroupKind.CPU, 1)]


def TRITONBACKEND_ModelInitialize(model: Model) -> None:
    model.state = ModelState(model)
    model.state.load_model(model)


def TRITONBACKEND_ModelInstanceInitialize(instance: ModelInstance) -> None:
    instance.state = ModelInstanceState(instance, instance.model.state)
