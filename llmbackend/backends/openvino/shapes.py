"""Shapes and data types: completes the configuration's from the model, checks them against the model's, and applies
them to the model.

Invariant: with max_batch_size above 0, the first dimension of every input is the batch dimension, either variable or
fixed at max_batch_size. Source: the auto-complete rules, ValidateInputs, ValidateOutputs and CompareDimsSupported of
Triton's OpenVINO backend, which always fixes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelInput, ModelOutput

from llmbackend.core.backend_api import ModelConfig, TritonError, invalid_argument

from ..array_backend import add_dims, batch_input_names, output_names, sequence_inputs
from .parameters import Settings
from .runtime import openvino, reason
from .tensors import data_type, element_type

VARIABLE = -1


def name_of(port: Any) -> str:
    return str(port.any_name if port.names else port.node.friendly_name)


def by_name(ports: Sequence[Any]) -> dict[str, int]:
    """The index of each input or output, by each of its names."""
    return {name: index for index, port in enumerate(ports) for name in (*port.names, name_of(port))}


def dims_of(port: Any) -> list[int]:
    """-1 = variable. Raises TritonError INVALID_ARG for a tensor of dynamic rank."""
    shape = port.partial_shape
    if shape.rank.is_dynamic:
        raise invalid_argument(f"tensor '{name_of(port)}' may have any number of dimensions, expected a fixed number")
    return [VARIABLE if dim.is_dynamic else dim.get_length() for dim in shape]


def complete(config: ModelConfig, network: Any, default_max_batch_size: int) -> None:
    """Adds missing tensors, and batching if all layouts have a batch dimension. Raises TritonError INVALID_ARG for
    a tensor that the host cannot represent."""
    if _has_batches([*network.inputs, *network.outputs]) and _leaves_out_batch(config, network):
        config.max_batch_size = config.max_batch_size or max(default_max_batch_size, 1)
        if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
            config.dynamic_batching.SetInParent()
    for tensors, ports in ((config.input, network.inputs), (config.output, network.outputs)):
        if not tensors:
            for port in ports:
                _add(config, tensors, port)


def _has_batches(ports: Sequence[Any]) -> bool:
    """Whether all layouts begin with the batch dimension, N."""
    layouts = [openvino.layout_helpers.get_layout(port) for port in ports]
    helpers = openvino.layout_helpers
    return all(helpers.has_batch(layout) and helpers.batch_idx(layout) == 0 for layout in layouts)


def _leaves_out_batch(config: ModelConfig, network: Any) -> bool:
    """Whether no configured tensor has as many dimensions as the corresponding one of the model."""
    for tensors, ports in ((config.input, network.inputs), (config.output, network.outputs)):
        indices = by_name(ports)
        for tensor in tensors:
            if tensor.name in indices and len(tensor.dims) >= len(dims_of(ports[indices[tensor.name]])):
                return False
    return True


def _add(config: ModelConfig, tensors: Any, port: Any) -> None:
    try:
        kind = data_type(port.element_type)
    except ValueError as error:
        raise invalid_argument(f"model '{config.name}': tensor '{name_of(port)}' {error}") from None
    added = tensors.add(name=name_of(port), data_type=kind)
    add_dims(added, dims_of(port), batches=config.max_batch_size > 0)


def check_names(config: ModelConfig, network: Any, settings: Settings) -> None:
    """Raises TritonError INVALID_ARG if the model has unconfigured inputs, or lacks configured tensors."""
    if settings.fixes_batch and (config.batch_input or any(tensor.allow_ragged_batch for tensor in config.input)):
        raise invalid_argument(
            f"model '{config.name}': a batch of fixed size (ENABLE_BATCH_PADDING, SKIP_OV_DYNAMIC_BATCHSIZE) cannot "
            "have ragged inputs or a 'batch_input'"
        )
    inputs = [*(tensor.name for tensor in config.input), *batch_input_names(config), *sequence_inputs(config)]
    _check_known(config.name, "input", inputs, network.inputs)
    _check_known(config.name, "output", output_names(config), network.outputs)
    if len(inputs) != len(network.inputs):
        raise invalid_argument(
            f"unable to load model '{config.name}', configuration expects {len(inputs)} inputs, model provides "
            f"{len(network.inputs)}: {', '.join(map(name_of, network.inputs))}"
        )


def _check_known(model: str, what: str, configured: Sequence[str], ports: Sequence[Any]) -> None:
    known = by_name(ports)
    if unknown := [name for name in configured if name not in known]:
        raise invalid_argument(
            f"model '{model}': {what} '{unknown[0]}' is not in the model, expected one of "
            f"{', '.join(map(name_of, ports))}"
        )


def reshape_inputs(config: ModelConfig, network: Any, settings: Settings) -> None:
    """Raises TritonError INVALID_ARG if the model cannot take the shapes."""
    indices = by_name(network.inputs)
    tensors = {indices[tensor.name]: tensor for tensor in config.input}
    shapes = {
        index: _wanted(port, tensors.get(index), config.max_batch_size, settings)
        for index, port in enumerate(network.inputs)
    }
    _reshape(config.name, network, shapes)


def _wanted(port: Any, tensor: ModelInput | None, max_batch_size: int, settings: Settings) -> Any:
    dims_of(port)  # raises for a tensor of dynamic rank
    dims = list(port.partial_shape)
    if settings.reshapes and tensor is not None and not tensor.allow_ragged_batch:
        dims[1 if max_batch_size else 0 :] = _shape(tensor)
    if max_batch_size:
        dims[:1] = [max_batch_size if settings.fixes_batch else VARIABLE]
    return openvino.PartialShape(dims)


def _reshape(model: str, network: Any, shapes: Mapping[int, Any]) -> None:
    if all(network.inputs[index].partial_shape == shape for index, shape in shapes.items()):
        return
    try:
        network.reshape(dict(shapes))
    except RuntimeError as error:
        raise invalid_argument(
            f"model '{model}' cannot be computed with inputs of the shapes "
            f"{', '.join(map(str, shapes.values()))}: {reason(error)}"
        ) from None


def check_shapes(config: ModelConfig, network: Any, settings: Settings) -> None:
    """Raises TritonError INVALID_ARG with Triton's text."""
    batch = (config.max_batch_size if settings.fixes_batch else VARIABLE) if config.max_batch_size else None
    inputs, outputs = by_name(network.inputs), by_name(network.outputs)
    scattered = {name for item in config.batch_output for name in item.target_name}
    for tensor in config.input:
        if not tensor.allow_ragged_batch:
            _check_shape(config.name, tensor, network.inputs[inputs[tensor.name]], batch, loose=batch is not None)
    for tensor in config.output:
        if tensor.name not in scattered:
            _check_shape(config.name, tensor, network.outputs[outputs[tensor.name]], batch, loose=False)


