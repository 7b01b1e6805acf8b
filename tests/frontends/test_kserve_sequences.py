"""Sequences as Triton's own clients send them, over HTTP, gRPC and a gRPC stream, to python models."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from tests.helpers.kserve_runner import Running
from tests.helpers.waiting import eventually

WAIT_S = 20.0
CONFIG = """backend: "python"
max_batch_size: 4
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] } ]
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } ] }
  ]
  STRATEGY
}
instance_group [ { kind: KIND_CPU } ]
"""
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, arguments):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            values = {tensor.name(): tensor.as_numpy().flatten()[0] for tensor in request.inputs()}
            sequence = values["CORRID"]
            self.sums[sequence] = (0 if values["START"] else self.sums.get(sequence, 0)) + int(values["X"])
            seen = [request.correlation_id(), request.flags(), int(values["READY"]), bool(values["END"])]
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("SUM", np.array([[self.sums[sequence]]], np.int32)),
                pb_utils.Tensor("SEEN", np.array([[str(seen).encode()]], np.object_)),
            ]))
        return responses
"""


def start_host(root: Path) -> InferenceServer:
    for name, strategy in (("direct", "direct { }"), ("oldest", "oldest { max_candidate_sequences: 8 }")):
        (root / "models" / name / "1").mkdir(parents=True)
        (root / "models" / name / "config.pbtxt").write_text(CONFIG.replace("STRATEGY", strategy))
        (root / "models" / name / "1" / "model.py").write_text(MODEL)
    server = InferenceServer(ServerOptions(model_repositories=[root / "models"]))
    server.start()
    return server


HOST_OPTIONS = {"start": start_host}


def x(module: Any, value: int) -> list[Any]:
    made = module.InferInput("X", [1, 1], "INT32")
    made.set_data_from_numpy(np.array([[value]], np.int32))
    return [made]


@pytest.mark.parametrize("model", ["direct", "oldest"])
@pytest.mark.parametrize("sequence", [5, "five"])
def test_a_sequence_over_http_and_grpc(client: Any, model: str, sequence: int | str) -> None:
    module = triton_http if isinstance(client, triton_http.InferenceServerClient) else triton_grpc
    seen = []
    for value in (1, 2, 3):
        result = client.infer(
            model, x(module, value), sequence_id=sequence, sequence_start=value == 1, sequence_end=value == 3
        )
        seen.append((int(result.as_numpy("SUM")[0, 0]), result.as_numpy("SEEN")[0, 0].decode()))
    assert seen == [
        (1, f"[{sequence!r}, 1, 1, False]"),
        (3, f"[{sequence!r}, 0, 1, False]"),
        (6, f"[{sequence!r}, 2, 1, True]"),
    ]
    with pytest.raises(InferenceServerException) as caught:
        client.infer(model, x(module, 4), sequence_id=sequence)
    assert caught.value.message() == (
        f"inference request for sequence {sequence} to model '{model}' must specify the START flag on the first "
        f"request of the sequence"
    )
    with pytest.raises(InferenceServerException, match="must specify a non-zero or non-empty correlation ID"):
        client.infer(model, x(module, 4))


def test_the_sequence_extension_is_claimed(client: Any) -> None:
    metadata = client.get_server_metadata()
    extensions = metadata["extensions"] if isinstance(metadata, dict) else metadata.extensions
    assert "sequence" in extensions


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_sequences_on_one_stream_keep_apart_and_in_order(running: Running, model: str) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    sequences = [101, 102, 103, "text", "other", 106]  # two more than the direct strategy has slots
    length = 5
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for index in range(length):
            for sequence in sequences:
                client.async_stream_infer(
                    model,
                    x(triton_grpc, 10**index),
                    request_id=f"{sequence}/{index}",
                    sequence_id=sequence,
                    sequence_start=index == 0,
                    sequence_end=index == length - 1,
                )
        sums: dict[str, list[int]] = {str(sequence): [] for sequence in sequences}
        for _ in range(length * len(sequences)):
            result, error = answers.get(timeout=WAIT_S)
            assert error is None
            sequence, index = result.get_response().id.split("/")
            assert int(index) == len(sums[sequence])
            sums[sequence].append(int(result.as_numpy("SUM")[0, 0]))
        client.stop_stream()
    assert all(each == [1, 11, 111, 1111, 11111] for each in sums.values())
    running.wait_until_nothing_is_open()


def test_an_error_of_one_sequence_leaves_the_stream_open(running: Running) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("direct", x(triton_grpc, 1), sequence_id=201)
        _, error = answers.get(timeout=WAIT_S)
        assert "must specify the START flag" in error.message()
        client.async_stream_infer("direct", x(triton_grpc, 1), sequence_id=201, sequence_start=True, sequence_end=True)
        result, error = answers.get(timeout=WAIT_S)
        assert error is None and result.as_numpy("SUM")[0, 0] == 1
        client.stop_stream()


def test_statistics_count_the_clients_requests(running: Running) -> None:
    with triton_http.InferenceServerClient(running.http) as client:
        before = client.get_inference_statistics("direct")["model_stats"][0]["inference_count"]
        for sequence, start in ((301, True), (302, True), (302, False)):  # the last batch has a gap
            client.infer("direct", x(triton_http, 1), sequence_id=sequence, sequence_start=start)
        after = client.get_inference_statistics("direct")["model_stats"][0]["inference_count"]
        assert after - before == 3
        for sequence in (301, 302):
            client.infer("direct", x(triton_http, 1), sequence_id=sequence, sequence_end=True)


def test_a_running_sequence_goes_on_while_the_server_stops(tmp_path: Path) -> None:
    running = Running(tmp_path, start=start_host)
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(running.host.stop(WAIT_S)))
    with triton_http.InferenceServerClient(running.http) as client:
        client.infer("oldest", x(triton_http, 1), sequence_id=1, sequence_start=True)
        stopping.start()
        eventually(lambda: running.host.is_exiting, WAIT_S)
        with pytest.raises(InferenceServerException, match="Server is stopping"):
            client.infer("oldest", x(triton_http, 1), sequence_id=2, sequence_start=True)
        assert client.infer("oldest", x(triton_http, 2), sequence_id=1).as_numpy("SUM")[0, 0] == 3
        assert not stopped
        assert client.infer("oldest", x(triton_http, 3), sequence_id=1, sequence_end=True).as_numpy("SUM")[0, 0] == 6
        stopping.join(WAIT_S)
    assert stopped == [True]
    running.stop()
