"""Access control of a real server, with the clients that are used in practice."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.helpers.server_process import ServerProcess, start_server, stop_server, write_mock_model
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow

PROMPT = "a prompt that no log may hold"
KEYS = """
# name:key
alice:sk-alice
twice:sk-twice rpm=2
streams:sk-streams rpm=2
unary:sk-unary rpm=1
short:sk-short tpm=10
"""


@dataclass(frozen=True)
class Guarded:
    process: ServerProcess
    key_file: Path
    log: Path

    @property
    def url(self) -> str:
        return f"http://{self.process.http}"

    @contextmanager
    def openai(self, key: str) -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0) as client:
            yield client

    def grpc(self) -> triton_grpc.InferenceServerClient:
        return triton_grpc.InferenceServerClient(self.process.grpc)

    def metric(self, name: str, **labels: str) -> float:
        with urllib.request.urlopen(f"http://{self.process.metrics}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        found = [line for line in lines if line.startswith(f"{name}{{") and all(label in line for label in wanted)]
        return sum(float(line.rpartition(" ")[2]) for line in found)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    root = tmp_path_factory.mktemp("access")
    write_mock_model(root / "repository", "mock")
    write_mock_model(root / "repository", "slow", mock_step_ms=200)
    key_file, log = root / "keys", root / "log"
    key_file.write_text(KEYS)
    with log.open("w") as stderr:
        process = start_server(
            f"--model-repository={root / 'repository'}",
            f"--api-key-file={key_file}",
            "--api-key=sk-plain",
            "--log-requests=true",
            "--http-restricted-api=model-repository,statistics:Admin-Key=letmein",
            "--grpc-restricted-protocol=model-repository,statistics:admin-key=letmein",
            log=stderr,
        )
    yield Guarded(process, key_file, log)
    assert stop_server(process) == 0


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def curl(url: str, *arguments: str) -> tuple[int, dict[str, str], str]:
    """(status, headers, body)"""
    run = subprocess.run(["curl", "-sS", "-i", *arguments, url], capture_output=True, text=True, timeout=30, check=True)
    head, _, body = run.stdout.replace("\r\n", "\n").partition("\n\n")
    status, *lines = head.split("\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, body


def wait_for_log(server: Guarded, text: str) -> None:
    eventually(lambda: text in server.log.read_text())


def text_input(text: str = PROMPT) -> Any:
    tensor = triton_grpc.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return tensor


def flag(name: str, value: bool) -> Any:
    tensor = triton_grpc.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


def stream(server: Guarded, key: str, *requests: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(result, error) of each request, one after the other on one ModelStreamInfer."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = server.grpc()
    client.start_stream(lambda result, error: answers.put((result, error)), headers=bearer(key))
    found = []
    for number, request in enumerate(requests):
        inputs = [text_input(), *request.pop("inputs", [])]
        client.async_stream_infer("mock", inputs, request_id=str(number), parameters={"max_tokens": 4}, **request)
        found.append(answers.get(timeout=30))
    client.stop_stream()
    client.close()
    return found


def leave_a_stream(server: Guarded, model: str) -> None:
    """Cancels a call as soon as its first response has come."""
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(PROMPT.encode())
    request.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    request.parameters["max_tokens"].int64_param = 400
    with grpc.insecure_channel(server.process.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([request, request]), metadata=list(bearer("sk-alice").items()))
        assert not next(call).error_message
        call.cancel()


# --- keys ---


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
def test_probes_need_no_key(server: Guarded, path: str) -> None:
    assert curl(f"{server.url}{path}")[0] == 200


@pytest.mark.parametrize("path", ["/v2", "/v2/models/mock", "/v2/models/mock/ready", "/v2/nothing", "/"])
def test_without_a_key_the_answer_has_tritons_shape(server: Guarded, path: str) -> None:
    status, headers, body = curl(f"{server.url}{path}")
    assert (status, headers["www-authenticate"]) == (401, "bearer")
    assert set(json.loads(body)) == {"error"}
    status, headers, body = curl(f"{server.url}{path}", "-H", "Authorization: Bearer sk-wrong")
    assert (status, headers["www-authenticate"]) == (401, 'bearer error="invalid_token"')
    assert "sk-wrong" not in body


def test_openai_clients_see_openais_error(server: Guarded) -> None:
    with server.openai("sk-wrong") as client, pytest.raises(openai.AuthenticationError) as error:
        client.completions.create(model="mock", prompt=PROMPT)
    assert error.value.code == "invalid_api_key" and error.value.type == "invalid_request_error"


@pytest.mark.parametrize("key", ["sk-alice", "sk-plain"])
def test_a_key_opens_openai_whole_and_streamed(server: Guarded, key: str) -> None:
    with server.openai(key) as client:
        whole = client.completions.create(model="mock", prompt=PROMPT, max_tokens=6, seed=1)
        chunks = client.completions.create(model="mock", prompt=PROMPT, max_tokens=6, seed=1, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_a_key_opens_http_and_grpc_to_tritons_clients(server: Guarded) -> None:
    http = triton_http.InferenceServerClient(server.process.http)
    assert http.is_server_ready()
    with pytest.raises(InferenceServerException, match="You didn't provide an API key"):
        http.get_server_metadata()
    assert http.get_server_metadata(headers=bearer("sk-alice"))["name"] == "triton"
    http.close()
    client = server.grpc()
    assert client.is_server_live() and client.is_server_ready()
    with pytest.raises(InferenceServerException, match="provide an API key") as error:
        client.get_server_metadata()
    assert error.value.status() == "StatusCode.UNAUTHENTICATED"
    assert client.get_server_metadata(headers=bearer("sk-alice")).name == "triton"
    client.close()
    ((result, error_of_stream),) = stream(server, "sk-alice", {})
    assert error_of_stream is None and result.as_numpy("text_output") is not None


def test_a_stream_without_a_key_is_ended(server: Guarded) -> None:
    ended: queue.Queue[Any] = queue.Queue()
    client = server.grpc()
    client.start_stream(lambda result, error: ended.put(error), headers=bearer("sk-wrong"))
    error = ended.get(timeout=30)
    assert (error.message(), error.status()) == ("Incorrect API key provided.", "StatusCode.UNAUTHENTICATED")
    client.close()


def test_grpc_health_is_open_and_an_unknown_rpc_is_unimplemented(server: Guarded) -> None:
    with grpc.insecure_channel(server.process.grpc) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as error:
            absent: Any = channel.unary_unary("/inference.GRPCInferenceService/Nothing")
            absent(b"", timeout=10)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_changed_file_opens_and_closes_without_a_restart(server: Guarded) -> None:
    def status(key: str) -> int:
        return curl(f"{server.url}/v2", "-H", f"Authorization: Bearer {key}")[0]

    def becomes(key: str, expected: int) -> bool:
        eventually(lambda: status(key) == expected)
        return True

    assert status("sk-late") == 401
    server.key_file.write_text(f"{KEYS}\nlate:sk-late\n")
    assert becomes("sk-late", 200)
    server.key_file.write_text("this is no key file")
    time.sleep(1.1)
    assert status("sk-late") == 200, "the last good keys stay"
    server.key_file.write_text(KEYS)
    assert becomes("sk-late", 401)
    assert status("sk-alice") == 200


def test_an_open_stream_has_the_keys_of_the_file(server: Guarded) -> None:
    """Each of its requests is checked: for the limits that its key has now, and whether there is the key at all."""
    sent: queue.Queue[pb.ModelInferRequest | None] = queue.Queue()
    request = pb.ModelInferRequest(model_name="mock")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(PROMPT.encode())
    request.parameters["max_tokens"].int64_param = 1

    def error_of_next(call: Any) -> str:
        sent.put(request)
        return str(next(call).error_message)

    def changed(text: str) -> None:
        server.key_file.write_text(KEYS + text)
        time.sleep(1.1)

    changed("leaves:sk-leaves\n")
    with grpc.insecure_channel(server.process.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter(sent.get, None), metadata=list(bearer("sk-leaves").items()))
        assert error_of_next(call) == ""
        changed("leaves:sk-leaves rpm=1\n")
        assert error_of_next(call) == ""
        assert "Rate limit reached for requests per minute (RPM): limit 1." in error_of_next(call)
        changed("")
        with pytest.raises(grpc.RpcError) as ended:
            error_of_next(call)
        sent.put(None)
    assert (ended.value.code(), ended.value.details()) == (
        *(grpc.StatusCode.UNAUTHENTICATED, "Incorrect API key provided."),
    )


# --- limits ---


def test_requests_beyond_the_limit_get_openais_429(server: Guarded) -> None:
    with server.openai("sk-twice") as client:
        for left in ("1", "0"):
            answer = client.completions.with_raw_response.create(model="mock", prompt=PROMPT, max_tokens=2)
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == left
        with pytest.raises(openai.RateLimitError) as error:
            client.chat.completions.create(model="mock", messages=[{"role": "user", "content": PROMPT}])
        assert client.models.with_raw_response.list(extra_headers={"Admin-Key": "letmein"}).status_code == 200
    assert (error.value.code, error.value.type) == ("rate_limit_exceeded", "requests")
    assert 1 <= int(error.value.response.headers["retry-after"]) <= 30
    assert error.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    status, headers, body = curl(
        f"{server.url}/v2/models/mock/generate", "-H", "Authorization: Bearer sk-twice", "-d", '{"text_input": "x"}'
    )
    assert status == 429 and "retry-after" in headers and "per minute (RPM): limit 2" in json.loads(body)["error"]


def test_each_request_of_a_grpc_stream_is_admitted_or_refused_in_band(server: Guarded) -> None:
    answers = stream(server, "sk-streams", {}, {}, {}, {})
    assert [error is None for _, error in answers] == [True, True, False, False]
    assert "Rate limit reached for requests per minute" in str(answers[2][1])
    assert server.metric("llmbackend:api_requests_total", key_name="streams", outcome="rate_limited") == 2
    assert server.metric("llmbackend:api_requests_total", key_name="streams", outcome="accepted") == 2


def test_what_is_named_twice_is_refused_with_a_key_as_without_one(server: Guarded) -> None:
    output = triton_grpc.InferRequestedOutput("text_output")
    answers = stream(server, "sk-alice", {"inputs": [text_input()]}, {"outputs": [output, output]})
    assert "input 'text_input' already exists in request" in str(answers[0][1])
    assert "output 'text_output' already exists in request" in str(answers[1][1])


def test_a_unary_rpc_beyond_the_limit_is_resource_exhausted(server: Guarded) -> None:
    with grpc.insecure_channel(server.process.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        codes = []
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as error:  # the first for a reason of the model's: it is decoupled
                stub.ModelInfer(pb.ModelInferRequest(model_name="mock"), metadata=list(bearer("sk-unary").items()))
            codes.append(error.value.code())
        assert codes == [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED]
        [retry_after] = [item.value for item in error.value.trailing_metadata() if item.key == "retry-after"]
        assert int(retry_after) in range(1, 61)


def test_tokens_are_counted_on_every_protocol_whether_the_client_asked_or_not(server: Guarded) -> None:
    def used() -> tuple[float, float]:
        name = "llmbackend:api_tokens_total"
        return tuple(server.metric(name, key_name="alice", kind=kind) for kind in ("prompt", "generated"))  # type: ignore[return-value]

    before = used()
    with server.openai("sk-alice") as client:
        usage = client.completions.create(model="mock", prompt=PROMPT, max_tokens=5, temperature=0).usage
        list(client.completions.create(model="mock", prompt=PROMPT, max_tokens=5, temperature=0, stream=True))
    assert usage is not None
    one = (usage.prompt_tokens, usage.completion_tokens)
    assert one[0] > 0 and one[1] > 0
    body = json.dumps({"text_input": PROMPT, "parameters": {"max_tokens": 5, "temperature": 0}})
    for path in ("generate", "generate_stream"):
        curl(f"{server.url}/v2/models/mock/{path}", "-H", "Authorization: Bearer sk-alice", "-d", body)
    after = used()
    assert (after[0] - before[0], after[1] - before[1]) == (4 * one[0], 4 * one[1])


def test_tokens_beyond_the_limit_refuse_the_next_request(server: Guarded) -> None:
    with server.openai("sk-short") as client:
        list(client.completions.create(model="mock", prompt=PROMPT, max_tokens=8, stream=True))
        with pytest.raises(openai.RateLimitError) as error:
            client.completions.create(model="mock", prompt=PROMPT)
    assert (error.value.code, error.value.type) == ("rate_limit_exceeded", "tokens")


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        ({}, {"text_output"}),
        ({"inputs": [flag("return_num_output_tokens", True)]}, {"text_output", "num_output_tokens"}),
        ({"inputs": [flag("return_num_input_tokens", False)]}, {"text_output"}),
        ({"outputs": [triton_grpc.InferRequestedOutput("text_output")]}, {"text_output"}),
        (
            {
                "inputs": [flag("return_num_input_tokens", True), flag("return_num_output_tokens", True)],
                "outputs": [triton_grpc.InferRequestedOutput("num_input_tokens")],
            },
            {"num_input_tokens"},
        ),
    ],
)
def test_counting_shows_a_client_no_tensor_it_did_not_ask_for(
    server: Guarded, request_: dict[str, Any], names: set[str]
) -> None:
    ((result, error),) = stream(server, "sk-alice", dict(request_))
    assert error is None
    assert {output.name for output in result.get_response().outputs} == names


# --- restricted APIs ---


def test_restricted_http_apis_want_their_header(server: Guarded) -> None:
    client = triton_http.InferenceServerClient(server.process.http)
    for headers in (bearer("sk-alice"), bearer("sk-alice") | {"admin-key": "wrong"}):
        with pytest.raises(InferenceServerException) as error:
            client.get_model_repository_index(headers=headers)
        assert error.value.message() == "This API is restricted, expecting header 'admin-key'"
        assert error.value.status() == "403"
    headers = bearer("sk-alice") | {"admin-key": "letmein"}
    assert client.get_model_repository_index(headers=headers)[0]["name"] == "mock"
    assert client.get_inference_statistics(headers=headers)["model_stats"]
    assert client.is_model_ready("mock", headers=bearer("sk-alice"))
    client.close()
    refused = pytest.raises(openai.PermissionDeniedError, match="This API is restricted, expecting header 'admin-key'")
    with server.openai("sk-alice") as alice, refused:
        alice.models.list()


def test_restricted_grpc_protocols_want_their_header(server: Guarded) -> None:
    client = server.grpc()
    with pytest.raises(InferenceServerException) as error:
        client.get_inference_statistics(headers=bearer("sk-alice"))
    text = "This protocol is restricted, expecting header 'triton-grpc-protocol-admin-key'"
    assert (error.value.message(), error.value.status()) == (text, "StatusCode.UNAVAILABLE")
    headers = bearer("sk-alice") | {"triton-grpc-protocol-admin-key": "letmein"}
    assert client.get_inference_statistics(headers=headers).model_stats[0].name == "mock"
    client.close()


# --- what is written down ---


def test_clients_that_leave_while_they_are_written_to_are_no_error(server: Guarded) -> None:
    for _ in range(60):
        leave_a_stream(server, "mock")
    assert "Traceback" not in server.log.read_text()


def test_names_are_logged_and_counted_but_no_key_and_no_prompt(server: Guarded) -> None:
    with server.openai("sk-nobody") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with server.openai("sk-alice") as client:
        client.completions.create(model="mock", prompt=PROMPT, max_tokens=2)
    stream(server, "sk-alice", {})
    leave_a_stream(server, "slow")
    wait_for_log(server, "ModelStreamInfer CANCELLED")
    log = server.log.read_text()
    assert re.search(r"\] \"POST /v1/completions 200 key=alice \d+\.\d ms\"$", log, re.MULTILINE)
    for status in ("OK", "CANCELLED"):
        assert re.search(rf"\] \"gRPC /inference.GRPCInferenceService/ModelStreamInfer {status} key=alice \d+", log)
    with urllib.request.urlopen(f"http://{server.process.metrics}/metrics", timeout=30) as answer:
        metrics = answer.read().decode()
    assert 'key_name="alice"' in metrics and 'outcome="unauthenticated"' in metrics
    for secret in ("sk-", "letmein", PROMPT):
        assert secret not in log and secret not in metrics
