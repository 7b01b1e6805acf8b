"""Headers and metadata that reach the model as parameters, over real HTTP and gRPC."""

from __future__ import annotations

import json
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.frontends.kserve.request_parameters import HeaderForward
from llmbackend.frontends.protocol_options import ProtocolOptions
from tests.helpers.kserve_runner import Running

MULTI: dict[str, Any] = {
    "inputs": [
        {"name": "S", "datatype": "BYTES", "shape": [1], "data": ["x"]},
        {"name": "I", "datatype": "INT32", "shape": [2, 1], "data": [1, 2]},
    ],
    "outputs": [{"name": "PARAMS"}],
}


HOST_OPTIONS = {
    "protocols": ProtocolOptions(
        http_forward=HeaderForward.of("(X-.*|traceparent|timeout|triton_)"), grpc_forward=HeaderForward.of("(X-.*)")
    )
}


def parameters(running: Running, headers: dict[str, str], **fields: Any) -> Any:
    response = httpx.post(f"http://{running.http}/v2/models/multi/infer", json=MULTI | fields, headers=headers)
    assert response.status_code == 200, response.text
    return json.loads(response.json()["outputs"][0]["data"][0])["params"]


def llm(**fields: Any) -> Any:
    request = pb.ModelInferRequest(model_name="llm", **fields)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"params")
    return request


def test_http_headers_are_found_in_any_case_and_keep_the_clients(running: Running) -> None:
    headers = {"X-My-Header": "v", "x-lower": "w", "Traceparent": "tp", "Authorization": "no", "Max-X-Y": "part"}
    assert parameters(running, headers) == {
        "X-My-Header": "v",
        "x-lower": "w",
        "Traceparent": "tp",
        "Max-X-Y": "part",
    }


def test_a_forwarded_header_wins_over_the_body(running: Running) -> None:
    found = parameters(running, {"X-User": "proxy"}, parameters={"X-User": "forged", "n": 1})
    assert found == {"X-User": "proxy", "n": 1}


def test_headers_of_requests_on_one_connection_stay_apart(running: Running) -> None:
    with httpx.Client(base_url=f"http://{running.http}") as client:
        for headers in ({"X-A": "1"}, {}, {"X-B": "2"}):
            response = client.post("/v2/models/multi/infer", json=MULTI, headers=headers)
            assert json.loads(response.json()["outputs"][0]["data"][0])["params"] == headers


@pytest.mark.parametrize("name", ["timeout", "triton_enable_empty_final_response"])
def test_reserved_names_are_refused(running: Running, name: str) -> None:
    response = httpx.post(f"http://{running.http}/v2/models/multi/infer", json=MULTI, headers={name: "1"})
    assert response.status_code == 400 and "reserved for Triton usage" in response.json()["error"]


def test_generate_forwards_no_header(running: Running) -> None:
    body = {"text_input": "params", "id": "hdr"}
    answer = httpx.post(f"http://{running.http}/v2/models/llm/generate", json=body, headers={"X-My-Header": "v"}).json()
    assert json.loads(answer["text_output"])["params"] == {"id": "hdr"}


def test_grpc_metadata_reaches_unary_and_streamed_requests(running: Running) -> None:
    metadata = (("x-my-header", "v"), ("other", "n"))
    unary = pb.ModelInferRequest(model_name="multi")
    unary.inputs.add(name="S", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"x")
    unary.inputs.add(name="I", datatype="INT32", shape=[2, 1]).contents.int_contents.extend([1, 2])
    unary.outputs.add(name="PARAMS")
    with grpc.insecure_channel(running.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = [stub.ModelInfer(unary, metadata=metadata)]
        answers += [item.infer_response for item in stub.ModelStreamInfer(iter([llm(), llm()]), metadata=metadata)]
    assert len(answers) == 3
    for answer in answers:
        assert json.loads(answer.raw_output_contents[0][4:])["params"] == {"x-my-header": "v"}


def test_nothing_is_forwarded_by_default(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Running(tmp_path_factory.mktemp("plain")) as plain:
        assert parameters(plain, {"X-My-Header": "v"}) == {}


def test_patterns_are_those_of_re2_and_broken_ones_are_refused() -> None:
    assert HeaderForward.of("MY_.*").added({}, [("my_header", "v")]) == {"my_header": "v"}
    strict = HeaderForward.of("(?-i)My_[[:alpha:]]+$")
    assert strict.added({}, [(b"My_header", b"v"), (b"my_header", b"w"), (b"My_1", b"x")]) == {"My_header": "v"}
    with pytest.raises(ValueError, match=r"missing \)"):
        HeaderForward.of("(")
    with pytest.raises(ValueError):
        HeaderForward.of(r"(a)\1")  # what would take exponential time is no pattern
