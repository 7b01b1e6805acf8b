"""A repository of TensorRT-LLM's llmapi layout, served over real sockets to tritonclient."""

from __future__ import annotations

import itertools
import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.helpers.llmapi_repository import write_llmapi_model
from tests.helpers.server_process import ROOT, ServerProcess, post, start_server, stop_server

pytestmark = pytest.mark.slow

WHOLE, STREAMING, SLOW = "tensorrt_llm", "tensorrt_llm_decoupled", "tensorrt_llm_mock"
STEP_TIME = 'parameters { key: "mock_step_ms" value { string_value: "50" } }\n'
PROMPT = "Continuous batching means that a server begins a new request as soon as there is room for it, and"
TYPES = {bool: np.bool_, int: np.int32, float: np.float32, str: np.object_}
NO_PROMPT = {"sampling_param_exclude_input_from_output": True}
TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
DRAFTS = ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")


@pytest.fixture(scope="module", autouse=True)
def gevent_hub() -> None:
    """Triton's HTTP client runs on gevent, whose hub keeps its descriptors: they are not leaked by a test."""
    gevent.sleep(0)


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llmapi") / "server.log"


@pytest.fixture(scope="module")
def server(log_file: Path) -> Iterator[ServerProcess]:
    repository = log_file.parent / "repository"
    checkpoint = str(ROOT / "model_repository" / "demo" / "1")
    write_llmapi_model(repository, checkpoint, WHOLE, kv_cache_config={"free_gpu_memory_fraction": 0.7})
    write_llmapi_model(repository, checkpoint, STREAMING, decoupled=True)
    write_llmapi_model(repository, "mock", SLOW, decoupled=True)
    with (repository / SLOW / "config.pbtxt").open("a") as config:
        config.write(STEP_TIME)
    with log_file.open("w") as log:
        running = start_server("--model-repository", str(repository), log=log)
    yield running
    assert stop_server(running) == 0


def tensors(client: Any, text: str = PROMPT, /, **values: Any) -> list[Any]:
    made = []
    for name, value in {"text_input": text, **values}.items():
        items = value if isinstance(value, list) else [value]
        kind: Any = np.uint64 if name == "sampling_param_seed" else TYPES[type(items[0])]
        array: Any = np.array(items, kind)
        made.append(client.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        made[-1].set_data_from_numpy(array)
    return made


def infer(server: ServerProcess, protocol: str, text: str = PROMPT, /, **values: Any) -> Any:
    client = {"http": triton_http, "grpc": triton_grpc}[protocol]
    with client.InferenceServerClient(getattr(server, protocol)) as connection:
        return connection.infer(WHOLE, tensors(client, text, **values), request_id="7")


def text_of(result: Any) -> str:
    [text] = result.as_numpy("text_output")
    return str(text.decode())


def stream(server: ServerProcess, **values: Any) -> list[Any]:
    came: list[Any] = []
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: came.append((result, error)))
        client.async_stream_infer(STREAMING, tensors(triton_grpc, streaming=True, **values), request_id="8")
        client.stop_stream()
    assert [error for _, error in came if error is not None] == []
    return [result for result, _ in came]


def test_the_log_says_who_serves_it_and_names_the_keys_without_effect(server: ServerProcess, log_file: Path) -> None:
    log = log_file.read_text()
    assert f"model '{WHOLE}' is of TensorRT-LLM's llmapi layout: the backend 'llm' serves it" in log
    assert f"{WHOLE}/1/model.yaml': no effect here: backend, kv_cache_config.free_gpu_memory_fraction" in log
    config = json.loads(server.get(f"/v2/models/{WHOLE}/config"))
    assert (config["backend"], config["max_batch_size"]) == ("python", 0)
    assert config["model_transaction_policy"] == {"decoupled": False}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_whole_answer_begins_with_the_prompt_unless_it_is_excluded(server: ServerProcess, protocol: str) -> None:
    whole = text_of(infer(server, protocol, sampling_param_max_tokens=12))
    continuation = text_of(infer(server, protocol, sampling_param_max_tokens=12, **NO_PROMPT))
    assert continuation
    assert whole == PROMPT + continuation
    assert {tensor["name"] for tensor in response_of(infer(server, protocol))} == {"text_output"}


def response_of(result: Any) -> list[dict[str, Any]]:
    response = result.get_response()
    if isinstance(response, dict):
        return list(response["outputs"])
    return [{"name": one.name, "datatype": one.datatype} for one in response.outputs]


