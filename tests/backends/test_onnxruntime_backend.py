"""The onnxruntime backend on real ONNX files, through the host."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbackend.core.errors import TritonError
from llmbackend.core.inference_server import InferenceServer
from tests.helpers.core_host import version_of
from tests.helpers.framework_host import begin, infer, serving, texts, version_directory

onnx = pytest.importorskip("onnx", reason="the test extra brings onnx and onnxruntime")
onnxruntime = pytest.importorskip("onnxruntime")
from onnx import NodeProto, TensorProto, ValueInfoProto, helper  # noqa: E402


def save(
    directory: Path,
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    initializers: Sequence[TensorProto] = (),
) -> None:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, directory / "model.onnx")


def tensor(name: str, *shape: str | int, kind: int = TensorProto.FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def save_sum(directory: Path, rows: str | int = "rows") -> None:
    """total = a + b, double = total + total"""
    nodes = [helper.make_node("Add", ["a", "b"], ["total"]), helper.make_node("Add", ["total", "total"], ["double"])]
    save(
        directory,
        nodes,
        [tensor("a", rows, 3), tensor("b", rows, 3)],
        [tensor("total", rows, 3), tensor("double", rows, 3)],
    )


def rows(count: int, value: float) -> np.ndarray:
    return np.full((count, 3), value, np.float32)


def test_a_model_without_configuration_is_completed_from_its_graph(tmp_path: Path) -> None:
    save_sum(version_directory(tmp_path, "sum"))
    (tmp_path / "sum" / "config.pbtxt").write_text('backend: "onnxruntime"')
    with serving(tmp_path) as server:
        server.load_model("sum")
        config = server.model_config("sum")
        assert config.max_batch_size == 4 and config.HasField("dynamic_batching")
        assert [(item.name, list(item.dims)) for item in config.input] == [("a", [3]), ("b", [3])]
        assert [item.name for item in config.output] == ["total", "double"]
        got = infer(server, "sum", a=rows(2, 1), b=rows(2, 2))
        assert (got["total"] == 3).all() and (got["double"] == 6).all() and got["total"].shape == (2, 3)


def test_tensors_of_one_value_per_row_are_completed_with_a_reshape(tmp_path: Path) -> None:
    directory = version_directory(tmp_path, "sum", 'backend: "onnxruntime"')
    nodes = [helper.make_node("Add", ["a", "a"], ["double"])]
    save(directory, nodes, [tensor("a", "rows")], [tensor("double", "rows")])
    with serving(tmp_path) as server:
        server.load_model("sum")
        config = server.model_config("sum")
        for item in (*config.input, *config.output):
            assert (list(item.dims), item.HasField("reshape"), list(item.reshape.shape)) == ([1], True, [])
        got = infer(server, "sum", a=np.array([[1], [2]], np.float32))["double"]
        assert got.tolist() == [[2], [4]]


@pytest.mark.parametrize(
    ("config", "scheduler"),
    [
        ("max_batch_size: 1", None),
        ("max_batch_size: 8", "dynamic_batching"),
        ("max_batch_size: 8 sequence_batching { }", "sequence_batching"),
        ('max_batch_size: 8 output [ { name: "total" data_type: TYPE_FP32 dims: [ 3 ] } ]', "dynamic_batching"),
    ],
)
def test_a_given_batch_size_is_kept_and_batches_unless_another_scheduler_is_given(
    tmp_path: Path, config: str, scheduler: str | None
) -> None:
    save_sum(version_directory(tmp_path, "sum", f'backend: "onnxruntime" {config}'))
    with serving(tmp_path) as server:
        server.load_model("sum")
        completed = server.model_config("sum")
        assert f"max_batch_size: {completed.max_batch_size}" in config
        assert completed.WhichOneof("scheduling_choice") == scheduler


def test_a_given_batch_size_of_a_graph_that_cannot_batch_is_refused(tmp_path: Path) -> None:
    save_sum(version_directory(tmp_path, "sum", 'backend: "onnxruntime" max_batch_size: 8'), rows=2)
    reason = "autofill failed for model 'sum': model does not support batching while non-zero max_batch_size"
    with serving(tmp_path) as server, pytest.raises(TritonError, match=reason):
        server.load_model("sum")


def test_a_graph_of_fixed_shape_does_not_batch(tmp_path: Path) -> None:
    save_sum(version_directory(tmp_path, "sum", 'platform: "onnxruntime_onnx"'), rows=2)
    with serving(tmp_path) as server:
        server.load_model("sum")
        config = server.model_config("sum")
        assert config.max_batch_size == 0 and [list(item.dims) for item in config.input] == [[2, 3], [2, 3]]
        assert (infer(server, "sum", a=rows(2, 1), b=rows(2, 2))["total"] == 3).all()


def test_requests_are_computed_together_and_each_gets_its_rows(tmp_path: Path) -> None:
    config = """
        backend: "onnxruntime" max_batch_size: 8
        dynamic_batching { max_queue_delay_microseconds: 300000 preferred_batch_size: [ 8 ] }
        parameters { key: "intra_op_thread_count" value { string_value: "1" } }
        parameters { key: "level" value { string_value: "2" } }
    """
    save_sum(version_directory(tmp_path, "sum", config))
    with serving(tmp_path) as server:
        server.load_model("sum")
        pending = [begin(server, "sum", "total", a=rows(n, n), b=rows(n, 1)) for n in (1, 3, 4)]
        for n, answer in zip((1, 3, 4), pending, strict=True):
            assert answer.outputs()["total"].tolist() == [[n + 1] * 3] * n
        (statistics,) = server.model_statistics("sum")
        assert (statistics.inference_count, statistics.execution_count) == (8, 1)


def test_texts_go_through(tmp_path: Path) -> None:
    directory = version_directory(tmp_path, "same", 'backend: "onnxruntime"')
    save(directory, [helper.make_node("Identity", ["x"], ["y"])], [tensor("x", 2, kind=TensorProto.STRING)],
         [tensor("y", 2, kind=TensorProto.STRING)])  # fmt: skip
    with serving(tmp_path) as server:
        server.load_model("same")
        assert infer(server, "same", x=texts("a", "ö"))["y"].tolist() == [b"a", "ö".encode()]


CONFIGURED = """
    backend: "onnxruntime" max_batch_size: 4
    input [ { name: "a" data_type: TYPE_FP32 dims: [ 3 ] }, { name: "b" data_type: TYPE_FP32 dims: [ 3 ] } ]
    output [ { name: "total" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            CONFIGURED.replace('"total"', '"absent"'),
            "output 'absent' is not in the graph, expected one of total, double",
        ),
        (CONFIGURED.replace('"b"', '"c"'), "input 'c' is not in the graph, expected one of a, b"),
        (CONFIGURED + 'parameters { key: "level" value { string_value: "9" } }', "'level' is '9': expected one of"),
        (CONFIGURED + 'default_model_filename: "other.onnx"', "unable to find '.*other.onnx' for model 'sum'"),
    ],
)
def test_what_is_wrong_is_named_when_the_model_loads(tmp_path: Path, config: str, reason: str) -> None:
    save_sum(version_directory(tmp_path, "sum", config))
    with serving(tmp_path) as server, pytest.raises(TritonError, match=reason):
        server.load_model("sum")


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    (version_directory(tmp_path, "sum", CONFIGURED) / "model.onnx").write_bytes(b"nothing")
    with serving(tmp_path) as server, pytest.raises(TritonError, match="failed to load model 'sum'"):
        server.load_model("sum")


