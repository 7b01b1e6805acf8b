"""Shared by the python backend's tests: models as files, and their inputs and outputs."""

from __future__ import annotations

import numpy as np

from llmbackend.core.messages import InferenceResponse
from llmbackend.core.tensors import Tensor

ECHO_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
TEXT_CONFIG = """
backend: "python"
input [ { name: "T" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "O" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
output [ { name: "R" data_type: TYPE_STRING dims: [ -1 ] }, { name: "S" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
DECOUPLED_CONFIG = TEXT_CONFIG + "model_transaction_policy { decoupled: true }\n"
HEAD = "import json, threading, time, numpy as np\nimport triton_python_backend_utils as pb_utils\n"
ECHO = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(r, "X").as_numpy())])
                for r in requests]
"""
)


def body(execute: str, *, is_async: bool = False, rest: str = "") -> str:
    """A model.py around the lines of its execute."""
    lines = "".join(f"        {line}\n" for line in execute.strip("\n").splitlines())
    start = "async def" if is_async else "def"
    return f"{HEAD}class TritonPythonModel:\n    {start} execute(self, requests):\n{lines}{rest}"


def numbers(*rows: tuple[float, float]) -> list[Tensor]:
    return [Tensor.of("X", np.array(rows, dtype=np.float32))]


def text(value: str) -> list[Tensor]:
    return [Tensor.text("T", value)]


def values(response: InferenceResponse) -> dict[str, list[object]]:
    return {tensor.name: tensor.data.tolist() for tensor in response.outputs}


def answer_line(value: str = 'b"ok"') -> str:
    tensor = f'pb_utils.Tensor("R", np.array([{value}], dtype=object))'
    return f"return [pb_utils.InferenceResponse([{tensor}]) for r in requests]\n"