def test_curl_as_the_tutorials_write_it(server: ServerProcess) -> None:
    body = {"text_input": PROMPT, "sampling_param_max_tokens": 12}
    status, text = post(server, f"/v2/models/{WHOLE}/generate", body)
    answer = json.loads(text)
    assert (status, answer["model_name"], answer["model_version"]) == (200, WHOLE, "1")
    assert answer["text_output"] == text_of(infer(server, "grpc", sampling_param_max_tokens=12))
    status, text = post(server, f"/v2/models/{STREAMING}/generate_stream", {**body, "streaming": True})
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert len(events) > 2
    assert PROMPT + events[-1]["text_output"] == answer["text_output"]


def test_each_response_of_a_stream_has_all_of_the_text_so_far(server: ServerProcess) -> None:
    flags = {f"return_{name}": True for name in ("finish_reason", "stop_reason", "cumulative_logprob")}
    results = stream(server, sampling_param_max_tokens=12, **flags)
    texts = [text_of(result) for result in results]
    assert len(texts) > 2
    assert all(later.startswith(earlier) and later != earlier for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == text_of(infer(server, "grpc", sampling_param_max_tokens=12, **NO_PROMPT))
    reasons = [result.as_numpy("finish_reason")[0] for result in results]
    assert reasons == [b"None"] * (len(results) - 1) + [b"length"]
    sums = [result.as_numpy("cumulative_logprob")[0] for result in results]
    assert sums == sorted(sums, reverse=True)
    assert sums[-1] < 0


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_sampling_and_stop_words_reach_the_engine(server: ServerProcess, protocol: str) -> None:
    hot = {"sampling_param_temperature": 1.5, "sampling_param_max_tokens": 12, **NO_PROMPT}
    first = text_of(infer(server, protocol, **hot, sampling_param_seed=4))
    assert first == text_of(infer(server, protocol, **hot, sampling_param_seed=4))
    assert first != text_of(infer(server, protocol, **hot, sampling_param_seed=5))
    greedy = text_of(infer(server, protocol, **{**hot, "sampling_param_top_k": 1}))
    assert greedy == text_of(infer(server, protocol, sampling_param_max_tokens=12, **NO_PROMPT))
    word = greedy.split()[2]
    stops = {"sampling_param_stop": [word, "~~~"], "return_finish_reason": True, "return_stop_reason": True}
    stopped = infer(server, protocol, sampling_param_max_tokens=12, **NO_PROMPT, **stops)
    assert text_of(stopped) == greedy[: greedy.index(word)]
    assert stopped.as_numpy("finish_reason")[0] == b"stop"
    assert stopped.as_numpy("stop_reason")[0] == word.encode()
    best = infer(server, protocol, **hot, sampling_param_best_of=4, return_cumulative_logprob=True)
    [cumulative] = best.as_numpy("cumulative_logprob")
    alone = infer(server, protocol, **hot, sampling_param_best_of=1, return_cumulative_logprob=True)
    assert cumulative < 0 and alone.as_numpy("cumulative_logprob").shape == (1,)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_performance_numbers_are_those_of_the_request(server: ServerProcess, protocol: str) -> None:
    prompt = f"{protocol}: {PROMPT * 3}"
    wanted = {"sampling_param_max_tokens": 8, "sampling_param_return_perf_metrics": True}
    cold, warm = (infer(server, protocol, prompt, **wanted) for _ in range(2))
    counts = {
        name: [int(result.as_numpy(f"kv_cache_{name}")[0]) for result in (cold, warm)]
        for name in ("reused_block", "missed_block", "alloc_new_blocks", "alloc_total_blocks")
    }
    assert counts["reused_block"][0] == 0 < counts["reused_block"][1]
    assert sum(counts["missed_block"]) + counts["reused_block"][1] == 2 * counts["missed_block"][0]
    for each in range(2):
        total = counts["alloc_new_blocks"][each] + counts["reused_block"][each]
        assert total == counts["alloc_total_blocks"][each] >= counts["missed_block"][0]
    rates = [result.as_numpy("kv_cache_hit_rate")[0] for result in (cold, warm)]
    assert rates == [0, np.float32(counts["reused_block"][1] / counts["missed_block"][0])]
    times = [int(warm.as_numpy(name)[0]) for name in TIMES]
    assert times == sorted(times)
    assert times[0] > int(cold.as_numpy(TIMES[-1])[0])
    assert [warm.as_numpy(name)[0] for name in DRAFTS] == [0, 0, 0]
    assert {one["name"]: one["datatype"] for one in response_of(warm)} == {
        "text_output": "BYTES",
        **{f"kv_cache_{name}": "INT32" for name in counts},
        "kv_cache_hit_rate": "FP32",
        **dict.fromkeys(TIMES, "INT64"),
        **dict(zip(DRAFTS, ("FP32", "INT32", "INT32"), strict=True)),
    }


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"streaming": True}, "Streaming is only supported in decoupled mode."),
        ({"image_url": "data:,"}, "input 'image_url' is not supported"),
        ({"lora_path": "/adapters/a"}, "input 'lora_path' is given without 'lora_name'"),
        ({"lora_name": "a"}, "LoRA feature is not enabled."),
        ({"sampling_param_top_p": 2.0}, "sampling parameter 'top_p' is 2.0"),
        ({"text_input": ["a", "b"]}, "Expected a scalar tensor for tensor text_input"),
    ],
)
def test_what_is_not_served_is_refused_by_name(server: ServerProcess, values: dict[str, Any], text: str) -> None:
    for protocol in ("http", "grpc"):
        with pytest.raises(InferenceServerException) as caught:
            infer(server, protocol, **values)
        assert f"Error generating request: {text}" in caught.value.message()


