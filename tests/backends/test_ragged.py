"""Ragged batches as a backend builds them: allow_ragged_batch, batch_input, batch_output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbackend.backends.array_backend import batch_inputs, ragged_input, scattered_output
from llmbackend.core.backend_api import Tensor
from llmbackend.core.config.model_config import parse_text
from llmbackend.core.errors import TritonError
from tests.helpers import framework_host
from tests.helpers.core_host import STAGE, Repository, send, serving
from tests.helpers.waiting import eventually

try:  # before any test: what onnxruntime opens when it is imported stays open
    import onnx
    import onnxruntime  # noqa: F401
except ImportError:
    onnx = None  # type: ignore[assignment]

# A "model" that takes all rows of a batch as one vector: Y = X * 2, cut back by the shapes of X.
RAGGED_BACKEND = """
from tests.helpers.core_host import STAGE
from llmbackend.backends.array_backend import batch_inputs, ragged_input, scattered_output
from llmbackend.core.backend_api import ResponseFlag, Tensor

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    STAGE.note(",".join(request.id for request in requests))
    STAGE.wait("go")
    config = instance.model.config
    joined = ragged_input(requests, "X")
    STAGE.kept.append({name: array.tolist() for name, array in batch_inputs(config, requests).items()})
    for request, part in zip(requests, scattered_output(config, "Y", joined * 2, requests)):
        response = request.new_response()
        response.add_output(Tensor.of("Y", part))
        response.send(ResponseFlag.FINAL)
        request.release()
