"""Small OpenVINO models for tests, made with its own API and written as `model.xml` and `model.bin`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmbackend.backends.openvino.runtime import openvino

op: Any = openvino.opset13


def parameter(name: str, *dims: Any, kind: str = "f32", layout: str = "") -> Any:
    made = op.parameter(openvino.PartialShape(list(dims)), getattr(openvino.Type, kind), name=name)
    made.output(0).get_tensor().set_names({name})
    if layout:
        made.set_layout(openvino.Layout(layout))
    return made


def result(name: str, node: Any, layout: str = "") -> Any:
    node.output(0).get_tensor().set_names({name})
    made = op.result(node)
    if layout:
        made.set_layout(openvino.Layout(layout))
    return made


def save(directory: Path, results: Sequence[Any], parameters: Sequence[Any]) -> None:
    openvino.serialize(openvino.Model(list(results), list(parameters), "model"), str(directory / "model.xml"))


def save_sum(directory: Path, rows: Any = -1, layout: str = "N...") -> None:
    """total = a + b; scaled = total * [1, 2, 3], whose weights are in model.bin."""
    a, b = parameter("a", rows, 3, layout=layout), parameter("b", rows, 3, layout=layout)
    total = op.add(a, b)
    scaled = op.multiply(total, op.constant(np.array([[1, 2, 3]], np.float32)))
    save(directory, [result("total", total, layout), result("scaled", scaled, layout)], [a, b])


def save_reversed(directory: Path, kind: str) -> None:
    """y = x from behind, of any type but `string`, in one dimension of any size."""
    x = parameter("x", -1, kind=kind)
    ends = [op.constant(np.array([end])) for end in (-1, np.iinfo(np.int64).min, -1)]
    save(directory, [result("y", op.strided_slice(x, *ends, [0], [0]))], [x])