def test_only_configured_outputs_are_given(tmp_path: Path) -> None:
    save_sum(version_directory(tmp_path, "sum", CONFIGURED))
    with serving(tmp_path) as server:
        server.load_model("sum")
        assert list(infer(server, "sum", a=rows(1, 1), b=rows(1, 2))) == ["total"]


ACCELERATORS = """
    optimization { execution_accelerators {
      cpu_execution_accelerator [ { name: "openvino" parameters { key: "num_of_threads" value: "1" } } ]
      gpu_execution_accelerator [ { name: "tensorrt" } ]
    } }
"""


def test_accelerators_are_followed_or_named_in_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_sum(version_directory(tmp_path, "sum", CONFIGURED + ACCELERATORS))
    with caplog.at_level(logging.WARNING), serving(tmp_path) as server:
        server.load_model("sum")
        assert (infer(server, "sum", a=rows(1, 1), b=rows(1, 2))["total"] == 3).all()
    (warning,) = (record.getMessage() for record in caplog.records)
    has_openvino = "OpenVINOExecutionProvider" in onnxruntime.get_available_providers()
    absent = "" if has_openvino else "openvino (cpu), "
    assert f"'optimization.execution_accelerators' has no effect for {absent}tensorrt (gpu): " in warning
    assert ("the installed onnxruntime has no OpenVINOExecutionProvider" in warning) is not has_openvino


@pytest.mark.skipif(
    "OpenVINOExecutionProvider" not in onnxruntime.get_available_providers(), reason="needs onnxruntime-openvino"
)
def test_openvino_runs_the_graph_where_onnxruntime_has_it(tmp_path: Path) -> None:
    save_sum(version_directory(tmp_path, "sum", CONFIGURED + ACCELERATORS))
    with serving(tmp_path) as server:
        server.load_model("sum")
        instance, *_ = version_of(server, "sum").instances
        assert instance.state.session.get_providers()[0] == "OpenVINOExecutionProvider"


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def options_of(server: InferenceServer, model: str) -> Any:
    instance, *_ = version_of(server, model).instances
    return instance.state.session.get_session_options()


@pytest.mark.parametrize("count", ["0", "-1"])
def test_a_thread_count_of_0_is_the_default(tmp_path: Path, count: str) -> None:
    threads = parameter("intra_op_thread_count", count) + parameter("inter_op_thread_count", count)
    save_sum(version_directory(tmp_path, "sum", CONFIGURED + threads))
    with serving(tmp_path) as server:
        server.load_model("sum")
        options = options_of(server, "sum")
        assert (options.intra_op_num_threads, options.inter_op_num_threads) == (0, 0)


