"""Two keys on one server: neither sees what was computed for the other, ends its requests, or takes its share."""

from __future__ import annotations

import json
import queue
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

import grpc
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.helpers.server_process import ServerProcess, running_server, write_mock_model
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow

KEYS = """
alice:sk-alice
bob:sk-bob
few:sk-few concurrency=1
ten:sk-ten rpm=10
short:sk-short tpm=40
root:sk-root role=operator
"""
# Answers with the tenant of the request, as the host sees it.
WHOSE = """
import json, numpy as np, triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        told = [np.array([json.dumps(r._tenant).encode()] * len(pb_utils.get_input_tensor_by_name(r, "T").as_numpy()),
                         dtype=object).reshape(-1, 1) for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("R", array)]) for array in told]
"""
WHOSE_CONFIG = """
backend: "python"
max_batch_size: 64
input [ { name: "T" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "R" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
SECRET = "My card number is 4111 2222 3333 4444 and the diagnosis is positive; please keep this between us. " * 2
HOSTILE_PARAMETERS = {"key_name": "alice", "tenant": "alice", "api_key": "sk-alice", "cache_name": "alice"}
HOSTILE_HEADERS = {"x-key-name": "alice", "tenant": "alice", "key-name": "alice", "x-api-key": "sk-alice"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("tenants")
    write_mock_model(root / "repository", "mock")
    write_mock_model(root / "repository", "slow", mock_step_ms=100)
    (root / "repository" / "whose" / "1").mkdir(parents=True)
    (root / "repository" / "whose" / "1" / "model.py").write_text(WHOSE)
    (root / "repository" / "whose" / "config.pbtxt").write_text(WHOSE_CONFIG)
    (root / "keys").write_text(KEYS)
    with running_server(
        f"--model-repository={root / 'repository'}",
        "--model-control-mode=explicit",
        "--load-model=*",
        f"--api-key-file={root / 'keys'}",
        "--allow-client-shm=true",
        "--http-header-forward-pattern=.*(key-name|tenant)",
        "--grpc-header-forward-pattern=.*(key-name|tenant)",
    ) as process:
        yield process


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def post(
    server: ServerProcess, path: str, key: str, body: Any = None, method: str = "POST", **headers: str
) -> tuple[int, Any]:
    """Status and JSON of the answer."""
    data = None if body is None else json.dumps(body).encode()
    sent = {**bearer(key), "content-type": "application/json", **headers}
    request = urllib.request.Request(f"http://{server.http}{path}", data, sent, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


@contextmanager
def openai_of(server: ServerProcess, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key=key, max_retries=0) as client:
        yield client


def texts(name: str, *values: str, kind: Any = triton_grpc, batches: bool = False) -> Any:
    array = np.array([value.encode() for value in values], dtype=np.object_)
    array = array.reshape(-1, 1) if batches else array
    tensor = kind.InferInput(name, list(array.shape), "BYTES")
    tensor.set_data_from_numpy(array)
    return tensor


def endless(server: ServerProcess, key: str, request_id: str) -> Generator[Any]:
    """A running stream of the slow model, once its first response has come."""
    request = pb.ModelInferRequest(model_name="slow", id=request_id)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"go")
    request.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    request.parameters["max_tokens"].int64_param = 400
    request.parameters["ignore_eos"].bool_param = True
    channel = grpc.insecure_channel(server.grpc)
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    call = stub.ModelStreamInfer(iter([request]), metadata=list(bearer(key).items()))
    try:
        yield next(call)
        yield from call
    finally:
        call.cancel()
        channel.close()


# --- whose it is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "told"), [("sk-bob", ["bob", False, "bob"]), ("sk-root", ["root", True, "root"])])
def test_a_request_belongs_to_its_key_on_every_protocol(server: ServerProcess, key: str, told: list[Any]) -> None:
    headers = {**bearer(key), **HOSTILE_HEADERS}
    http = triton_http.InferenceServerClient(server.http)
    tensor = texts("T", "alice", kind=triton_http, batches=True)
    result = http.infer("whose", [tensor], headers=dict(headers), parameters=HOSTILE_PARAMETERS)
    found = [result.as_numpy("R").item()]
    http.close()
    tensor = texts("T", "alice", batches=True)
    answers: queue.Queue[Any] = queue.Queue()
    client = triton_grpc.InferenceServerClient(server.grpc)
    result = client.infer("whose", [tensor], headers=headers, parameters=HOSTILE_PARAMETERS)
    found.append(result.as_numpy("R").item())
    client.start_stream(lambda result, error: answers.put((result, error)), headers=headers)
    client.async_stream_infer("whose", [tensor], parameters=HOSTILE_PARAMETERS)
    result, error = answers.get(timeout=30)
    assert error is None
    found.append(result.as_numpy("R").item())
    client.close()
    for path in ("generate", "generate_stream"):
        request = urllib.request.Request(
            f"http://{server.http}/v2/models/whose/{path}",
            json.dumps({"T": "alice", "parameters": HOSTILE_PARAMETERS}).encode(),
            headers,
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            found.append(json.loads(answer.read().decode().removeprefix("data: "))["R"])
    assert [json.loads(one) for one in found] == [told] * 5


def test_cached_tokens_say_nothing_of_another_keys_prompts(server: ServerProcess) -> None:
    def cached(key: str, prompt: str, **extra: Any) -> int:
        with openai_of(server, key) as client:
            usage = client.completions.create(model="mock", prompt=prompt, max_tokens=1, extra_body=extra).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    sent = SECRET.replace("4444", "5555")
    assert cached("sk-alice", sent) == 0 < cached("sk-alice", sent)
    for guesser in ("sk-bob", "sk-few"):
        assert cached(guesser, sent) == 0, "also for the guess that is right"
    assert cached("sk-ten", sent, cache_salt="alice") == 0 and cached("sk-root", sent) == 0
    assert cached("sk-alice", sent, cache_salt="own") == 0, "a client's salt parts what is its own"


# --- what belongs to a key --------------------------------------------------------------------------------------------


def test_a_key_stops_its_own_requests_and_an_operator_any(server: ServerProcess) -> None:
    with closing(endless(server, "sk-alice", "job")) as alices, closing(endless(server, "sk-bob", "job")) as bobs:
        assert not next(alices).error_message and not next(bobs).error_message
        for path in ("stop", "stopInfer"):
            status, body = post(server, f"/v2/models/slow/{path}", "sk-few", {"id": "job"})
            assert (status, body) == (200, {"id": "job", "cancelled": 0})
        assert post(server, "/v2/models/slow/stop", "sk-bob", {"id": "job"}) == (200, {"id": "job", "cancelled": 1})
        assert "cancelled" in [*bobs][-1].error_message.lower()
        assert not next(alices).error_message
        assert post(server, "/v2/models/slow/stop", "sk-root", {"id": "job"}) == (200, {"id": "job", "cancelled": 1})
        assert "cancelled" in [*alices][-1].error_message.lower()


OPERATORS = [
    ("POST", "/v2/repository/models/mock/load", {}),
    ("POST", "/v2/repository/models/nosuch/unload", {}),
    ("GET", "/v2/logging", None),
    ("POST", "/v2/logging", {"log_info": True}),
    ("GET", "/v2/trace/setting", None),
    ("GET", "/v2/models/mock/trace/setting", None),
    ("GET", "/v2/systemsharedmemory/status", None),
    ("POST", "/v2/systemsharedmemory/region/r/unregister", {}),
]


@pytest.mark.parametrize(("method", "path", "body"), OPERATORS)
def test_the_operators_endpoints_name_the_role_that_they_need(
    server: ServerProcess, method: str, path: str, body: Any
) -> None:
    status, told = post(server, path, "sk-alice", body, method)
    assert (status, told["error"]) == (
        403,
        "This requires an API key with the role 'operator'; the key 'alice' has the role 'user'",
    )
    assert post(server, path, "sk-root", body, method)[0] == 200


def test_the_operators_rpcs_are_denied_to_users(server: ServerProcess) -> None:
    client = triton_grpc.InferenceServerClient(server.grpc)

    def calls(key: str) -> list[Any]:
        asked = (
            lambda **fields: client.load_model("mock", **fields),
            lambda **fields: client.unload_model("nosuch", **fields),
            lambda **fields: client.update_log_settings({"log_info": True}, **fields),
            client.get_log_settings,
            client.get_trace_settings,
            client.get_system_shared_memory_status,
            client.unregister_system_shared_memory,
        )
        codes: list[str | None] = []
        for ask in asked:
            try:
                ask(headers=bearer(key))
                codes.append(None)
            except InferenceServerException as error:
                assert "the role 'operator'; the key 'alice' has the role 'user'" in error.message()
                codes.append(error.status())
        return codes

    assert calls("sk-alice") == ["StatusCode.PERMISSION_DENIED"] * 7
    assert calls("sk-root") == [None] * 7
    assert client.get_model_repository_index(headers=bearer("sk-alice")).models
    client.close()


def test_a_users_inference_does_not_reach_an_operators_shared_memory(server: ServerProcess) -> None:
    refused = []
    for kind, address in ((triton_http, server.http), (triton_grpc, server.grpc)):
        client = kind.InferenceServerClient(address)
        tensor = kind.InferInput("T", [1, 1], "BYTES")
        tensor.set_shared_memory("operators", 16)
        output = kind.InferRequestedOutput("R")
        output.set_shared_memory("operators", 16)
        plain = texts("T", "x", kind=kind, batches=True)
        for inputs, outputs in (([tensor], None), ([plain], [output])):
            with pytest.raises(InferenceServerException) as error:
                client.infer("whose", inputs, outputs=outputs, headers=bearer("sk-alice"))
            refused.append((error.value.status(), "the role 'operator'" in error.value.message()))
            with pytest.raises(InferenceServerException, match="Unable to find shared memory region"):
                client.infer("whose", inputs, outputs=outputs, headers=bearer("sk-root"))
        client.close()
    assert refused == [("403", True)] * 2 + [("StatusCode.PERMISSION_DENIED", True)] * 2


# --- shares -----------------------------------------------------------------------------------------------------------


def test_a_keys_requests_at_once_are_bounded_and_others_go_on(server: ServerProcess) -> None:
    running = endless(server, "sk-few", "one")
    assert not next(running).error_message
    with openai_of(server, "sk-few") as few, pytest.raises(openai.RateLimitError) as error:
        few.completions.create(model="mock", prompt="x", max_tokens=1)
    assert "API key 'few' is at its limit of 1 concurrent requests" in error.value.message
    with openai_of(server, "sk-bob") as bob:
        assert bob.completions.create(model="mock", prompt="x", max_tokens=1).choices
    running.close()
    body = {"model": "mock", "prompt": "x"}
    eventually(lambda: post(server, "/v1/completions", "sk-few", body)[0] == 200)  # what ended does not count any more


def test_what_a_prompt_is_costs_a_key_no_tokens(server: ServerProcess) -> None:
    text, model = "x" * 100, {"model": "mock"}
    for _ in range(3):
        status, told = post(server, "/tokenize", "sk-short", {**model, "prompt": text})
        assert (status, told["count"]) == (200, 100)
    assert post(server, "/detokenize", "sk-short", {**model, "tokens": told["tokens"]}) == (200, {"prompt": text})
    messages = [{"role": "user", "content": text}]
    status, told = post(server, "/v1/chat/completions/render", "sk-short", {**model, "messages": messages})
    assert status == 200 and len(told["token_ids"]) > 100
    status, told = post(server, "/v1/messages/count_tokens", "sk-short", {**model, "messages": messages})
    assert status == 200 and told["input_tokens"] > 100
    assert post(server, "/v1/completions", "sk-short", {**model, "prompt": text, "max_tokens": 1})[0] == 200
    assert post(server, "/tokenize", "sk-short", {**model, "prompt": text})[0] == 429, "a generation does"
    assert post(server, "/tokenize", "sk-none", {**model, "prompt": text})[0] == 401


def test_prompts_are_counted_and_not_bodies(server: ServerProcess) -> None:
    def left(*prompts: str) -> int:
        with openai_of(server, "sk-ten") as client:
            answer = client.completions.with_raw_response.create(model="mock", prompt=[*prompts], max_tokens=1)
            assert len(answer.parse().choices) == len(prompts)
        return int(answer.headers["x-ratelimit-remaining-requests"])

    before = left("x")
    assert before - left("a", "b", "c") in (2, 3), "one may have come back meanwhile"
    http = triton_http.InferenceServerClient(server.http)
    http.infer("whose", [texts("T", "a", "b", kind=triton_http, batches=True)], headers=bearer("sk-ten"))
    with pytest.raises(InferenceServerException, match="per minute") as refused:
        http.infer("whose", [texts("T", *"abcdefgh", kind=triton_http, batches=True)], headers=bearer("sk-ten"))
    assert refused.value.status() == "429"
    http.close()
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as rpc_error:
        request = pb.ModelInferRequest(model_name="whose")
        request.inputs.add(name="T", datatype="BYTES", shape=[11, 1]).contents.bytes_contents.extend([b"x"] * 11)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(request, metadata=list(bearer("sk-ten").items()))
    assert rpc_error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    [retry_after] = [item.value for item in rpc_error.value.trailing_metadata() if item.key == "retry-after"]
    assert int(retry_after) > 1
    with openai_of(server, "sk-ten") as client, pytest.raises(openai.RateLimitError) as error:
        client.completions.create(model="mock", prompt=["x"] * 64)
    assert (error.value.code, error.value.type) == ("rate_limit_exceeded", "requests")
    assert int(error.value.response.headers["retry-after"]) > 1