"""
IO = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
BATCH_IO = """
batch_input [
  { kind: BATCH_ELEMENT_COUNT target_name: "count" data_type: TYPE_INT32 source_input: "X" },
  { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_FP32 source_input: "X" },
  { kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "bounds" data_type: TYPE_INT32 source_input: "X" },
  { kind: BATCH_MAX_ELEMENT_COUNT_AS_SHAPE target_name: "longest" data_type: TYPE_FP32 source_input: "X" },
  { kind: BATCH_ITEM_SHAPE target_name: "shapes" data_type: TYPE_INT32 source_input: "X" },
  { kind: BATCH_ITEM_SHAPE_FLATTEN target_name: "flat_shapes" data_type: TYPE_INT32 source_input: "X" }
]
batch_output [ { target_name: "Y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "X" } ]
"""


class FakeRequest:
    def __init__(self, *shape: int) -> None:
        self.inputs = {"X": Tensor.of("X", np.arange(np.prod(shape), dtype=np.float32).reshape(shape))}


def told(*shapes: tuple[int, ...]) -> dict[str, Any]:
    config = parse_text(f'name: "m" max_batch_size: 8 {IO} {BATCH_IO}', "test")
    return batch_inputs(config, [FakeRequest(*shape) for shape in shapes])  # type: ignore[misc]


def test_batch_inputs_tell_the_model_where_each_request_is() -> None:
    found = told((1, 3), (2, 2), (1, 1))
    assert found["count"].tolist() == [3, 4, 1] and found["count"].dtype == np.int32
    assert found["ends"].tolist() == [3, 7, 8] and found["ends"].dtype == np.float32
    assert found["bounds"].tolist() == [0, 3, 7, 8]
    assert found["longest"].shape == (4,)
    assert found["shapes"].tolist() == [[3], [2], [2], [1]]  # one row per item
    assert found["flat_shapes"].tolist() == [3, 2, 2, 1]


def test_item_shapes_have_a_column_per_dimension() -> None:
    found = told((1, 3, 5), (2, 2, 4))
    assert found["shapes"].tolist() == [[3, 5], [2, 4], [2, 4]]
    assert found["flat_shapes"].shape == (6,)


def test_a_model_that_gives_the_wrong_number_of_elements_is_an_error() -> None:
    config = parse_text(f'name: "m" max_batch_size: 8 {IO} {BATCH_IO}', "test")
    requests = [FakeRequest(1, 3), FakeRequest(1, 2)]
    joined = ragged_input(requests, "X")  # type: ignore[arg-type]
    parts = scattered_output(config, "Y", joined, requests)  # type: ignore[arg-type]
    assert [part.shape for part in parts] == [(1, 3), (1, 2)]
    with pytest.raises(TritonError, match="batch output 'Y' has 4 elements, expected 5"):
        scattered_output(config, "Y", joined[:-1], requests)  # type: ignore[arg-type]


def test_requests_of_unequal_length_are_one_ragged_batch(tmp_path: Path) -> None:
    STAGE.clear()
    repository = Repository(tmp_path)
    repository.backend("ragged", RAGGED_BACKEND)
    repository.model("m", "ragged", "max_batch_size: 8\ndynamic_batching {}\n" + BATCH_IO, io=IO)
    with serving(repository, "m") as server:
        lengths = {"0": 1, "1": 3, "2": 2}
        tensors = {name: np.arange(length, dtype=np.float32).reshape(1, -1) for name, length in lengths.items()}
        clients = {}
        for name, data in tensors.items():
            clients[name] = send(server, "m", Tensor.of("X", data), id=name)
            eventually(lambda: STAGE.events)
        STAGE.open("go")
        for name, client in clients.items():
            (response,) = client.responses()
            assert np.array_equal(response.outputs[0].data, tensors[name] * 2)
        assert STAGE.events == ["0", "1,2"]
        assert STAGE.kept[1]["bounds"] == [0, 3, 5]


FRAMEWORK_CONFIG = """
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 300000 preferred_batch_size: [ 3 ] }
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "n" data_type: TYPE_INT32 dims: [ 1 ] } ]
batch_input [ { kind: BATCH_ELEMENT_COUNT target_name: "count" data_type: TYPE_INT32 source_input: "x" } ]
batch_output [ { target_name: "y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" } ]
"""


def check_ragged_model(root: Path) -> None:
    """Three requests of unequal length are one execution of y = 2 x and n = how many elements each has."""
    with framework_host.serving(root) as server:
        server.load_model("m")
        arrays = [np.arange(length, dtype=np.float32).reshape(1, -1) for length in (1, 3, 2)]
        for array, pending in [(array, framework_host.begin(server, "m", x=array)) for array in arrays]:
            outputs = pending.outputs()
            assert np.array_equal(outputs["y"], array * 2) and outputs["n"].tolist() == [[array.size]]
        assert server.model_statistics("m")[0].execution_count == 1
        alone = framework_host.infer(server, "m", x=arrays[1])
        assert np.array_equal(alone["y"], arrays[1] * 2)


@pytest.mark.skipif(onnx is None, reason="the test extra brings onnx and onnxruntime")
def test_an_onnx_model_takes_a_ragged_batch(tmp_path: Path) -> None:
    helper, kinds = onnx.helper, onnx.TensorProto
    directory = framework_host.version_directory(tmp_path, "m", 'backend: "onnxruntime"' + FRAMEWORK_CONFIG)
    nodes = [helper.make_node("Add", ["x", "x"], ["y"]), helper.make_node("Unsqueeze", ["count", "one"], ["n"])]
    one = helper.make_tensor("one", kinds.INT64, [1], [1])
    value = helper.make_tensor_value_info
    inputs = [value("x", kinds.FLOAT, ["total"]), value("count", kinds.INT32, ["requests"])]
    outputs = [value("y", kinds.FLOAT, ["total"]), value("n", kinds.INT32, ["requests", 1])]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, [one])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), directory / "model.onnx"
    )
    check_ragged_model(tmp_path)


def test_a_pytorch_model_takes_a_ragged_batch(tmp_path: Path) -> None:
    import torch

    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, count.unsqueeze(1)

    directory = framework_host.version_directory(tmp_path, "m", 'backend: "pytorch"' + FRAMEWORK_CONFIG)
    arguments = (torch.zeros(4), torch.zeros(2, dtype=torch.int32))
    dynamic = {"x": {0: torch.export.Dim("total")}, "count": {0: torch.export.Dim("requests")}}
    torch.export.save(torch.export.export(Double(), arguments, dynamic_shapes=dynamic), directory / "model.pt2")
    check_ragged_model(tmp_path)
