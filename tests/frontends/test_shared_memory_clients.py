"""The shared memory extensions as Triton's own clients use them, unmodified, over HTTP and gRPC (golden 40)."""

from __future__ import annotations

import itertools
import os
import queue
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from tests.helpers.kserve_runner import Running

VALUES = np.arange(4, dtype=np.float32).reshape(1, 4)
NUMBERS = itertools.count()


HOST_OPTIONS = {"allow_client_shm": True}


@pytest.fixture(params=["http", "grpc"])
def client(running: Running, request: pytest.FixtureRequest) -> Iterator[Any]:
    module: Any = triton_http if request.param == "http" else triton_grpc
    url = running.http if request.param == "http" else running.grpc
    with module.InferenceServerClient(url) as client:
        yield client
        client.unregister_system_shared_memory()


@pytest.fixture
def new_region() -> Iterator[Any]:
    """Makes regions of the client's library; (handle, key)."""
    made: list[Any] = []

    def make(byte_size: int) -> tuple[Any, str]:
        key = f"/llmbackend_test_{os.getpid()}_{next(NUMBERS)}"
        made.append(shm.create_shared_memory_region("r", key, byte_size))
        return made[-1], key

    yield make
    for handle in made:
        shm.destroy_shared_memory_region(handle)


def module_of(client: Any) -> Any:
    return triton_http if isinstance(client, triton_http.InferenceServerClient) else triton_grpc


def status_of(client: Any) -> dict[str, tuple[str, int, int]]:
    """Name → (key, offset, byte_size)."""
    status = client.get_system_shared_memory_status()
    if module_of(client) is triton_http:
        return {row["name"]: (row["key"], row["offset"], row["byte_size"]) for row in status}
    return {name: (region.key, region.offset, region.byte_size) for name, region in status.regions.items()}


def shared_input(client: Any, name: str, shape: list[int], datatype: str, *place: Any) -> Any:
    made = module_of(client).InferInput(name, shape, datatype)
    made.set_shared_memory(*place)
    return made


def shared_output(client: Any, name: str, *place: Any) -> Any:
    made = module_of(client).InferRequestedOutput(name)
    made.set_shared_memory(*place)
    return made


def failure(act: Any, *args: Any, **options: Any) -> tuple[str | None, str]:
    with pytest.raises(InferenceServerException) as caught:
        act(*args, **options)
    return caught.value.status(), caught.value.message()


