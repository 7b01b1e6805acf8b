"""Sequences in the pytorch and onnxruntime backends: control inputs, implicit state, rows without a request."""

from __future__ import annotations

import queue
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from llmbackend.core.backend_api import RequestFlag, ResponseFlag
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceRequest, InferenceResponse
from llmbackend.core.tensors import Tensor
from tests.helpers.framework_host import WAIT_S, Array, version_directory
from tests.helpers.framework_host import serving as serving_repository

onnx = pytest.importorskip("onnx", reason="the test extra brings onnx and onnxruntime")
pytest.importorskip("onnxruntime")  # before any test: it keeps a file of its own open

CONFIG = """
backend: "{backend}"
max_batch_size: 4
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 2 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }}, {{ name: "began" data_type: TYPE_FP32 dims: [ 1 ] }} ]
sequence_batching {{
  max_sequence_idle_microseconds: 60000000
  {strategy}
  control_input [ {{ name: "start" control [ {{ kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }} ] }} ]
  state [ {{ input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: [ 2 ] }} ]
}}
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
"""


class Summing(nn.Module):
    """Keeps the sum of its inputs; `before` and `after` are its state."""

    def forward(
        self, x: torch.Tensor, start: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        after = before + x
        return after * 10, start, after


def save_pytorch(directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Summing()), str(directory / "model.pt"))


def save_onnx(directory: Path) -> None:
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Add", ["before", "x"], ["after"]),
        helper.make_node("Mul", ["after", "ten"], ["y"]),
        helper.make_node("Identity", ["start"], ["began"]),
    ]
    inputs = [
        helper.make_tensor_value_info(name, kind, ["n", size]) for name, size in (("x", 2), ("start", 1), ("before", 2))
    ]
    outputs = [
        helper.make_tensor_value_info(name, kind, ["n", size]) for name, size in (("y", 2), ("began", 1), ("after", 2))
    ]
    ten = helper.make_tensor("ten", kind, [1], [10.0])
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializer=[ten])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), directory / "model.onnx"
    )


SAVE = {"pytorch": save_pytorch, "onnxruntime": save_onnx}


def send(server: InferenceServer, sequence: int, value: float, start: bool, end: bool) -> dict[str, Array]:
    answers: queue.Queue[InferenceResponse | None] = queue.Queue()
    flags = (RequestFlag.SEQUENCE_START if start else RequestFlag(0)) | (
        RequestFlag.SEQUENCE_END if end else RequestFlag(0)
    )

    def take(response: InferenceResponse | None, flags: ResponseFlag) -> None:
        answers.put(response)

    x = Tensor.of("x", np.full((1, 2), value, np.float32))
    server.infer_async(InferenceRequest("m", inputs=(x,), correlation_id=sequence, flags=flags), take)
    response = answers.get(timeout=WAIT_S)
    assert response is not None and response.error is None, response
    return {tensor.name: tensor.data for tensor in response.outputs}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
@pytest.mark.parametrize("backend", ["pytorch", "onnxruntime"])
def test_a_framework_model_keeps_its_state_in_the_host(tmp_path: Path, backend: str, strategy: str) -> None:
    SAVE[backend](version_directory(tmp_path, "m", CONFIG.format(backend=backend, strategy=strategy)))
    with serving_repository(tmp_path) as server:
        server.load_model("m")
        for index, value in enumerate((1.0, 2.0, 3.0)):
            for sequence in (1, 2):  # with `direct`, the second one's row comes behind a null request's
                got = send(server, sequence, sequence * value, start=index == 0, end=index == 2)
                total = sequence * sum((1.0, 2.0, 3.0)[: index + 1])
                assert got["y"].tolist() == [[total * 10] * 2] and got["began"].tolist() == [[float(index == 0)]]
                assert set(got) == {"y", "began"}  # the state is not configured as an output
