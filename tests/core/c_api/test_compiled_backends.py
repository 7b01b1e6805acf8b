"""Compiled backends in the host: life cycle, requests, responses, errors, streams, BLS, metrics, ownership."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.tensors import Tensor
from llmbackend.frontends.operations.probes import render
from tests.helpers.compiled_backends import DECOUPLED, NUMBER_IO, TEXT_IO, CompiledRepository, Libraries, ask, text_of
from tests.helpers.core_host import send, serving
from tests.helpers.waiting import eventually


def test_fields_of_the_configuration_are_left_to_the_backend(
    backends: CompiledRepository, caplog: pytest.LogCaptureFixture
) -> None:
    accelerators = 'execution_accelerators { cpu_execution_accelerator { name: "openvino" } }'
    config = f"optimization {{ {accelerators} eager_batching: true graph {{ level: 1 }} }}"
    backends.model("m", "identity", config, io=NUMBER_IO)
    with caplog.at_level(logging.WARNING), serving(backends, "m"):
        ignored = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert len(ignored) == 1 and "optimization.eager_batching" in ignored[0]


def test_tensors_come_back_as_they_were(backends: CompiledRepository) -> None:
    io = "".join(
        f'input [ {{ name: "INPUT{i}" data_type: TYPE_{t} dims: [ -1, 2 ] }} ]\n'
        f'output [ {{ name: "OUTPUT{i}" data_type: TYPE_{t} dims: [ -1, 2 ] }} ]\n'
        for i, t in enumerate(("INT32", "FP16", "BF16", "STRING", "BOOL"))
    )
    backends.model("m", "identity", io=io)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    texts = np.empty((1, 2), np.object_)
    texts[0] = [b"\x00\xff", b""]
    sent = [
        Tensor.of("INPUT0", np.array([[1, -2], [3, 4]], np.int32).T),  # not contiguous
        Tensor.of("INPUT1", np.array([[0.5, np.inf]], np.float16)),
        Tensor.of("INPUT2", np.array([[1.5, -2]], ml_dtypes.bfloat16)),
        Tensor("INPUT3", "BYTES", (1, 2), texts),
        Tensor.of("INPUT4", np.zeros((0, 2), np.bool_)),
    ]
    with serving(backends, "m") as server:
        (response,) = send(server, "m", *sent).responses()
        assert response.error is None
        for tensor, output in zip(sent, response.outputs, strict=True):
            assert (output.name, output.datatype, output.shape) == (
                tensor.name.replace("INPUT", "OUTPUT"),
                tensor.datatype,
                tensor.shape,
            )
            assert output.data.tolist() == tensor.data.tolist()


def test_a_correlation_id_below_zero_fails_no_request(backends: CompiledRepository) -> None:
    """A C id has no sign, and an id that can not be read would fail the batch of its request."""
    backends.model("m", "identity", io=NUMBER_IO)
    with serving(backends, "m") as server:
        (response,) = send(server, "m", Tensor.of("INPUT0", np.array([7], np.int32)), correlation_id=-2).responses()
        assert response.error is None and response.outputs[0].data.tolist() == [7]


def test_statistics_are_those_that_the_backend_reports(backends: CompiledRepository) -> None:
    backends.model("m", "identity", io=NUMBER_IO)
    with serving(backends, "m") as server:
        for _ in range(3):
            send(server, "m", Tensor.of("INPUT0", np.array([1], np.int32))).responses()
        eventually(lambda: server.model_statistics("m")[0].inference_stats.success.count == 3)
        eventually(lambda: server.model_statistics("m")[0].execution_count == 3)


def test_an_error_response_is_the_clients(backends: CompiledRepository) -> None:
    backends.model("m", "scripted", io=TEXT_IO)
    with serving(backends, "m") as server:
        (response,) = ask(server, "error the disk is full").responses()
        assert response.error is not None
        assert (response.error.code, response.error.message) == (ErrorCode.UNAVAILABLE, "the disk is full")


def test_an_error_from_execute_leaves_the_request_with_the_host(backends: CompiledRepository) -> None:
    backends.model("m", "scripted", io=TEXT_IO)
    with serving(backends, "m") as server:
        (response,) = ask(server, "refuse not today").responses()
        assert response.error is not None
        assert (response.error.code, response.error.message) == (ErrorCode.UNSUPPORTED, "not today")
        assert text_of(ask(server, "parameters")) == ""


def test_a_factory_streams_after_the_release(backends: CompiledRepository) -> None:
    backends.model("m", "scripted", DECOUPLED, io=TEXT_IO)
    with serving(backends, "m") as server:
        client = ask(server, "stream 50")
        texts = [response.outputs[0].data.item() for response in client.responses()]
        assert texts == [str(i).encode() for i in range(50)]


def test_a_response_outlives_the_release_of_its_request(backends: CompiledRepository) -> None:
    backends.model("m", "scripted", io=TEXT_IO)
    with serving(backends, "m") as server:
        assert text_of(ask(server, "late")) == ""


def test_parameters_go_both_ways(backends: CompiledRepository) -> None:
    backends.model("m", "scripted", io=TEXT_IO)
    with serving(backends, "m") as server:
        client = ask(server, "parameters", parameters={"a": "x", "b": 3, "c": True})
        (response,) = client.responses()
        assert response.outputs[0].data.item() == b"a=x;b=3;c=true;"
        assert response.parameters == {"added": 42}


def test_inferences_on_other_models(backends: CompiledRepository) -> None:
    backends.model("m", "scripted", io=TEXT_IO)
    backends.model("other", "identity", io=NUMBER_IO)
    with serving(backends, "m", "other") as server:
        assert text_of(ask(server, "bls other")) == "OUTPUT0=7"
        (response,) = ask(server, "bls nobody").responses()
        assert response.error is not None and "nobody" in response.error.message


def test_metrics_and_log_lines_are_the_hosts(backends: CompiledRepository, caplog: pytest.LogCaptureFixture) -> None:
    backends.model("m", "scripted", io=TEXT_IO)
    with caplog.at_level(logging.INFO, "llmbackend"), serving(backends, "m") as server:
        assert [ask(server, "metric").responses()[0].outputs[0].data.item() for _ in range(2)] == [
            b"1.500000",
            b"3.000000",
        ]
        assert b'scripted_requests{model="m"} 3' in render(server.metrics_registry)
        told = [ask(server, verb).responses()[0].error for verb in ("decrement", "set")]
        assert [str(error) for error in told] == [
            "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values.",
            "TRITONSERVER_METRIC_KIND_COUNTER does not support Set",
        ]
    records = [record for record in caplog.records if record.getMessage() == "initialised m"]
    assert {(record.filename, record.lineno) for record in records} == {("scripted.cpp", 7)}


def test_a_failed_model_initialize_is_the_loads_error(backends: CompiledRepository) -> None:
    backends.model("m", "scripted", 'parameters { key: "broken" value { string_value: "1" } }', io=TEXT_IO)
    with serving(backends) as server, pytest.raises(TritonError, match="the model is broken"):
        server.load_model("m")


def test_preferred_groups_are_used(backends: CompiledRepository) -> None:
    backends.model("m", "scripted", io=TEXT_IO)
    with serving(backends, "m") as server:
        assert [group.count for group in server.model_config("m").instance_group] == [2]


def test_a_library_that_cannot_be_loaded_says_why(backends: CompiledRepository) -> None:
    folder = backends.backends / "torn"
    folder.mkdir()
    (folder / "libtriton_torn.so").write_bytes(b"\x7fELF, but no more")
    backends.model("m", "torn", io=TEXT_IO)
    with serving(backends) as server, pytest.raises(TritonError, match=r"unable to load shared library: .*too short"):
        server.load_model("m")


def test_many_loads_leave_nothing(backends: CompiledRepository) -> None:
    backends.model("m", "scripted", DECOUPLED, io=TEXT_IO)
    with serving(backends) as server:
        for _ in range(20):
            server.load_model("m")
            assert len(ask(server, "stream 3").responses()) == 3
            server.unload_model("m")


def test_a_backend_in_the_version_directory_comes_first(backends: CompiledRepository, libraries: Libraries) -> None:
    model = backends.model("m", "scripted", io=NUMBER_IO)
    (model / "1" / "libtriton_scripted.so").symlink_to(libraries.library("identity"))
    with serving(backends, "m") as server:
        (response,) = send(server, "m", Tensor.of("INPUT0", np.array([5], np.int32))).responses()
        assert response.outputs[0].data.tolist() == [5]


def test_a_compiled_python_backend_serves_python_based_backends(
    backends: CompiledRepository, libraries: Libraries
) -> None:
    backends.backend("mine", "", file="model.py")
    (backends.backends / "python").mkdir()
    (backends.backends / "python" / "libtriton_python.so").symlink_to(libraries.library("scripted"))
    backends.model("m", "mine", io=TEXT_IO)
    with serving(backends, "m") as server:
        assert server.model_config("m").runtime == "model.py"
        assert ask(server, "error of scripted").responses()[0].error is not None
