"""Several choices and what a request tells of its prompt, through generate and tritonclient's gRPC."""

from __future__ import annotations

import json
import queue
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc as grpc_client

from tests.helpers.kserve_runner import Running
from tests.helpers.mock_llm_host import MODEL, mock_llm_host

PROMPT = "ways to go on: "
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True}


HOST_OPTIONS = {"start": mock_llm_host}


def generate(running: Running, how: str = "generate", **body: Any) -> httpx.Response:
    body = {"text_input": PROMPT, "exclude_input_in_output": True, **body}
    return httpx.post(f"http://{running.http}/v2/models/{MODEL}/{how}", json=body)


def test_generate_gives_all_choices(running: Running) -> None:
    singles = [generate(running, parameters=SAMPLING | {"seed": 3 + index}).json() for index in range(3)]
    answer = generate(
        running, parameters=SAMPLING | {"n": 3, "prompt_logprobs": 1}, return_prompt_token_ids=True
    ).json()
    assert answer["text_output"] == [one["text_output"] for one in singles]
    assert bytes(answer["prompt_token_ids"]).decode() == PROMPT
    assert len(json.loads(answer["prompt_logprobs"])) == len(PROMPT)
    refused = generate(running, parameters=SAMPLING | {"n": 129})
    assert refused.status_code == 400 and "'n' is 129" in refused.json()["error"]


def test_generate_stream_names_the_choice(running: Running) -> None:
    answer = generate(running, "generate_stream", parameters=SAMPLING | {"n": 2}, stream=True)
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    texts = {index: "".join(one["text_output"] for one in events if one["sequence_index"] == index) for index in (0, 1)}
    singles = [generate(running, parameters=SAMPLING | {"seed": 3 + index}).json() for index in range(2)]
    assert list(texts.values()) == [one["text_output"] for one in singles]


def test_grpc_streams_the_choices(running: Running) -> None:
    results: queue.Queue[Any] = queue.Queue()
    with grpc_client.InferenceServerClient(running.grpc) as client:
        client.start_stream(lambda result, error: results.put(error or result))
        inputs = []
        for name, kind, value in (
            ("text_input", "BYTES", PROMPT.encode()),
            ("stream", "BOOL", True),
            ("sampling_parameters", "BYTES", json.dumps(SAMPLING | {"n": 2, "truncate_prompt_tokens": 4}).encode()),
            ("return_prompt_token_ids", "BOOL", True),
        ):
            tensor = grpc_client.InferInput(name, [1], kind)
            tensor.set_data_from_numpy(np.array([value], np.object_ if kind == "BYTES" else np.bool_))
            inputs.append(tensor)
        client.async_stream_infer(MODEL, inputs, enable_empty_final_response=True)
        texts, prompts = {0: b"", 1: b""}, []
        while True:
            result = results.get(timeout=20)
            response = result.get_response()
            if result.as_numpy("text_output") is not None:
                texts[int(result.as_numpy("sequence_index")[0])] += result.as_numpy("text_output")[0]
            if result.as_numpy("prompt_token_ids") is not None:
                prompts.append(result.as_numpy("prompt_token_ids").tolist())
            if response.parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    assert prompts == [list(b"on: ")]
    alone = [generate(running, text_input="on: ", parameters=SAMPLING | {"seed": 3 + index}) for index in range(2)]
    assert [text.decode() for text in texts.values()] == [one.json()["text_output"] for one in alone]
