"""Model repositories as Triton's documentation has them: old platform names, no backend, no configuration at all.

The models are made here, in the shapes of those that Triton's docs/examples/model_repository names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from llmbackend.core.backend_api import RequestFlag
from llmbackend.core.errors import TritonError
from tests.helpers.framework_host import Pending, infer, serving, texts, version_directory

onnx = pytest.importorskip("onnx", reason="the test extra brings onnx and onnxruntime")
pytest.importorskip("onnxruntime")
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper  # noqa: E402

CPU = "instance_group [ { kind: KIND_CPU } ]"


def control(name: str, kind: str) -> str:
    return f'{{ name: "{name}" control [ {{ kind: CONTROL_SEQUENCE_{kind} int32_false_true: [ 0, 1 ] }} ] }}'


def tensor(name: str, data_type: str, dims: str, more: str = "") -> str:
    return f'{{ name: "{name}" data_type: TYPE_{data_type} dims: [ {dims} ] {more} }}'


def onnx_config(inputs: Sequence[str], outputs: Sequence[str], more: str = "max_batch_size: 8") -> str:
    return f'platform: "onnxruntime_onnx"\n{more}\ninput [ {", ".join(inputs)} ]\noutput [ {", ".join(outputs)} ]\n'


def value(name: str, shape: Sequence[str | int], kind: int = TensorProto.INT32) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def save(
    directory: Path,
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    *weights: TensorProto,
) -> None:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, list(weights))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, directory / "model.onnx")


def save_sums(directory: Path, kind: int = TensorProto.INT32) -> None:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1."""
    pair = ["INPUT0", "INPUT1"]
    nodes = [helper.make_node("Add", pair, ["OUTPUT0"]), helper.make_node("Sub", pair, ["OUTPUT1"])]
    rows: list[str | int] = ["batch", 16]
    save(directory, nodes, [value(n, rows, kind) for n in pair], [value(f"OUTPUT{i}", rows, kind) for i in (0, 1)])


@pytest.mark.parametrize(("name", "data_type", "dtype"), [("simple", "INT32", np.int32), ("simple_fp", "FP32", "f4")])
def test_simple(tmp_path: Path, name: str, data_type: str, dtype: type) -> None:
    config = onnx_config(
        [tensor(f"INPUT{i}", data_type, "16") for i in (0, 1)], [tensor(f"OUTPUT{i}", data_type, "16") for i in (0, 1)]
    )
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    save_sums(version_directory(tmp_path, name, f'name: "{name}"\n{config}'), kind)
    with serving(tmp_path) as server:
        server.load_model(name)
        got = infer(server, name, INPUT0=np.full((1, 16), 5, dtype), INPUT1=np.full((1, 16), 2, dtype))
        assert (got["OUTPUT0"] == 7).all() and (got["OUTPUT1"] == 3).all()
        assert server.model_metadata(name).platform == "onnxruntime_onnx"


def save_sequence(directory: Path) -> None:
    """OUTPUT = (INPUT + START) * READY."""
    nodes = [
        helper.make_node("Add", ["INPUT", "START"], ["sum"]),
        helper.make_node("Mul", ["sum", "READY"], ["OUTPUT"]),
    ]
    row: list[str | int] = ["batch", 1]
    save(directory, nodes, [value(name, row) for name in ("INPUT", "START", "READY")], [value("OUTPUT", row)])


@pytest.mark.parametrize("strategy", ["", "oldest { max_candidate_sequences: 1024 }"])
def test_simple_sequence(tmp_path: Path, strategy: str) -> None:
    controls = ", ".join([control("START", "START"), control("READY", "READY")])
    config = onnx_config([tensor("INPUT", "INT32", "1")], [tensor("OUTPUT", "INT32", "1")])
    batching = f"sequence_batching {{ {strategy} control_input [ {controls} ] }} {CPU}"
    delay = 'parameters [ { key: "execute_delay_ms" value: { string_value: "3" } } ]'
    save_sequence(version_directory(tmp_path, "simple_sequence", f"{config}{batching} {delay}"))
    with serving(tmp_path) as server:
        server.load_model("simple_sequence")

        def step(number: int, flags: RequestFlag) -> int:
            inputs = {"INPUT": np.full((1, 1), number, np.int32)}
            outputs = Pending(server, "simple_sequence", inputs, correlation_id=7, flags=flags).outputs()
            return int(outputs["OUTPUT"][0, 0])

        assert [step(5, RequestFlag.SEQUENCE_START), step(6, RequestFlag(0)), step(7, RequestFlag.SEQUENCE_END)] == [
            6,
            6,
            7,
        ]