def _check_shape(model: str, tensor: ModelInput | ModelOutput, port: Any, batch: int | None, *, loose: bool) -> None:
    """loose: whether a variable dimension in the configuration matches any dimension of the model."""
    expected = [*([] if batch is None else [batch]), *_shape(tensor)]
    if port.partial_shape.rank.is_dynamic:
        return
    dims = list(port.partial_shape)
    if (dims, expected) == ([], [1]):
        return  # a scalar
    if len(dims) == len(expected) and all(map(_fits, dims, expected, [loose] * len(dims))):
        return
    raise _other_shape(model, tensor.name, dims_of(port), expected, batch)


def _fits(dim: Any, expected: int, loose: bool) -> bool:
    if expected == VARIABLE:
        return loose or bool(dim.is_dynamic)
    return bool(dim.compatible(openvino.Dimension(expected)))


def _other_shape(model: str, tensor: str, dims: list[int], expected: list[int], batch: int | None) -> TritonError:
    shape = f"shape {expected}"
    if batch is not None:
        shape = (
            "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making "
            f"complete shape {expected}"
        )
    return invalid_argument(
        f"model '{model}', tensor '{tensor}': the model expects {len(dims)} dimensions (shape {dims}) but the model "
        f"configuration specifies {len(expected)} dimensions ({shape})"
    )


def _shape(tensor: ModelInput | ModelOutput) -> list[int]:
    return list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)


def convert_types(config: ModelConfig, network: Any) -> Any:
    """The model with the configured data types of inputs, outputs and states; OpenVINO converts those that differ."""
    states = config.sequence_batching.state
    inputs = {**{item.input_name: item.data_type for item in states}, **_types(config.input)}
    outputs = {**{item.output_name: item.data_type for item in states}, **_types(config.output)}
    processor = openvino.preprocess.PrePostProcessor(network)
    if not (_convert(inputs, network.inputs, processor.input) | _convert(outputs, network.outputs, processor.output)):
        return network
    try:
        return processor.build()
    except RuntimeError as error:
        raise invalid_argument(
            f"model '{config.name}' cannot convert to the configured data types: {reason(error)}"
        ) from None


def _types(tensors: Iterable[ModelInput | ModelOutput]) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in tensors}


def _convert(types: Mapping[str, int], ports: Sequence[Any], part: Callable[[int], Any]) -> bool:
    """Returns whether any differs."""
    indices = by_name(ports)
    different = {indices[name]: element_type(kind) for name, kind in types.items()}
    different = {index: wanted for index, wanted in different.items() if ports[index].element_type != wanted}
    for index, wanted in different.items():
        part(index).tensor().set_element_type(wanted)
    return bool(different)
