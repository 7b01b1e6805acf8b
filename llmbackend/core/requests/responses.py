"""How the host transforms responses between a backend and the client's callback: reshape, classification.

Invariants: every callback call leads to one call of the next callback, with the same flags; a response that cannot be
transformed becomes an error; a request that needs no transformation keeps its own callback.
Source: InferenceResponse in Triton's core; the classification extension, classification.cc, label_provider.cc.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from tritonclient.grpc.model_config_pb2 import ModelConfig

from ..errors import TritonError, internal, invalid_argument, unsupported
from ..files import path_inside
from ..messages import InferenceRequest, InferenceResponse, ResponseCallback, ResponseFlag, is_final
from ..metrics.metric_family import Family
from ..metrics.model_metrics import FirstResponse
from ..tensors import Tensor
from .request_validation import Reshape, output_reshapes

Transform = Callable[[InferenceResponse], InferenceResponse]
"""Transforms a response without an error. May raise TritonError."""
Labels = Mapping[str, Sequence[str]]
"""For each output with labels: the label of each index."""
MAX_CLASSES = 1 << 16
"""Results of one output, over its whole batch. The bound is ours."""
_UNSUPPORTED = frozenset({"BOOL", "FP16", "BF16", "BYTES"})


class ResponseTransforms:
    """Transforms the responses of one model version: reshape, classification, first-response time."""

    def __init__(self, config: ModelConfig, directory: Path, first_response: Family | None) -> None:
        """Raises TritonError for a label file that cannot be read."""
        self._labels = read_labels(config, directory)
        self._reshapes = output_reshapes(config)
        self._batches = config.max_batch_size > 0
        self._first_response = first_response

    def wrap(self, callback: ResponseCallback, request: InferenceRequest) -> ResponseCallback:
        """A callback that transforms the backend's responses as required by `request`, then calls `callback`."""
        if request.classes:
            classify = partial(_classified, request.classes, self._labels, self._batches)
            callback = TransformedCallback(callback, classify)
        if self._reshapes:
            callback = TransformedCallback(callback, partial(_reshaped, self._reshapes))
        if self._first_response is not None:
            callback = FirstResponse(callback, self._first_response)
        return callback


class TransformedCallback:
    """A response callback that transforms responses, then calls `callback`. on_final: called before the last call of
    `callback`, so that the request's resources are already released when the client gets its last response."""

    __slots__ = ("_callback", "_on_final", "_transform")

    def __init__(
        self, callback: ResponseCallback, transform: Transform, on_final: Callable[[], None] | None = None
    ) -> None:
        self._callback = callback
        self._transform = transform
        self._on_final = on_final

    def __call__(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        if response is not None and response.error is None:
            response = self._transformed(response)
        if self._on_final is not None and is_final(flags):
            self._on_final()
        self._callback(response, flags)

    def _transformed(self, response: InferenceResponse) -> InferenceResponse:
        try:
            return self._transform(response)
        except TritonError as error:
            name, version, request_id = response.model_name, response.model_version, response.request_id
            return InferenceResponse(name, version, request_id, error=error.copy(), delta=response.delta)


def _reshaped(reshapes: Mapping[str, Reshape], response: InferenceResponse) -> InferenceResponse:
    """Gives outputs the shape that clients expect. Raises TritonError INTERNAL for an output whose shape differs from
    the configuration."""
    try:
        outputs = tuple(
            reshapes[tensor.name].apply(tensor) if tensor.name in reshapes else tensor for tensor in response.outputs
        )
    except ValueError as error:
        raise internal(f"an output of model '{response.model_name}' cannot be reshaped: {error}") from None
    return msgspec.structs.replace(response, outputs=outputs)


# --- classification: the largest elements of an output as text, `value:index[:label]` ---------------------------------


def read_labels(config: ModelConfig, directory: Path) -> Labels:
    """The label files of the outputs. Raises TritonError: UNSUPPORTED for a file outside the model's directory,
    INTERNAL for one that cannot be read."""
    return {
        output.name: _read(config.name, output.name, directory, output.label_filename)
        for output in config.output
        if output.label_filename
    }


def _read(model: str, output: str, directory: Path, filename: str) -> list[str]:
    path = path_inside(directory, filename)
    if path is None:
        raise unsupported(
            f"label file path {filename!r} for output '{output}' in model '{model}' is outside model directory"
        )
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise internal(f"failed to open text file for read {filename}: {reason}") from None


def _classified(
    classes: Mapping[str, int], labels: Labels, batches: bool, response: InferenceResponse
) -> InferenceResponse:
    """Replaces each output in `classes` by the given number of its largest elements, in descending order."""
    outputs = tuple(
        _top(tensor, classes[tensor.name], labels.get(tensor.name, ()), batches) if tensor.name in classes else tensor
        for tensor in response.outputs
    )
    return msgspec.structs.replace(response, outputs=outputs)


def _top(tensor: Tensor, count: int, labels: Sequence[str], batches: bool) -> Tensor:
    """Raises TritonError INVALID_ARG for an unsupported datatype and for more than MAX_CLASSES results."""
    if tensor.datatype in _UNSUPPORTED:
        raise invalid_argument(f"class result not available for output due to unsupported type '{tensor.datatype}'")
    batch = tensor.shape[:1] if batches else ()
    rows = tensor.data.reshape(*(batch or (1,)), -1) if tensor.data.size else np.empty((*(batch or (1,)), 0))
    if (wanted := len(rows) * min(count, rows.shape[-1])) > MAX_CLASSES:
        raise invalid_argument(
            f"output '{tensor.name}' has {wanted} classes in this request, at most {MAX_CLASSES} are accepted"
        )
    texts = [text for row in rows for text in _classes(row, count, labels)]
    shape = (*batch, min(count, rows.shape[-1]))
    return Tensor(tensor.name, "BYTES", shape, np.array(texts, np.object_).reshape(shape))


def _classes(row: npt.NDArray[Any], count: int, labels: Sequence[str]) -> list[bytes]:
    # Sorted backwards from the end, so that equal elements keep their order.
    order = len(row) - 1 - np.argsort(row[::-1], kind="stable")[::-1]
    return [f"{_value(row[index])}:{index}{_suffix(labels, index)}".encode() for index in order[:count]]


def _value(element: Any) -> str:
    """The number as printed by C++: floating-point numbers have six decimals."""
    return f"{element:f}" if isinstance(element, np.floating) else f"{element}"


def _suffix(labels: Sequence[str], index: int) -> str:
    """An empty label counts as none."""
    return f":{labels[index]}" if index < len(labels) and labels[index] else ""