def test_numbers_go_in_and_out_through_shared_memory(client: Any, new_region: Any) -> None:
    (source, in_key), (target, out_key) = new_region(32), new_region(16)
    shm.set_shared_memory_region(source, [VALUES], offset=16)
    client.register_system_shared_memory("in", in_key, 24, offset=8)
    client.register_system_shared_memory("out", out_key, 16)
    assert status_of(client) == {"in": (in_key, 8, 24), "out": (out_key, 0, 16)}
    result = client.infer(
        "identity",
        [shared_input(client, "INPUT0", [1, 4], "FP32", "in", 16, 8)],
        outputs=[shared_output(client, "OUTPUT0", "out", 16)],
    )
    assert np.array_equal(shm.get_contents_as_numpy(target, np.float32, [1, 4]), VALUES)
    if module_of(client) is triton_http:
        assert result.get_output("OUTPUT0") == {"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 4]}
    else:
        response = result.get_response()
        assert list(response.outputs[0].shape) == [1, 4] and list(response.raw_output_contents) == [b""]


def test_strings_go_through_shared_memory_beside_tensors_that_do_not(client: Any, new_region: Any) -> None:
    strings = np.array([b"ab", b"\xff\0", b""], np.object_)
    serialized = serialize_byte_tensor(strings)
    (source, in_key), (target, out_key) = new_region(64), new_region(64)
    shm.set_shared_memory_region(source, [serialized])
    client.register_system_shared_memory("in", in_key, 64)
    client.register_system_shared_memory("out", out_key, 64)
    numbers = module_of(client).InferInput("I", [2, 1], "INT32")
    numbers.set_data_from_numpy(np.array([[1], [2]], np.int32))
    result = client.infer(
        "multi",
        [shared_input(client, "S", [3], "BYTES", "in", len(serialized.item())), numbers],
        outputs=[module_of(client).InferRequestedOutput("I"), shared_output(client, "S", "out", 64)],
    )
    assert result.as_numpy("I").tolist() == [[1], [2]]
    assert shm.get_contents_as_numpy(target, np.object_, [3]).tolist() == strings.tolist()


def test_one_region_serves_several_tensors_and_requests_at_once(client: Any, new_region: Any) -> None:
    handle, key = new_region(256)
    client.register_system_shared_memory("r", key, 256)
    shm.set_shared_memory_region(handle, [np.arange(32, dtype=np.float32)])
    calls = []
    for row in range(8):
        inputs = [shared_input(client, "INPUT0", [1, 4], "FP32", "r", 16, row * 16)]
        outputs = [shared_output(client, "OUTPUT0", "r", 16, 128 + row * 16)]
        if module_of(client) is triton_http:
            calls.append(client.async_infer("identity", inputs, outputs=outputs))
        else:
            done: queue.Queue[Any] = queue.Queue()
            client.async_infer("identity", inputs, lambda result, error, done=done: done.put(error), outputs=outputs)
            calls.append(done)
    for call in calls:
        assert call.get_result() if module_of(client) is triton_http else call.get(timeout=20) is None
    contents = shm.get_contents_as_numpy(handle, np.float32, [2, 32])
    assert np.array_equal(contents[0], contents[1])


def test_refusals_have_the_texts_of_triton(client: Any, new_region: Any) -> None:
    codes = {"400": "INVALID_ARGUMENT", "404": "NOT_FOUND", "500": "INTERNAL"}
    is_http = module_of(client) is triton_http

    def expected(status: str, text: str, grpc: str | None = None) -> tuple[str, str]:
        return (status, text) if is_http else (f"StatusCode.{grpc or codes[status]}", text)

    (_, in_key), (_, out_key) = new_region(16), new_region(16)
    client.register_system_shared_memory("in", in_key, 16)
    client.register_system_shared_memory("out", out_key, 16)
    register = client.register_system_shared_memory
    assert failure(register, "in", in_key, 16) == expected(
        "400", "shared memory region 'in' already in manager", "ALREADY_EXISTS"
    )
    assert failure(register, "x", "/nosuch", 16) == expected("500", "Unable to open shared memory region: '/nosuch'")
    invalid_args = expected("400", "failed to register shared memory region 'y': invalid args")
    assert failure(register, "y", in_key, 64) == invalid_args
    assert failure(register, "y", "/", 64) == expected(
        "400", "cannot register shared memory region 'y' - invalid shm key '/'"
    )
    assert failure(client.get_system_shared_memory_status, "zz") == expected(
        "404", "Unable to find system shared memory region: 'zz'"
    )

    def infer(place: tuple[Any, ...], output: tuple[Any, ...] = ()) -> tuple[str | None, str]:
        outputs = [shared_output(client, "OUTPUT0", *output)] if output else None
        return failure(
            client.infer, "identity", [shared_input(client, "INPUT0", [1, 4], "FP32", *place)], outputs=outputs
        )

    assert infer(("zz", 16)) == expected("404", "Unable to find shared memory region: 'zz'")
    assert infer(("in", 32)) == expected("400", "Invalid offset + byte size for shared memory region: 'in'")
    assert infer(("in", 8, 16)) == expected("400", "Invalid offset for shared memory region: 'in'")
    assert infer(("in", 8)) == expected(
        "400",
        "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model 'identity'. "
        "Expected 16, got 8",
    )
    assert infer(("in", 16), ("out", 8)) == expected(
        "500",
        "shared memory size specified with the request for output 'OUTPUT0' (8 bytes) should be at least 16 bytes to "
        "hold the results",
    )
    client.unregister_system_shared_memory("zz")
    client.unregister_system_shared_memory()
    assert status_of(client) == {}


def test_cuda_shared_memory_is_answered_as_by_a_triton_without_gpus(client: Any) -> None:
    if module_of(client) is triton_http:
        assert client.get_cuda_shared_memory_status() == []
        assert failure(client.register_cuda_shared_memory, "cu", b"AAAA", 0, 16) == (
            "400",
            "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t",
        )
    else:
        assert not client.get_cuda_shared_memory_status().regions
        assert failure(client.register_cuda_shared_memory, "cu", b"AAAA", 0, 16) == (
            "StatusCode.INVALID_ARGUMENT",
            "failed to register shared memory region: invalid args",
        )
    handle = b"A" * 84 + b"AA=="  # 64 bytes
    assert failure(client.register_cuda_shared_memory, "cu", handle, 0, 16)[1] == (
        "failed to register CUDA shared memory region: 'cu', GPUs not supported"
    )
    assert "Unable to find cuda shared memory region: 'cu'" in failure(client.get_cuda_shared_memory_status, "cu")[1]
    client.unregister_cuda_shared_memory("cu")
    client.unregister_cuda_shared_memory()


def test_a_grpc_stream_takes_inputs_from_shared_memory_and_puts_outputs_there(
    running: Running, new_region: Any
) -> None:
    (source, in_key), (target, out_key) = new_region(16), new_region(16)
    shm.set_shared_memory_region(source, [VALUES])
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        client.register_system_shared_memory("in", in_key, 16)
        client.register_system_shared_memory("out", out_key, 16)
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        client.async_stream_infer(
            "identity",
            [shared_input(client, "INPUT0", [1, 4], "FP32", "in", 16)],
            outputs=[shared_output(client, "OUTPUT0", "out", 16)],
        )
        client.async_stream_infer("identity", [shared_input(client, "INPUT0", [1, 4], "FP32", "zz", 16)])
        answers = [results.get(timeout=20) for _ in range(2)]  # a refusal does not wait for what came before
        client.stop_stream()
        client.unregister_system_shared_memory()
    ((result, _),) = (answer for answer in answers if answer[1] is None)
    ((_, refused),) = (answer for answer in answers if answer[1] is not None)
    assert list(result.get_response().raw_output_contents) == [b""]
    assert np.array_equal(shm.get_contents_as_numpy(target, np.float32, [1, 4]), VALUES)
    assert "Unable to find shared memory region: 'zz'" in str(refused)


def test_bodies_and_parameters_that_http_clients_get_wrong(running: Running) -> None:
    def post(path: str, body: Any) -> tuple[int, str]:
        answer = httpx.post(f"http://{running.http}{path}", json=body)
        return answer.status_code, answer.json()["error"]

    register = "/v2/systemsharedmemory/region/r/register"
    assert post(register, {}) == (400, "Shared memory register request has no 'key' field")
    assert post(register, {"key": "k"}) == (400, "Shared memory register request has no 'byte_size' field")
    assert post(register, {"key": 1, "byte_size": 1})[0] == 500
    assert post(register, {"key": "k", "byte_size": -1})[0] == 500
    assert post("/v2/systemsharedmemory/register", {"key": "k", "byte_size": 1}) == (
        400,
        "'region name' is necessary to register system shared memory region",
    )
    data = {"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    for parameters, text in (
        ({"shared_memory_region": "r", "classification": 1}, "'shared_memory_region' and 'classification'"),
        ({"shared_memory_region": "r", "binary_data": True}, "'shared_memory_region' and 'binary_data'"),
    ):
        outputs = [{"name": "OUTPUT0", "parameters": parameters}]
        assert post("/v2/models/identity/infer", {"inputs": [data], "outputs": outputs}) == (
            400,
            f"Output can't set both {text}",
        )
    answer = httpx.post(f"http://{running.http}/v2/systemsharedmemory/region/nosuch/unregister")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == "application/json"
    assert httpx.post(f"http://{running.http}/v2/systemsharedmemory/status").status_code == 405


def test_parameters_that_grpc_clients_get_wrong(running: Running) -> None:
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        for key, value, text in (
            ("shared_memory_offset", 1, "'shared_memory_offset' can not be specified without 'shared_memory_region'"),
            ("shared_memory_region", "r", "'shared_memory_byte_size' must be specified along with"),
            ("shared_memory_region", 1, "invalid value type for 'shared_memory_region' parameter"),
        ):
            given = triton_grpc.InferInput("INPUT0", [1, 4], "FP32")
            field = "string_param" if isinstance(value, str) else "int64_param"
            setattr(given._get_tensor().parameters[key], field, value)
            assert text in failure(client.infer, "identity", [given])[1]


def test_without_the_flag_registering_is_refused_by_its_name(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Running(tmp_path_factory.mktemp("closed")) as running:
        with triton_http.InferenceServerClient(running.http) as http:
            assert failure(http.register_system_shared_memory, "r", "/r", 1) == (
                "501",
                "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.",
            )
        with triton_grpc.InferenceServerClient(running.grpc) as grpc:
            status, text = failure(grpc.register_system_shared_memory, "r", "/r", 1)
            assert status == "StatusCode.UNIMPLEMENTED" and "--allow-client-shm=true" in text
