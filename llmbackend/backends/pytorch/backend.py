"""The `pytorch` backend: TorchScript archives and torch.export programs, one copy per instance.

A configuration whose inputs do not match the program's arguments is refused at load. Tensors share memory only with
writable arrays of requests. Source: the naming rules and parameters of Triton's PyTorch backend.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from llmbackend.backends.array_backend import LLMBACKEND_API_VERSION as LLMBACKEND_API_VERSION
from llmbackend.backends.array_backend import LLMBACKEND_ModelInstanceMemoryUsage as LLMBACKEND_ModelInstanceMemoryUsage
from llmbackend.backends.array_backend import TRITONBACKEND_Initialize as TRITONBACKEND_Initialize
from llmbackend.backends.array_backend import TRITONBACKEND_ModelFinalize as TRITONBACKEND_ModelFinalize
from llmbackend.backends.array_backend import TRITONBACKEND_ModelInstanceExecute as TRITONBACKEND_ModelInstanceExecute
from llmbackend.backends.array_backend import TRITONBACKEND_ModelInstanceFinalize as TRITONBACKEND_ModelInstanceFinalize
from llmbackend.core.backend_api import (
    InstanceGroupKind,
    MemoryType,
    MemoryUsage,
    Model,
    ModelInstance,
    internal,
    invalid_argument,
    not_found,
    unsupported,
)

from ..array_backend import (
    Array,
    ArrayInstance,
    Arrays,
    batch_input_names,
    boolean,
    output_names,
    read_parameters,
    sequence_inputs,
    thread_count,
)

_FILES = ("model.pt", "model.pt2")
_INDEXED = re.compile(r"^.+__(\d+)$")
_PARAMETERS = {
    "INFERENCE_MODE": boolean,
    "DISABLE_OPTIMIZED_EXECUTION": boolean,
    "INTRA_OP_THREAD_COUNT": thread_count,
}
_BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Program:
    """A loaded program.

    call          called with tensors in the order of the arguments
    arguments     their names; None = there is one argument, a dict of all tensors by name
    device        torch's name
    weight_bytes  size of its parameters and buffers
    """

    call: Callable[..., Any]
    arguments: tuple[str, ...] | None
    device: str
    weight_bytes: int

    def run(self, tensors: dict[str, Any]) -> tuple[Any, ...]:
        """tensors: in the order of the arguments."""
        result = self.call(tensors) if self.arguments is None else self.call(*tensors.values())
        is_texts = isinstance(result, list) and all(isinstance(item, str) for item in result)
        return tuple(result) if isinstance(result, tuple | list) and not is_texts else (result,)


def load_torchscript(path: Path, device: str, settings: Mapping[str, Any]) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript itself
        module = torch.jit.load(str(path), map_location=device)  # type: ignore[no-untyped-call]
        module.eval()
        schema = module.forward.schema
    optimise = not settings.get("DISABLE_OPTIMIZED_EXECUTION", False)

    def call(*tensors: Any) -> Any:
        try:
            with torch.jit.optimized_execution(optimise):  # type: ignore[attr-defined]
                return module(*tensors)
        except torch.jit.Error as error:  # its text ends with the program's exception
            raise RuntimeError(str(error).strip().splitlines()[-1]) from None

    arguments = schema.arguments[1:]
    takes_dict = [argument.type.kind() for argument in arguments] == ["DictType"]
    names = None if takes_dict else tuple(argument.name for argument in arguments)
    return Program(call, names, device, _weight_bytes(module))


def load_exported(path: Path, device: str, settings: Mapping[str, Any]) -> Program:
    exported = torch.export.load(str(path))
    arguments = exported.graph_signature.user_inputs
    module = exported.module().to(device)
    return Program(module, tuple(str(argument) for argument in arguments), device, _weight_bytes(module))


def _weight_bytes(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


class ModelState:
    def __init__(self, model: Model) -> None:
        """Raises TritonError that names the wrong file or field."""
        config = model.config
        self.name = model.name
        self.path = _find(model)
        self.settings: dict[str, Any] = read_parameters(config, _PARAMETERS)
        self.inputs = [*(tensor.name for tensor in config.input), *batch_input_names(config), *sequence_inputs(config)]
        self.outputs = in_order(output_names(config))
        if not self.inputs or not self.outputs:
            raise invalid_argument(f"model '{model.name}': a PyTorch model's inputs and outputs must be configured")
        if any(tensor.optional for tensor in config.input):
            raise unsupported(f"model '{model.name}': a PyTorch program has no optional inputs")

    def load_model(self, device: str) -> Program:
        """Raises TritonError INVALID_ARG if the file cannot be loaded, or has other arguments than configured."""
        load = load_exported if self.path.suffix == ".pt2" else load_torchscript
        try:
            program = load(self.path, device, self.settings)
        except Exception as error:  # the loader raises errors of many types
            raise invalid_argument(f"failed to load model '{self.name}': {_first_line(error)}") from None
        arguments = program.arguments
        if arguments is not None and len(arguments) != len(self.inputs):
            raise invalid_argument(
                f"model '{self.name}': inputs are {', '.join(self.inputs)}, but the program's arguments are "
                f"{', '.join(arguments) or 'none'}"
            )
        return program

    def arranged(self, arguments: Sequence[str] | None) -> list[str]:
        """The inputs' names in the order of the program's arguments: by name, index, or as configured."""
        if arguments is not None and set(arguments) == set(self.inputs):
            return list(arguments)
        return in_order(self.inputs)


def in_order(names: list[str]) -> list[str]:
    """Sorted by the index in names of the form <name>__<index> if all have one; else in configured order."""
    indices = [int(match[1]) for name in names if (match := _INDEXED.match(name))]
    if len(indices) != len(names):
        return names
    return [name for _, name in sorted(zip(indices, names, strict=True))]


def _find(model: Model) -> Path:
    named = model.config.default_model_filename
    for name in (named,) if named else _FILES:
        path = model.version_directory / name
        if path.exists():
            return path
    raise not_found(f"unable to find '{model.version_directory / (named or _FILES[0])}' for model '{model.name}'")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class ModelInstanceState(ArrayInstance):
    def __init__(self, instance: ModelInstance, model_state: ModelState) -> None:
        super().__init__(instance)
        is_gpu = instance.kind is InstanceGroupKind.GPU
        self._device = f"cuda:{instance.device_id}" if is_gpu else "cpu"
        settings = model_state.settings
        if threads := settings.get("INTRA_OP_THREAD_COUNT"):
            torch.set_num_threads(threads)  # affects the whole process, as in Triton
        self._program = model_state.load_model(self._device)
        self._inputs = model_state.arranged(self._program.arguments)
        self._output_names = model_state.outputs
        self._grad = torch.inference_mode if settings.get("INFERENCE_MODE", True) else torch.no_grad

    def memory_usage(self) -> Sequence[MemoryUsage]:
        """The memory of the weights."""
        weight_bytes = self._program.weight_bytes
        if not weight_bytes:
            return ()
        if self._device == "cpu":
            return [MemoryUsage(kind, 0, weight_bytes) for kind in (MemoryType.CPU, MemoryType.CPU_WEIGHTS)]
        device_id = self._instance.device_id
        return [MemoryUsage(kind, device_id, weight_bytes) for kind in (MemoryType.GPU, MemoryType.GPU_WEIGHTS)]

    def execute(self, inputs: Arrays) -> Mapping[str, Array]:
        with self._grad():
            tensors = {name: to_torch(inputs[name], self._device) for name in self._inputs}
            outputs = self._program.run(tensors)
            if len(outputs) < len(self._output_names):
                raise internal(f"the program returned {len(outputs)} outputs, expected {len(self._output_names)}")
            return {name: to_numpy(output) for name, output in zip(self._output_names, outputs, strict=False)}


def to_torch(array: Array, device: str) -> Any:
    """A tensor; a list of str for an array of bytes, which TorchScript takes as List[str]."""
    if array.dtype == np.object_:
        return [bytes(item).decode() for item in array.ravel()]
    writable = array if array.flags.writeable else array.copy()
    if array.dtype == _BF16:
        return torch.from_numpy(writable.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(writable).to(device)


def to_numpy(output: Any) -> Array:
    if isinstance(output, list):
        return np.array([str(item).encode() for item in output], np.object_)
    tensor = output.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_BF16)  # type: ignore[no-any-return]
    return tensor.numpy()  # type: ignore[no-any-return]


def TRITONBACKEND_ModelInitialize(model: Model) -> None:
    model.state = ModelState(model)


def TRITONBACKEND_ModelInstanceInitialize(instance: ModelInstance) -> None:
    instance.state = ModelInstanceState(instance, instance.model.state)
