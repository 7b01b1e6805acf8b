"""The bundled pipeline in TensorRT-LLM's layout: preprocessing → tensorrt_llm → postprocessing, ensemble and BLS."""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import np_to_triton_dtype

from llmbackend.adapter.schemas.tensorrtllm_tensors import PERF_OUTPUTS
from tests.helpers.server_process import ROOT, ServerProcess, post, running_server

PROMPT = "Once upon a time"
MAX_TOKENS = 24
UNENDED = {"end_id": -1}
"""Answers of MAX_TOKENS, whatever the weights."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("--model-repository", str(ROOT / "model_repository_pipelines")) as running:
        yield running


def generate(server: ServerProcess, model: str, **body: Any) -> dict[str, Any]:
    status, text = post(
        server, f"/v2/models/{model}/generate", {"text_input": PROMPT, "max_tokens": MAX_TOKENS, **UNENDED, **body}
    )
    assert status == 200, text
    answer = json.loads(text)
    assert isinstance(answer, dict)
    return answer


def stream(server: ServerProcess, model: str, **body: Any) -> list[dict[str, Any]]:
    connection = http.client.HTTPConnection(server.http, timeout=60)
    payload = {"text_input": PROMPT, "max_tokens": MAX_TOKENS, "stream": True, **UNENDED, **body}
    connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(payload))
    answer = connection.getresponse()
    lines = answer.read().decode().splitlines()
    connection.close()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def test_the_ensemble_gives_what_the_model_gives(server: ServerProcess) -> None:
    answer = generate(server, "ensemble", return_num_output_tokens=True)
    assert answer["text_output"]
    assert answer["num_output_tokens"] <= MAX_TOKENS
    again = generate(server, "ensemble")
    assert again["text_output"] == answer["text_output"]


def test_ensemble_and_bls_stream_the_same_text(server: ServerProcess) -> None:
    whole = generate(server, "ensemble")["text_output"]
    for model in ("ensemble", "tensorrt_llm_bls"):
        events = stream(server, model)
        assert len(events) > 2
        assert "".join(event["text_output"] for event in events) == whole, model


def test_stop_words_and_sampling_reach_the_engine_through_the_pipeline(server: ServerProcess) -> None:
    free = generate(server, "ensemble", top_k=20, temperature=1.3, seed=4)["text_output"]
    assert free != generate(server, "ensemble", top_k=20, temperature=1.3, seed=5)["text_output"]
    word = free.split()[1]
    cut = generate(server, "ensemble", top_k=20, temperature=1.3, seed=4, stop_words=[word])["text_output"]
    assert free.startswith(cut)
    bls = "".join(
        event["text_output"] for event in stream(server, "tensorrt_llm_bls", top_k=20, temperature=1.3, seed=4)
    )
    assert bls == free


def test_what_the_llm_refuses_is_the_answer_of_the_pipeline(server: ServerProcess) -> None:
    body = {"text_input": PROMPT, "max_tokens": 5, "beam_width": 3}
    _, text = post(server, "/v2/models/ensemble/generate", body)
    assert "'beam_width' is 3, only 1 is supported" in text


def client_stream(server: ServerProcess, model: str, outputs: tuple[str, ...], **inputs: Any) -> list[Any]:
    """The results, as TensorRT-LLM's end-to-end client asks for them: a batch of one, the outputs by name."""
    arrays = {
        "text_input": np.array([[PROMPT]], np.object_),
        "max_tokens": np.array([[MAX_TOKENS]], np.int32),
        "end_id": np.array([[-1]], np.int32),
        "stream": np.array([[True]]),
        "beam_width": np.array([[1]], np.int32),
        "temperature": np.array([[1.0]], np.float32),
        **inputs,
    }
    tensors = []
    for name, array in arrays.items():
        tensors.append(triton_grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    came: list[Any] = []
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: came.append((result, error)))
        client.async_stream_infer(
            model, tensors, outputs=[triton_grpc.InferRequestedOutput(name) for name in ("text_output", *outputs)]
        )
        client.stop_stream()
    assert [error for _, error in came if error is not None] == []
    return [result for result, _ in came]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_performance_numbers_are_in_every_response_of_both_models(server: ServerProcess, model: str) -> None:
    results = client_stream(server, model, PERF_OUTPUTS, return_perf_metrics=np.array([[True]]))
    assert len(results) > 2
    for result in results:
        values = {name: result.as_numpy(name)[0][0] for name in PERF_OUTPUTS}
        assert values["kv_cache_alloc_total_blocks"] == sum(
            values[f"kv_cache_{kind}_blocks"] for kind in ("alloc_new", "reused")
        )
        assert values["arrival_time_ns"] <= values["first_token_time_ns"] <= values["last_token_time_ns"]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_bias_words_and_bad_words_reach_the_engine_through_both_models(server: ServerProcess, model: str) -> None:
    def text(**inputs: Any) -> str:
        parts = [result.as_numpy("text_output")[0] for result in client_stream(server, model, (), **inputs)]
        return b"".join(parts).decode()

    free, word = text(), np.array([["x"]], np.object_)
    pushed = text(embedding_bias_words=word, embedding_bias_weights=np.array([[1000.0]], np.float32))
    assert pushed == "x" * MAX_TOKENS
    both = text(embedding_bias_words=word, embedding_bias_weights=np.array([[1000.0]], np.float32), bad_words=word)
    assert both == free, "a ban stands above any bias"


