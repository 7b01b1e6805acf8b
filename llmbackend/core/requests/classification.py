"""The classification extension: the largest elements of an output as text, `value:index[:label]`.

For: LoadedModel. Does not know: protocols. Invariants: a label file lies in its model's directory; per element of the
batch there are as many classes as asked for, or as the output has elements, largest first and of equals the first.
Source: Triton's classification extension, classification.cc, label_provider.cc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.errors import internal, invalid_argument, unsupported
from llmbackend.core.messages import InferenceResponse
from llmbackend.core.tensors import Tensor

from .delivery import Step

Labels = Mapping[str, Sequence[str]]
"""Of each output that has some: the label of each index."""
MOST_CLASSES = 1 << 16
"""Results of one output, over its whole batch: each is a Python string. The bound is ours; Triton has none."""
_UNSUPPORTED = frozenset({"BOOL", "FP16", "BF16", "BYTES"})


def read_labels(config: ModelConfig, directory: Path) -> Labels:
    """The label files that the outputs name. Raises TritonError: UNSUPPORTED for one outside of the model's directory,
    INTERNAL for one that can not be read."""
    return {
        output.name: _read(config.name, output.name, directory, output.label_filename)
        for output in config.output
        if output.label_filename
    }


def _read(model: str, output: str, directory: Path, filename: str) -> list[str]:
    try:
        path = (directory / filename).resolve()
        is_inside = path.is_relative_to(directory.resolve())
    except (OSError, ValueError):  # a loop of links; a NUL
        is_inside = False
    if not is_inside:
        raise unsupported(
            f"label file path {filename!r} for output '{output}' in model '{model}' is outside model directory"
        )
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise internal(f"failed to open text file for read {filename}: {reason}") from None


def classifying(classes: Mapping[str, int], labels: Labels, batches: bool) -> Step:
    """Replaces each output named in `classes` by its so many largest elements."""
    return partial(_classified, classes, labels, batches)


def _classified(
    classes: Mapping[str, int], labels: Labels, batches: bool, response: InferenceResponse
) -> InferenceResponse:
    outputs = tuple(
        _top(tensor, classes[tensor.name], labels.get(tensor.name, ()), batches) if tensor.name in classes else tensor
        for tensor in response.outputs
    )
    return replace(response, outputs=outputs)


def _top(tensor: Tensor, count: int, labels: Sequence[str], batches: bool) -> Tensor:
    """Raises TritonError INVALID_ARG for a datatype whose elements have no order that a client could read, or for more
    than MOST_CLASSES results."""
    if tensor.datatype in _UNSUPPORTED:
        raise invalid_argument(f"class result not available for output due to unsupported type '{tensor.datatype}'")
    batch = tensor.shape[:1] if batches else ()
    rows = tensor.data.reshape(*(batch or (1,)), -1) if tensor.data.size else np.empty((*(batch or (1,)), 0))
    if (wanted := len(rows) * min(count, rows.shape[-1])) > MOST_CLASSES:
        raise invalid_argument(
            f"output '{tensor.name}' has {wanted} classes for this request, at most {MOST_CLASSES} are accepted"
        )
    texts = [text for row in rows for text in _classes(row, count, labels)]
    data = np.empty(len(texts), dtype=np.object_)
    data[:] = texts
    shape = (*batch, min(count, rows.shape[-1]))
    return Tensor(tensor.name, "BYTES", shape, data.reshape(shape))


def _classes(row: npt.NDArray[Any], count: int, labels: Sequence[str]) -> list[bytes]:
    # Sorted backwards from the end, so that of equal elements the first comes first.
    order = len(row) - 1 - np.argsort(row[::-1], kind="stable")[::-1]
    return [f"{_value(row[index])}:{index}{_suffix(labels, index)}".encode() for index in order[:count]]


def _value(element: Any) -> str:
    """As C++ prints numbers: six decimals, and integers as they are."""
    return f"{element:f}" if isinstance(element, np.floating) else f"{element}"


def _suffix(labels: Sequence[str], index: int) -> str:
    """An empty label is none."""
    return f":{labels[index]}" if index < len(labels) and labels[index] else ""
