"""A server without a tokenizer (skip_tokenizer_init): token ids in and out over every protocol that has them; whatever
needs text is refused with the reason."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.helpers.server_process import ServerProcess, start_server, stop_server

pytestmark = pytest.mark.slow

PROMPT = [7, 200, 12, 5]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
REASON = "this model has no tokenizer: it takes and gives token ids"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = start_server("--model", "mock", "--skip-tokenizer-init")
    yield process
    stop_server(process)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as one:
        yield one


def generate(server: ServerProcess, **fields: Any) -> httpx.Response:
    return httpx.post(f"http://{server.http}/v2/models/mock/generate", json=fields)


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> list[int]:
    answer = generate(server, input_ids=PROMPT, return_output_ids=True, parameters=GREEDY)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["output_ids"]
    assert len(ids) == 5 and answer.json()["text_output"] == ""
    return ids


def streamed(server: ServerProcess, name: str, values: npt.NDArray[Any], datatype: str) -> list[int]:
    """The token ids of a gRPC stream. Raises InferenceServerException."""
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    inputs = [grpcclient.InferInput(name, [len(values)], datatype), grpcclient.InferInput("stream", [1], "BOOL")]
    inputs.append(grpcclient.InferInput("return_output_ids", [1], "BOOL"))
    for tensor, data in zip(inputs, (values, np.array([True]), np.array([True])), strict=True):
        tensor.set_data_from_numpy(data)
    found: list[int] = []
    with grpcclient.InferenceServerClient(server.grpc) as one:
        one.start_stream(lambda result, error: answers.put((result, error)))
        one.async_stream_infer("mock", inputs, parameters=GREEDY, enable_empty_final_response=True)
        while True:
            result, error = answers.get(timeout=30)
            if error is not None:
                raise error
            ids = result.as_numpy("output_ids")
            found += [] if ids is None else ids.tolist()
            if result.get_response().parameters["triton_final_response"].bool_param:
                return found


def test_a_grpc_stream(server: ServerProcess, expected: list[int]) -> None:
    assert streamed(server, "input_ids", np.array(PROMPT, np.int32), "INT32") == expected
    with pytest.raises(InferenceServerException, match=REASON):
        streamed(server, "text_input", np.array([b"hi"], np.object_), "BYTES")


def test_completions(client: openai.OpenAI, expected: list[int]) -> None:
    extra = {"ignore_eos": True, "return_token_ids": True}
    made = client.completions.create(model="mock", prompt=PROMPT, temperature=0, max_tokens=5, extra_body=extra)
    fields = made.choices[0].model_dump()
    assert (fields["text"], fields["token_ids"], fields["prompt_token_ids"]) == ("", expected, PROMPT)
    stream = client.completions.create(
        model="mock", prompt=PROMPT, temperature=0, max_tokens=5, extra_body=extra, stream=True
    )
    streamed = [
        token for chunk in stream for choice in chunk.choices for token in choice.model_dump().get("token_ids") or ()
    ]
    assert streamed == expected


def test_stop_token_ids_end_a_generation(server: ServerProcess, expected: list[int]) -> None:
    sampling = json.dumps(GREEDY | {"stop_token_ids": [expected[2]]})
    answer = generate(server, input_ids=PROMPT, return_output_ids=True, sampling_parameters=sampling)
    assert answer.json()["output_ids"] == expected[: expected.index(expected[2]) + 1]


@pytest.mark.parametrize(
    "fields",
    [
        {"text_input": "hi"},
        {"messages": json.dumps([{"role": "user", "content": "hi"}])},
        {"input_ids": PROMPT, "sampling_parameters": json.dumps({"stop": ["x"]})},
        {"input_ids": PROMPT, "sampling_parameters": json.dumps({"bad_words": ["x"]})},
        {"input_ids": PROMPT, "sampling_parameters": json.dumps({"structured_outputs": {"choice": ["a", "b"]}})},
        {"input_ids": PROMPT, "exclude_input_in_output": False},
        {"input_ids": PROMPT, "prompt_only": True, "return_prompt_text": True},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_text_is_refused(server: ServerProcess, fields: dict[str, Any]) -> None:
    answer = generate(server, **fields)
    assert answer.status_code == 400 and REASON in answer.json()["error"], answer.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": PROMPT, "stop": "x"}),
        ("/v1/completions", {"prompt": PROMPT, "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": PROMPT}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_text_is_refused_over_other_apis(server: ServerProcess, path: str, fields: dict[str, Any]) -> None:
    answer = httpx.post(f"http://{server.http}{path}", json={"model": "mock", **fields})
    assert answer.status_code == 400 and REASON in answer.text, answer.text
