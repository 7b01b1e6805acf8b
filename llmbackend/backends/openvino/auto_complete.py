"""Completes a configuration from the model: missing tensors, and batching if all layouts have a batch dimension.

Source: the auto-complete rules of Triton's OpenVINO backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmbackend.core.backend_api import ModelConfig, invalid_argument

from ..array_backend import add_dims
from .runtime import openvino
from .shapes import by_name, dims_of, name_of
from .tensors import data_type


def complete(config: ModelConfig, network: Any, default_max_batch_size: int) -> None:
    """Raises TritonError INVALID_ARG for a tensor that the host cannot represent."""
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