def test_densenet_onnx(tmp_path: Path) -> None:
    """A model that does not batch, whose configuration hides its batch dimension by a reshape, with labels."""
    inputs = [tensor("data_0", "FP32", "3, 224, 224", "format: FORMAT_NCHW reshape { shape: [ 1, 3, 224, 224 ] }")]
    more = 'reshape { shape: [ 1, 1000, 1, 1 ] } label_filename: "densenet_labels.txt"'
    config = onnx_config(inputs, [tensor("fc6_1", "FP32", "1000", more)], "max_batch_size : 0")
    directory = version_directory(tmp_path, "densenet_onnx", config)
    (tmp_path / "densenet_onnx" / "densenet_labels.txt").write_text("\n".join(f"label {i}" for i in range(1000)))
    weights = numpy_helper.from_array(np.arange(3000, dtype=np.float32).reshape(1000, 3, 1, 1), "weights")
    nodes = [
        helper.make_node("GlobalAveragePool", ["data_0"], ["mean"]),
        helper.make_node("Conv", ["mean", "weights"], ["fc6_1"]),
    ]
    pixels, classes = [1, 3, 224, 224], [1, 1000, 1, 1]
    kind = TensorProto.FLOAT
    save(directory, nodes, [value("data_0", pixels, kind)], [value("fc6_1", classes, kind)], weights)
    with serving(tmp_path) as server:
        server.load_model("densenet_onnx")
        image = {"data_0": np.ones((3, 224, 224), np.float32)}
        (top,) = Pending(server, "densenet_onnx", image, classes={"fc6_1": 1}).outputs()["fc6_1"]
        assert top == b"8994.000000:999:label 999"


IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", tensor)]) for tensor in tensors]
"""


def test_simple_identity_is_a_python_model_by_its_file(tmp_path: Path) -> None:
    io = f"input [ {tensor('INPUT0', 'STRING', '-1')} ] output [ {tensor('OUTPUT0', 'STRING', '-1')} ]"
    directory = version_directory(tmp_path, "simple_identity", f'name: "simple_identity"\nmax_batch_size: 8\n{io}')
    (directory / "model.py").write_text(IDENTITY)
    with serving(tmp_path) as server:
        server.load_model("simple_identity")
        strings = texts("a", "b").reshape(1, 2)
        assert infer(server, "simple_identity", INPUT0=strings)["OUTPUT0"].tolist() == [[b"a", b"b"]]


@pytest.mark.parametrize("config", [None, "max_batch_size: 4"])
def test_a_directory_with_nothing_but_a_graph_is_an_onnx_model(tmp_path: Path, config: str | None) -> None:
    save_sums(version_directory(tmp_path, "graph", config or ""))
    with serving(tmp_path) as server:
        server.load_model("graph")
        served = server.model_config("graph")
        assert (served.backend, served.platform) == ("onnxruntime", "onnxruntime_onnx")
        assert (served.default_model_filename, served.max_batch_size) == ("model.onnx", 4)
        ones = np.ones((2, 16), np.int32)
        assert (infer(server, "graph", INPUT0=ones, INPUT1=ones)["OUTPUT0"] == 2).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_configuration_may_leave_out_the_backend_of_a_torchscript_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    inputs, outputs = [tensor("input__0", "FP32", "2")], [tensor("output__0", "FP32", "2")]
    config = f"max_batch_size: 32 input [ {inputs[0]} ] output [ {outputs[0]} ]"
    directory = version_directory(tmp_path, "resnet_torchscript", config)
    torch.jit.trace(torch.nn.ReLU(), torch.ones(1, 2)).save(str(directory / "model.pt"))
    with serving(tmp_path) as server:
        server.load_model("resnet_torchscript")
        got = infer(server, "resnet_torchscript", input__0=np.array([[-1, 2]], np.float32))
        assert got["output__0"].tolist() == [[0, 2]]
        assert server.model_metadata("resnet_torchscript").platform == "pytorch_libtorch"


@pytest.mark.parametrize(
    ("file", "config", "reason"),
    [
        ("model.graphdef", 'platform: "tensorflow_graphdef"', "TensorFlow graphs .*: convert the model to ONNX"),
        ("model.savedmodel/saved_model.pb", "", r"'tensorflow'.* saved models \(tensorflow_savedmodel\): convert the"),
        ("model.plan", "", r"'tensorrt'.*TensorRT plans .*: export .*its backends are .*onnxruntime, openvino"),
        (
            "model.plan",
            'platform: "tensorrt_plan"',
            "put a compiled libtriton_tensorrt.so into <backend-directory>/tensorrt; it is loaded unmodified",
        ),
        ("model.dali", 'backend: "dali"', "DALI pipelines: write .* of the backend python .*libtriton_dali.so"),
        ("model.bin", 'name: "inception.nosuch"', "unable to find backend library for backend 'nosuch'"),
    ],
)
def test_a_model_of_a_backend_that_is_not_here_says_so(tmp_path: Path, file: str, config: str, reason: str) -> None:
    name = "inception.nosuch" if "nosuch" in config else "inception"
    path = version_directory(tmp_path, name, config) / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    with serving(tmp_path) as server, pytest.raises(TritonError, match=reason):
        server.load_model(name)


def test_a_directory_that_tells_nothing_is_refused_with_the_reason_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version_directory(tmp_path, "empty")
    with serving(tmp_path) as server, pytest.raises(TritonError, match="failed to poll from model repository"):
        server.load_model("empty")
    assert "Could not determine backend for model 'empty' with no backend in model configuration" in caplog.text