def test_what_the_pipeline_does_not_serve_is_refused_by_name(server: ServerProcess) -> None:
    for model in ("ensemble", "tensorrt_llm_bls"):
        for name, value in (("lora_task_id", 3), ("return_context_logits", True)):
            body = {"text_input": PROMPT, "max_tokens": 5, name: value}
            _, answer = post(server, f"/v2/models/{model}/generate", body)
            assert f"input '{name}' is not supported" in answer, model
        guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[ab]{7}"}
        _, answer = post(server, f"/v2/models/{model}/generate", {"text_input": PROMPT, "max_tokens": 5, **guide})
        assert "structured output, but this model has no tokenizer" in answer, "the pipeline's other models have it"
    _, answer = post(server, "/v2/models/ensemble/generate", {**body, "decoder_text_input": "x"})
    assert "DECODER_QUERY is not supported" in answer


def test_a_batch_of_prompts_over_grpc(server: ServerProcess) -> None:
    """Straight to the core model, as TensorRT-LLM's own client does."""
    ids = np.array([[40, 41, 42], [43, 0, 0]], np.int32)
    inputs = {
        "input_ids": ids,
        "input_lengths": np.array([[3], [1]], np.int32),
        "request_output_len": np.array([[4], [6]], np.int32),
    }
    tensors = []
    for name, value in inputs.items():
        tensors.append(triton_grpc.InferInput(name, list(value.shape), "INT32"))
        tensors[-1].set_data_from_numpy(value)
    came: list[Any] = []
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: came.append((result, error)))
        client.async_stream_infer("tensorrt_llm", tensors, enable_empty_final_response=False)
        client.stop_stream()
    assert [error for _, error in came] == [None, None]
    lengths = {int(one.as_numpy("batch_index")[0, 0]): one.as_numpy("sequence_length")[0, 0] for one, _ in came}
    assert lengths == {0: 4, 1: 6}


def test_a_cancel_of_the_bls_model_ends_the_request_in_the_engine(server: ServerProcess) -> None:
    body = {"text_input": PROMPT, "max_tokens": 900, "end_id": -1, "stream": True}
    address = f"http://{server.http}/v2/models/tensorrt_llm_bls/generate_stream"
    with urllib.request.urlopen(address, json.dumps(body).encode(), timeout=60) as answer:
        assert answer.readline().startswith(b"data: ")
        assert server.metric("vllm:num_requests_running", "tensorrt_llm") == 1
    server.wait_until_idle("tensorrt_llm")
