"""The openvino backend on real models, through the host and over HTTP."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from llmbackend.core.backend_api import RequestFlag
from llmbackend.core.errors import TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from tests.helpers.core_host import version_of
from tests.helpers.framework_host import WAIT_S, Pending, begin, infer, serving, texts, version_directory
from tests.helpers.kserve_runner import Running

if importlib.util.find_spec("openvino") is None:
    pytest.skip("the test extra brings openvino", allow_module_level=True)
import openvino

from tests.helpers.openvino_models import op, parameter, result, save, save_reversed, save_sum

CONFIGURED = """
    backend: "openvino" max_batch_size: 4
    input [ { name: "a" data_type: TYPE_FP32 dims: [ 3 ] }, { name: "b" data_type: TYPE_FP32 dims: [ 3 ] } ]
    output [ { name: "total" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""


def setting(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def rows(count: int, value: float) -> np.ndarray:
    return np.full((count, 3), value, np.float32)


# --- auto-completed configurations ---


def test_a_model_without_configuration_is_completed_from_its_layouts(tmp_path: Path) -> None:
    save_sum(version_directory(tmp_path, "sum"))
    with serving(tmp_path) as server:
        server.load_model("sum")
        config = server.model_config("sum")
        assert (config.backend, config.default_model_filename) == ("openvino", "model.xml")
        assert config.max_batch_size == 4 and config.HasField("dynamic_batching")
        assert [(item.name, list(item.dims)) for item in config.input] == [("a", [3]), ("b", [3])]
        assert [item.name for item in config.output] == ["total", "scaled"]
        got = infer(server, "sum", a=rows(2, 1), b=rows(2, 2))
        assert got["total"].tolist() == [[3, 3, 3]] * 2 and got["scaled"].tolist() == [[3, 6, 9]] * 2


def test_tensors_of_one_value_per_row_are_completed_with_a_reshape(tmp_path: Path) -> None:
    x = parameter("x", -1, layout="N")
    save(version_directory(tmp_path, "double"), [result("y", op.add(x, x), "N")], [x])
    with serving(tmp_path) as server:
        server.load_model("double")
        assert infer(server, "double", x=np.array([[1], [2]], np.float32))["y"].tolist() == [[2], [4]]


def test_a_model_without_layouts_does_not_batch(tmp_path: Path) -> None:
    save_sum(version_directory(tmp_path, "sum", 'backend: "openvino"'), layout="")
    with serving(tmp_path) as server:
        server.load_model("sum")
        config = server.model_config("sum")
        assert config.max_batch_size == 0 and [list(item.dims) for item in config.input] == [[-1, 3], [-1, 3]]
        for count in (2, 5):
            assert infer(server, "sum", a=rows(count, 1), b=rows(count, 2))["total"].shape == (count, 3)


def test_configured_tensors_with_the_batch_dimension_stay_as_they_are(tmp_path: Path) -> None:
    config = CONFIGURED.replace("max_batch_size: 4", "").replace("[ 3 ]", "[ -1, 3 ]")
    save_sum(version_directory(tmp_path, "sum", config))
    with serving(tmp_path) as server:
        server.load_model("sum")
        assert server.model_config("sum").max_batch_size == 0


def test_settings_of_the_backend_hold_for_all_models(tmp_path: Path) -> None:
    save_sum(version_directory(tmp_path, "sum"))
    settings = {"openvino": {"default-max-batch-size": "16", "NUM_STREAMS": "many"}}
    options = ServerOptions(model_repositories=[tmp_path], model_control_mode="explicit", backend_config=settings)
    server = InferenceServer(options)
    server.start()
    try:
        with pytest.raises(TritonError, match="'NUM_STREAMS' is 'many': expected AUTO, NUMA or a number"):
            server.load_model("sum")
        (tmp_path / "sum" / "config.pbtxt").write_text('backend: "openvino"' + setting("NUM_STREAMS", "1"))
        server.load_model("sum")
        assert server.model_config("sum").max_batch_size == 16
    finally:
        assert server.stop(WAIT_S)


def test_a_scalar_of_the_model_is_a_tensor_of_one_element(tmp_path: Path) -> None:
    x = parameter("x")
    save(version_directory(tmp_path, "double"), [result("y", op.add(x, x))], [x])
    with serving(tmp_path) as server:
        server.load_model("double")
        assert infer(server, "double", x=np.array([2], np.float32))["y"].tolist() == [4]


# --- batches and shapes ---


def test_requests_are_computed_together_and_each_gets_its_rows(tmp_path: Path) -> None:
    config = CONFIGURED.replace("4", "8", 1) + (
        "dynamic_batching { max_queue_delay_microseconds: 300000 preferred_batch_size: [ 8 ] }"
    )
    save_sum(version_directory(tmp_path, "sum", config), rows=1, layout="")
    with serving(tmp_path) as server:
        server.load_model("sum")
        pending = [begin(server, "sum", "total", a=rows(n, n), b=rows(n, 1)) for n in (1, 3, 4)]
        for n, answer in zip((1, 3, 4), pending, strict=True):
            assert answer.outputs()["total"].tolist() == [[n + 1] * 3] * n
        (statistics,) = server.model_statistics("sum")
        assert (statistics.inference_count, statistics.execution_count) == (8, 1)


def test_a_batch_of_fixed_size_is_padded_or_refused(tmp_path: Path) -> None:
    padding = setting("ENABLE_BATCH_PADDING", "yes") + "instance_group [ { kind: KIND_AUTO count: 2 } ]"
    fixing = setting("SKIP_OV_DYNAMIC_BATCHSIZE", "YES") + setting("TARGET_DEVICE", "AUTO:CPU")
    save_sum(version_directory(tmp_path, "padded", CONFIGURED + padding))
    save_sum(version_directory(tmp_path, "fixed", CONFIGURED + fixing))
    with serving(tmp_path) as server:
        for name in ("padded", "fixed"):
            server.load_model(name)
            assert infer(server, name, a=rows(4, 1), b=rows(4, 2))["total"].tolist() == [[3, 3, 3]] * 4
        assert infer(server, "padded", a=rows(1, 1), b=rows(1, 2))["total"].tolist() == [[3, 3, 3]]
        with pytest.raises(TritonError, match=r"batch size '4', got '1'.*'ENABLE_BATCH_PADDING'"):
            infer(server, "fixed", a=rows(1, 1), b=rows(1, 2))


def save_square(directory: Path) -> None:
    """y = 2 x, in two dimensions of size 2; the first may be any from 1 to 3."""
    x = parameter("x", (1, 3), 2)
    save(directory, [result("y", op.add(x, x))], [x])


SQUARE = """
    backend: "openvino"
    input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, -1 ] } ]
    output [ { name: "y" data_type: TYPE_FP32 dims: [ -1, -1 ] } ]
"""


def test_a_model_is_reshaped_to_its_configuration(tmp_path: Path) -> None:
    save_square(version_directory(tmp_path, "square", SQUARE + setting("RESHAPE_IO_LAYERS", "yes")))
    with serving(tmp_path) as server:
        server.load_model("square")
        for shape in ((5, 4), (1, 7)):
            assert (infer(server, "square", x=np.ones(shape, np.float32))["y"] == np.full(shape, 2)).all()


def test_a_shape_that_the_model_does_not_take_is_named(tmp_path: Path) -> None:
    config = SQUARE.replace("-1, -1", "-1, 2")
    save_square(version_directory(tmp_path, "square", config))
    with serving(tmp_path) as server:
        server.load_model("square")
        with pytest.raises(TritonError, match=r"'x' of model 'square' has shape \[4, 2\], expected \[-1, 2\]"):
            infer(server, "square", x=np.ones((4, 2), np.float32))
        with pytest.raises(TritonError, match=r"unexpected shape for input 'x'"):
            infer(server, "square", x=np.ones((2, 3), np.float32))
        assert infer(server, "square", x=np.ones((3, 2), np.float32))["y"].shape == (3, 2)


def test_an_input_that_is_left_out_is_not_that_of_an_earlier_request(tmp_path: Path) -> None:
    config = CONFIGURED.replace('"b" data_type: TYPE_FP32', '"b" optional: true data_type: TYPE_FP32')
    save_sum(version_directory(tmp_path, "sum", config))
    with serving(tmp_path) as server:
        server.load_model("sum")
        assert infer(server, "sum", a=rows(1, 1), b=rows(1, 2))["total"].tolist() == [[3, 3, 3]]
        with pytest.raises(TritonError, match="model 'sum' needs a value for its input 'b'"):
            infer(server, "sum", a=rows(1, 1))


RAGGED = """
    backend: "openvino" max_batch_size: 8
    dynamic_batching { max_queue_delay_microseconds: 300000 preferred_batch_size: [ 2 ] }
    input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true } ]
    output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
    batch_input [ {
      kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_INT32 source_input: "x"
    } ]
"""


def save_ends(directory: Path) -> None:
    """y = the last element of each request."""
    x, ends = parameter("x", -1), parameter("ends", -1, kind="i32")
    last = op.gather(x, op.subtract(ends, op.constant(np.int32(1))), op.constant(np.int64(0)))
    save(directory, [result("y", op.unsqueeze(last, op.constant(np.int64(1))))], [x, ends])


def test_ragged_inputs_share_a_batch(tmp_path: Path) -> None:
    save_ends(version_directory(tmp_path, "last", RAGGED))
    save_ends(version_directory(tmp_path, "fixed", RAGGED + setting("ENABLE_BATCH_PADDING", "YES")))
    with serving(tmp_path) as server:
        server.load_model("last")
        pending = [begin(server, "last", x=np.arange(n + 1, dtype=np.float32)[None]) for n in (2, 5)]
        assert [answer.outputs()["y"].tolist() for answer in pending] == [[[2]], [[5]]]
        (statistics,) = server.model_statistics("last")
        assert statistics.execution_count == 1
        with pytest.raises(TritonError, match=r"a batch of fixed size .* cannot have ragged inputs"):
            server.load_model("fixed")


def test_state_and_controls_of_sequences_are_inputs_of_the_model(tmp_path: Path) -> None:
    x, before, start = parameter("x", -1, 2), parameter("before", -1, 2), parameter("start", -1, 1)
    kept = op.multiply(before, op.subtract(op.constant(np.float32(1)), start))
    total = op.add(x, kept)
    config = """
        backend: "openvino" max_batch_size: 2
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
        sequence_batching {
          control_input [ { name: "start" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] } ]
          state [ { input_name: "before" output_name: "after" data_type: TYPE_BF16 dims: [ 2 ] } ]
        }
    """
    save(
        version_directory(tmp_path, "summing", config),
        [result("y", total), result("after", op.abs(total))],
        [x, before, start],
    )
    with serving(tmp_path) as server:
        server.load_model("summing")
        sums = [_step(server, number) for number in range(3)]
        assert sums == [[[1, 1]], [[2, 2]], [[3, 3]]]


def _step(server: InferenceServer, number: int) -> Any:
    flags = RequestFlag.SEQUENCE_START if number == 0 else RequestFlag.SEQUENCE_END if number == 2 else RequestFlag(0)
    inputs = {"x": np.ones((1, 2), np.float32)}
    return Pending(server, "summing", inputs, correlation_id=7, flags=flags).outputs()["y"].tolist()


# --- data types ---


FLOATS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32, "f64": np.float64}
INTEGERS = {f"{sign}{bits}": np.dtype(f"{sign}{bits // 8}") for sign in "iu" for bits in (8, 16, 32, 64)}


@pytest.mark.parametrize(("kind", "dtype"), {"boolean": np.bool_, **FLOATS, **INTEGERS}.items())
def test_each_data_type_goes_through(tmp_path: Path, kind: str, dtype: Any) -> None:
    save_reversed(version_directory(tmp_path, "reversed", 'backend: "openvino"'), kind)
    with serving(tmp_path) as server:
        server.load_model("reversed")
        x = np.array([0, 1, 1], dtype)
        got = infer(server, "reversed", x=x)["y"]
        assert got.dtype == x.dtype and got.tolist() == x[::-1].tolist()


def test_texts_go_through(tmp_path: Path) -> None:
    x, which = parameter("x", -1, kind="string"), parameter("which", -1, kind="i64")
    chosen = op.gather(x, which, op.constant(np.int64(0)))
    save(version_directory(tmp_path, "chosen", 'backend: "openvino"'), [result("y", chosen)], [x, which])
    with serving(tmp_path) as server:
        server.load_model("chosen")
        got = infer(server, "chosen", x=texts("a", "ö", ""), which=np.array([2, 1, 1]))["y"]
        assert got.tolist() == [b"", "ö".encode(), "ö".encode()]


def test_the_configured_data_types_are_converted(tmp_path: Path) -> None:
    config = CONFIGURED.replace("TYPE_FP32", "TYPE_UINT8", 1).replace(
        '"total" data_type: TYPE_FP32', '"total" data_type: TYPE_INT64'
    )
    save_sum(version_directory(tmp_path, "sum", config))
    with serving(tmp_path) as server:
        server.load_model("sum")
        got = infer(server, "sum", a=rows(2, 250).astype(np.uint8), b=rows(2, 10))["total"]
        assert got.dtype == np.int64 and got.tolist() == [[260] * 3] * 2
        with pytest.raises(
            TritonError, match="inference input 'a' data-type is 'FP32', but model 'sum' expects 'UINT8'"
        ):
            infer(server, "sum", a=rows(2, 1), b=rows(2, 1))


def test_an_element_type_without_a_datatype_is_refused(tmp_path: Path) -> None:
    x = parameter("x", 2, kind="u4")
    save(version_directory(tmp_path, "small", 'backend: "openvino"'), [result("y", op.convert(x, "f32"))], [x])
    with (
        serving(tmp_path) as server,
        pytest.raises(TritonError, match="'x' is of element type u4, which has no Triton"),
    ):
        server.load_model("small")


# --- parameters and what is refused ---


def test_parameters_reach_the_runtime(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parameters = {
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": "1",
        "PERFORMANCE_HINT": "latency",
        "HINT_BF16": "YES",
        "COMPILATION_NUM_THREADS": "1",
        "TARGET_DEVICE": "CPU",
        "UNKNOWN_KEY": "1",
    }
    config = CONFIGURED + "".join(setting(*item) for item in parameters.items())
    directory = version_directory(tmp_path, "sum", config)
    save_sum(directory)
    with caplog.at_level(logging.WARNING), serving(tmp_path) as server:
        server.load_model("sum")
        compiled = version_of(server, "sum").state.compiled
        assert compiled.get_property("INFERENCE_NUM_THREADS") == 1
        assert str(compiled.get_property("PERFORMANCE_HINT")).endswith("LATENCY")
        own = openvino.Core().compile_model(directory / "model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
        precisions = [model.get_property("INFERENCE_PRECISION_HINT") for model in (compiled, own)]
        assert precisions[0] == precisions[1]  # float32 on CPUs that compute no bfloat16
        assert (infer(server, "sum", a=rows(1, 1), b=rows(1, 2))["total"] == 3).all()
    assert "model 'sum': parameter 'UNKNOWN_KEY' has no effect in this server" in caplog.text
    assert "model 'sum': the device CPU has no property COMPILATION_NUM_THREADS" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (CONFIGURED.replace('"total"', '"absent"'), "output 'absent' is not in the model, expected one of total, sc"),
        (CONFIGURED.replace('"b"', '"c"'), "input 'c' is not in the model, expected one of a, b"),
        (CONFIGURED.replace(', { name: "b" data_type: TYPE_FP32 dims: [ 3 ] }', ""), "configuration expects 1 inputs, "
         "model provides 2: a, b"),
        (CONFIGURED.replace("[ 3 ]", "[ 4 ]", 1), r"tensor 'a': the model expects 2 dimensions \(shape \[-1, 3\]\) but "
         r"the model configuration specifies 2 dimensions \(an initial batch .* complete shape \[-1, 4\]\)"),
        (CONFIGURED.replace("max_batch_size: 4", ""), "the model expects 2 dimensions"),
        (CONFIGURED.replace("TYPE_FP32", "TYPE_STRING", 1), "cpu_convert can't convert from: string precision to: f32"),
        (CONFIGURED + "instance_group [ { kind: KIND_MODEL } ]", "only instances of KIND_CPU, got KIND_MODEL"),
        (CONFIGURED + 'default_model_filename: "other.xml"', "unable to find '.*other.xml' for model 'sum'"),
        (CONFIGURED + setting("PERFORMANCE_HINT", "fast"), "'PERFORMANCE_HINT' is 'fast': expected LATENCY or THROUG"),
        (CONFIGURED + setting("INFERENCE_NUM_THREADS", "-1"), "expected a number of at least 0"),
        (CONFIGURED + setting("ENABLE_BATCH_PADDING", "maybe"), "'maybe': expected YES or NO"),
        (CONFIGURED + setting("HINT_BF16", "no"), "'HINT_BF16' is 'no': expected YES"),
        (CONFIGURED + setting("TARGET_DEVICE", "NOSUCH"), r"on device 'NOSUCH' \(available: .*CPU.*\): .*NOSUCH"),
        (CONFIGURED + setting("CPU_EXTENSION_PATH", "/no/such.so"), "'CPU_EXTENSION_PATH' is '/no/such.so': .*no/such"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_when_the_model_loads(tmp_path: Path, config: str, reason: str) -> None:
    save_sum(version_directory(tmp_path, "sum", config), layout="")
    with serving(tmp_path) as server, pytest.raises(TritonError, match=reason):
        server.load_model("sum")


def test_a_model_that_keeps_its_number_of_rows_cannot_batch(tmp_path: Path) -> None:
    a = parameter("a", 1, 3)
    total = op.reshape(a, op.constant(np.array([1, 3])), False)
    config = CONFIGURED.replace(', { name: "b" data_type: TYPE_FP32 dims: [ 3 ] }', "")
    save(version_directory(tmp_path, "sum", config), [result("total", total)], [a])
    with serving(tmp_path) as server, pytest.raises(TritonError, match=r"'total'.*\(shape \[1, 3\]\) .* \[-1, 3\]"):
        server.load_model("sum")


def test_a_broken_model_and_absent_weights_are_named(tmp_path: Path) -> None:
    save_sum(version_directory(tmp_path, "weightless", CONFIGURED))
    (tmp_path / "weightless" / "1" / "model.bin").unlink()
    (version_directory(tmp_path, "broken", CONFIGURED) / "model.xml").write_text("<net name='half'")
    with serving(tmp_path) as server:
        with pytest.raises(TritonError, match=r"'weightless': model.xml: .*\('model.bin' is missing next to it\)"):
            server.load_model("weightless")
        with pytest.raises(TritonError, match=r"failed to load model 'broken': model.xml: Unable to read the model"):
            server.load_model("broken")


def test_an_onnx_file_is_served_when_it_is_named(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    tensor = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", 3]) for name in "ab"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["a"], ["b"])], "graph", tensor[:1], tensor[1:])
    directory = version_directory(tmp_path, "negative", 'backend: "openvino" default_model_filename: "model.onnx"')
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9),
        directory / "model.onnx",
    )
    with serving(tmp_path) as server:
        server.load_model("negative")
        assert infer(server, "negative", a=rows(2, 1))["b"].tolist() == [[-1, -1, -1]] * 2


# --- the package ---


def test_without_the_package_the_error_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_sum(version_directory(tmp_path, "sum", CONFIGURED))
    for name in [name for name in sys.modules if name.startswith("llmbackend.backends.openvino.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with serving(tmp_path) as server, pytest.raises(TritonError, match=r"pip install 'llmbackend\[openvino\]'"):
        server.load_model("sum")


def test_the_package_reports_nothing() -> None:
    program = (
        "import sys, llmbackend.backends.openvino.backend\n"
        "assert sys.modules['openvino_telemetry'] is None\n"
        "assert not [name for name in sys.modules if name.startswith('openvino_telemetry.')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# --- over HTTP ---


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("host")) as running:
        yield running


def test_a_client_is_served_over_http(running: Running, tmp_path: Path) -> None:
    model = version_directory(tmp_path, "sum").parent
    save_sum(model / "1")
    config, path = json.dumps({"backend": "openvino"}), model / "1"
    files = {f"file:1/{name}": (path / name).read_bytes() for name in ("model.xml", "model.bin")}
    with triton_http.InferenceServerClient(running.http) as client:
        client.load_model("sum", config=config, files=files)
        assert client.get_model_metadata("sum")["inputs"][0] == {"name": "a", "datatype": "FP32", "shape": [-1, 3]}
        inputs = [triton_http.InferInput(name, [2, 3], "FP32") for name in "ab"]
        for number, each in enumerate(inputs):
            each.set_data_from_numpy(rows(2, number + 1))
        assert client.infer("sum", inputs).as_numpy("scaled").tolist() == [[3, 6, 9]] * 2
        inputs[0] = triton_http.InferInput("a", [2, 3], "INT32").set_data_from_numpy(rows(2, 1).astype(np.int32))
        with pytest.raises(InferenceServerException, match="'a' data-type is 'INT32', but model 'sum' expects 'FP32'"):
            client.infer("sum", inputs)
        client.unload_model("sum")