def test_a_request_is_stopped_by_another_one_with_its_id(server: ServerProcess) -> None:
    came: queue.Queue[Any] = queue.Queue()
    values = {"streaming": True, "sampling_param_max_tokens": 200, "return_finish_reason": True}
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: came.put((result, error)))
        client.async_stream_infer(SLOW, tensors(triton_grpc, "a", **values), request_id="9")
        results = [came.get(timeout=30)]
        client.async_stream_infer(SLOW, tensors(triton_grpc, stop=True), request_id="9")
        client.stop_stream()
    results += list(came.queue)
    assert [error for _, error in results if error is not None] == []
    reasons = [result.as_numpy("finish_reason") for result, _ in results]
    assert [reason[0] for reason in reasons if reason is not None and reason[0] != b"None"] == [b"cancelled"]
    server.wait_until_idle(SLOW)


def test_the_openai_api_serves_both(server: ServerProcess) -> None:
    """With all that it has for other models: chat template, usage, logprobs, tools."""
    question: Any = [{"role": "user", "content": "What is continuous batching?"}]
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="x", max_retries=0) as client:
        assert {model.id for model in client.models.list()} == {WHOLE, STREAMING, SLOW}
        whole = client.completions.create(model=WHOLE, prompt=PROMPT, max_tokens=12, temperature=0)
        assert whole.choices[0].text == text_of(infer(server, "grpc", sampling_param_max_tokens=12, **NO_PROMPT))
        assert whole.usage is not None and whole.usage.completion_tokens == 12
        chunks: Any = client.completions.create(
            model=STREAMING, prompt=PROMPT, max_tokens=12, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        chat: Any = client.chat.completions.create(
            model=WHOLE, messages=question, max_tokens=12, temperature=0, logprobs=True
        )
        streamed: Any = client.chat.completions.create(
            model=STREAMING, messages=question, max_tokens=12, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in streamed]
        assert "".join(pieces) == chat.choices[0].message.content
        assert len([piece for piece in pieces if piece]) > 2 and len(chat.choices[0].logprobs.content) == 12
        call: Any = client.chat.completions.create(
            model=STREAMING, messages=question, tools=TOOLS, tool_choice="required", max_tokens=60
        )
        assert call.choices[0].message.tool_calls[0].function.name == "f"
        with pytest.raises(openai.BadRequestError, match="decoupled: false"):
            client.completions.create(model=WHOLE, prompt=PROMPT, stream=True)


def test_the_setting_runs_model_py(tmp_path: Path) -> None:
    """Which needs TensorRT-LLM."""
    assert "No module named 'tensorrt_llm'" in reason_with_setting(tmp_path, "python")


def test_another_value_of_the_setting_is_refused(tmp_path: Path) -> None:
    reason = reason_with_setting(tmp_path, "vllm")
    assert "'serve-llmapi-by' of the python backend is 'vllm', expected 'llm' or 'python'" in reason


def reason_with_setting(tmp_path: Path, value: str) -> str:
    """Why a model of the layout is not loaded with `serve-llmapi-by=value`."""
    write_llmapi_model(tmp_path / "repository", "mock")
    flags = ("--model-repository", str(tmp_path / "repository"), "--exit-on-error", "false")
    with (tmp_path / "log").open("w") as log:
        running = start_server(*flags, "--backend-config", f"python,serve-llmapi-by={value}", log=log)
    try:
        reason: str = json.loads(post(running, "/v2/repository/index", {})[1])[0]["reason"]
    finally:
        assert stop_server(running) == 0
    return reason
