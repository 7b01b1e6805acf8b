"""The KServe endpoints as Triton's own clients use them, unmodified."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.helpers.kserve_runner import Running
from tests.helpers.kserve_scripted import RECORD

VALUES = np.arange(8, dtype=np.float32).reshape(2, 4)


def module_of(client: Any) -> Any:
    return triton_http if isinstance(client, triton_http.InferenceServerClient) else triton_grpc


def tensor(module: Any, name: str, values: Any, datatype: str) -> Any:
    array = np.asarray(values, dtype=np.object_ if datatype == "BYTES" else None)
    made = module.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def words(module: Any, text: str) -> list[Any]:
    return [tensor(module, "text_input", [text.encode()], "BYTES")]


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("identity")
    assert not client.is_model_ready("nosuch")
    metadata: Any = client.get_model_metadata("identity")
    config: Any = client.get_model_config("identity")
    statistics: Any = client.get_inference_statistics("identity")
    index: Any = client.get_model_repository_index()
    if module_of(client) is triton_http:
        assert metadata["inputs"][0]["shape"] == [-1, 4] and config["max_batch_size"] == 8
        assert statistics["model_stats"][0]["name"] == "identity" and index[0] == {"name": "bad"}
    else:
        assert list(metadata.inputs[0].shape) == [-1, 4] and config.config.max_batch_size == 8
        assert statistics.model_stats[0].name == "identity" and index.models[0].name == "bad"


def test_load_and_unload(client: Any) -> None:
    client.load_model("spare")
    assert client.is_model_ready("spare")
    client.unload_model("spare")
    assert not client.is_model_ready("spare")
    with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
        client.load_model("nosuch")


def test_infer(client: Any) -> None:
    module = module_of(client)
    result = client.infer("identity", [tensor(module, "INPUT0", VALUES, "FP32")], request_id="7")
    assert np.array_equal(result.as_numpy("OUTPUT0"), VALUES)
    outputs = [module.InferRequestedOutput("S"), module.InferRequestedOutput("I")]
    inputs = [
        tensor(module, "S", [b"ab", b"\xff\0"], "BYTES"),
        tensor(module, "I", np.array([[1], [2]], np.int32), "INT32"),
    ]
    parameters = {"k": 1, "f": 0.5, "s": "v", "b": True}
    result = client.infer("multi", inputs, outputs=outputs, priority=1, timeout=10**7, parameters=parameters)
    assert list(result.as_numpy("S")) == [b"ab", b"\xff\0"] and result.as_numpy("PARAMS") is None


def test_infer_errors(client: Any) -> None:
    module = module_of(client)
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'nosuch' is not found") as caught:
        client.infer("nosuch", words(module, "x"))
    assert caught.value.status() in ("404", "StatusCode.NOT_FOUND")
    with pytest.raises(InferenceServerException, match="data-type is 'INT32', but model 'identity' expects 'FP32'"):
        client.infer("identity", [tensor(module, "INPUT0", VALUES.astype(np.int32), "INT32")])
    with pytest.raises(InferenceServerException, match="decoupled transaction policy"):
        client.infer("llm", words(module, "n=1"))


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_http_client_with_compression_and_json(running: Running, algorithm: str) -> None:
    with triton_http.InferenceServerClient(running.http) as client:
        given = triton_http.InferInput("INPUT0", [2, 4], "FP32")
        given.set_data_from_numpy(VALUES, binary_data=False)
        wanted = [triton_http.InferRequestedOutput("OUTPUT0", binary_data=False)]
        result = client.infer(
            "identity",
            [given],
            outputs=wanted,
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        assert np.array_equal(result.as_numpy("OUTPUT0"), VALUES)


def test_grpc_stream(running: Running) -> None:
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        client.async_stream_infer("llm", words(triton_grpc, "n=2"), request_id="7", enable_empty_final_response=True)
        client.async_stream_infer("nosuch", words(triton_grpc, "n=2"), request_id="8")
        answers: list[Any] = []
        errors: list[Any] = []
        while len(answers) < 3 or not errors:
            result, error = results.get(timeout=20)
            if error is not None:
                errors.append(error.message())
            else:
                response = result.get_response()
                answers.append(
                    (result.as_numpy("text_output"), response.parameters["triton_final_response"].bool_param)
                )
        client.stop_stream()
    assert [None if text is None else text[0] for text, _ in answers] == [b" tok0", b" tok1", None]
    assert [final for _, final in answers] == [False, False, True]
    assert errors == ["Request for unknown model: 'nosuch' is not found"]


def test_grpc_stream_cancelled(running: Running) -> None:
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton_grpc.InferenceServerClient(running.grpc) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        client.async_stream_infer("llm", words(triton_grpc, "n=1000 sleep=20"), request_id="client-cancel")
        assert results.get(timeout=20)[1] is None
        client.stop_stream(cancel_requests=True)
    assert RECORD.cancelled["client-cancel"].wait(10)


def test_grpc_aio_streams_side_by_side(running: Running) -> None:
    async def one(client: triton_aio.InferenceServerClient, count: int) -> list[bytes]:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "llm", "inputs": words(triton_aio, f"n={count}")}

        texts = []
        async for result, error in client.stream_infer(requests()):
            assert error is None
            texts.append(result.as_numpy("text_output")[0])
        return texts

    async def run() -> list[list[bytes]]:
        async with triton_aio.InferenceServerClient(running.grpc) as client:
            return await asyncio.gather(*(one(client, count) for count in range(1, 33)))

    for count, texts in enumerate(asyncio.run(run()), start=1):
        assert texts == [b" tok%d" % index for index in range(count)]