@pytest.mark.parametrize(
    ("config", "level"),
    [
        ("", "ORT_ENABLE_ALL"),
        ("optimization { graph { level: -1 } }", "ORT_ENABLE_BASIC"),
        ("optimization { graph { level: 0 } }", "ORT_ENABLE_ALL"),
        ("optimization { graph { level: 1 } }", "ORT_ENABLE_EXTENDED"),
        ("optimization { graph { level: 2 } }", "ORT_DISABLE_ALL"),
        ("optimization { graph { level: 1 } } " + parameter("level", "-1"), "ORT_ENABLE_BASIC"),
    ],
)
def test_the_level_of_graph_optimization_is_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: str, level: str
) -> None:
    save_sum(version_directory(tmp_path, "sum", CONFIGURED + config))
    with caplog.at_level(logging.WARNING), serving(tmp_path) as server:
        server.load_model("sum")
        expected = getattr(onnxruntime.GraphOptimizationLevel, level)
        assert options_of(server, "sum").graph_optimization_level == expected
    assert "has no effect" not in caplog.text


def test_a_global_thread_pool_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_sum(version_directory(tmp_path, "sum", CONFIGURED))
    settings = {"enable-global-threadpool": "1", "intra_op_thread_count": "4", "default-max-batch-size": "2"}
    with caplog.at_level(logging.WARNING), serving(tmp_path, backend_config={"onnxruntime": settings}) as server:
        server.load_model("sum")
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "enable-global-threadpool, intra_op_thread_count has no effect" in warning


def test_a_group_on_the_processor_has_two_instances_by_default(tmp_path: Path) -> None:
    save_sum(version_directory(tmp_path, "sum", CONFIGURED + "instance_group { kind: KIND_CPU }"))
    with serving(tmp_path) as server:
        server.load_model("sum")
        first, second = version_of(server, "sum").instances
        assert first.state.session is not second.state.session


SCALARS = """
    backend: "onnxruntime"
    input [ { name: "index" data_type: TYPE_INT64 dims: [ 1, 1 ] } ]
    output [ { name: "row" data_type: TYPE_FP32 dims: [ 3 ] }, { name: "total" data_type: TYPE_FP32 dims: [ 1, 1 ] } ]
"""


@pytest.mark.parametrize(("config", "dims"), [('backend: "onnxruntime"', (1,)), (SCALARS, (1, 1))])
def test_scalars_have_the_dimensions_of_the_configuration(tmp_path: Path, config: str, dims: tuple[int, ...]) -> None:
    """The graph takes a row of a table, by an index without dimensions, and its sum."""
    table = helper.make_tensor("table", TensorProto.FLOAT, [2, 3], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    nodes = [
        helper.make_node("Gather", ["table", "index"], ["row"]),
        helper.make_node("ReduceSum", ["row"], ["total"], keepdims=0),
    ]
    directory = version_directory(tmp_path, "table", config)
    save(directory, nodes, [tensor("index", kind=TensorProto.INT64)], [tensor("row", 3), tensor("total")], [table])
    with serving(tmp_path) as server:
        server.load_model("table")
        metadata = server.model_metadata("table")
        assert (metadata.inputs[0].shape, metadata.outputs[1].shape) == (dims, dims)
        got = infer(server, "table", index=np.ones(dims, np.int64))
        assert got["row"].tolist() == [4, 5, 6]
        assert (got["total"].shape, got["total"].item()) == (dims, 15)


def test_a_text_may_be_a_scalar(tmp_path: Path) -> None:
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [0])
    nodes = [helper.make_node("Unsqueeze", ["x", "axis"], ["row"]), helper.make_node("Identity", ["x"], ["same"])]
    directory = version_directory(tmp_path, "text", 'backend: "onnxruntime"')
    save(directory, nodes, [tensor("x", kind=TensorProto.STRING)],
         [tensor("row", 1, kind=TensorProto.STRING), tensor("same", kind=TensorProto.STRING)], [axis])  # fmt: skip
    with serving(tmp_path) as server:
        server.load_model("text")
        got = infer(server, "text", x=texts("ö"))
        assert got["row"].tolist() == got["same"].tolist() == ["ö".encode()]


def test_an_initializer_may_be_an_optional_input(tmp_path: Path) -> None:
    config = """
        backend: "onnxruntime"
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] },
                { name: "more" data_type: TYPE_FP32 dims: [ 1 ] optional: true } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
    """
    directory = version_directory(tmp_path, "sum", config)
    ten = helper.make_tensor("more", TensorProto.FLOAT, [1], [10.0])
    save(directory, [helper.make_node("Add", ["x", "more"], ["y"])], [tensor("x", 1), tensor("more", 1)],
         [tensor("y", 1)], [ten])  # fmt: skip
    one = np.ones(1, np.float32)
    with serving(tmp_path) as server:
        server.load_model("sum")
        assert infer(server, "sum", x=one)["y"].tolist() == [11]
        assert infer(server, "sum", x=one, more=one)["y"].tolist() == [2]
