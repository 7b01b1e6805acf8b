"""Models of other backends on the OpenAI API: each is served with the inputs that it declares, or is not listed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from tests.helpers.openai_live_server import openai_client

CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            said = text.ravel()[0].decode()
            if said == "long":
                text = "The prompt is longer than the maximum model length of 64"
                error = pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            answer = np.full(text.shape, f"{said} {text.shape}".encode(), dtype=object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", answer)]))
        return responses
"""
TEXT_IN = '{ name: "text_input" data_type: TYPE_STRING dims: [1] }'
TEXT_OUT = 'output { name: "text_output" data_type: TYPE_STRING dims: [1] }'
MODELS = {
    "plain": f"input [{TEXT_IN}] {TEXT_OUT}",
    "batching": f"max_batch_size: 4 input [{TEXT_IN}] {TEXT_OUT}",
    "optional": f'input [{TEXT_IN}, {{ name: "top" data_type: TYPE_FP32 dims: [1] optional: true }}] {TEXT_OUT}',
    "demanding": f'input [{TEXT_IN}, {{ name: "top" data_type: TYPE_FP32 dims: [1] }}] {TEXT_OUT}',
    "numbers": f'input {{ name: "text_input" data_type: TYPE_FP32 dims: [1] }} {TEXT_OUT}',
}
SERVED = ["batching", "optional", "plain"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    repository: Path = tmp_path_factory.mktemp("repository")
    for name, config in MODELS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(f'backend: "python" {config}')
        (repository / name / "1" / "model.py").write_text(CODE)
    server = InferenceServer(ServerOptions(model_repositories=[repository]))
    server.start()
    with openai_client(server) as client:
        yield client
    assert server.stop(timeout_s=20)


def test_what_cannot_be_served_is_not_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == SERVED
    for name in MODELS.keys() - SERVED:
        with pytest.raises(openai.NotFoundError, match=f"'{name}' does not exist for this API, which serves models"):
            client.completions.create(model=name, prompt="hi")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", SERVED)
def test_what_is_listed_is_served(client: openai.OpenAI, name: str, stream: bool) -> None:
    answer: Any = client.completions.create(model=name, prompt="hi", stream=stream)
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == ("hi (1, 1)" if name == "batching" else "hi (1,)")
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is None  # the model counts no tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"temperature": 0.5}, "temperature"), ({"max_tokens": 5}, "max_tokens"), ({"logprobs": 1}, "logprobs")],
)
def test_what_the_model_has_no_input_for_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=f"has no input for '{param}'") as caught:
        client.completions.create(model="plain", prompt="hi", **fields)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


def test_a_chat_needs_the_input_messages(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="has no input 'messages'"):
        client.chat.completions.create(model="plain", messages=[{"role": "user", "content": "hi"}])


def test_another_backends_refusal_of_a_long_prompt_is_known_as_one(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="plain", prompt="long")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
