"""Decoupled `python` models on the OpenAI API, among them the one that docs/openai.md shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from tests.helpers.openai_live_server import openai_client
from tests.helpers.waiting import eventually

DOCS = Path(__file__).parents[2] / "docs" / "openai.md"
COMPLETING = """
import json, pathlib, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.noted = pathlib.Path(args["model_repository"]) / "cancelled"

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,), daemon=True).start()

    def answer(self, request):
        sender = request.get_response_sender()
        value = lambda name: pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0]
        prompt, options = value("text_input").decode(), json.loads(value("sampling_parameters"))
        if unknown := options.keys() - {"max_tokens", "stop"}:
            self.fail(sender, f"sampling parameter '{min(unknown)}' is not supported", pb_utils.TritonError.INVALID_ARG)
            return
        pieces = [f" {word}" for word in prompt.split()][: options["max_tokens"]]
        if not value("stream"):
            pieces = ["".join(pieces)]
        for piece in pieces:
            if piece == " ***":
                self.fail(sender, "the model is out of words", pb_utils.TritonError.UNAVAILABLE)
                return
            self.send(sender, piece)
            while piece == " forever" and not sender.is_cancelled():
                self.send(sender, piece)
                time.sleep(0.01)
            if piece == " twice":
                time.sleep(0.2)
                self.send(sender, piece)
                while not sender.is_cancelled():
                    time.sleep(0.01)
        if sender.is_cancelled():
            self.noted.touch()
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def send(self, sender, piece):
        text = piece.encode() if piece != " latin" else piece.encode() + b"\\xe9"
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([[text]], dtype=object))]))

    def fail(self, sender, text, code):
        error = pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))
        sender.send(error, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COMPLETING_CONFIG = """
backend: "python"
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 100 }
model_transaction_policy { decoupled: true }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] }
]
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
"""


CALLING = COMPLETING.replace('value("text_input").decode()', 'json.loads(value("messages"))["messages"][-1]["content"]')
CALLING_CONFIG = (
    COMPLETING_CONFIG.replace("text_input", "messages")
    + """
parameters { key: "tool_call_parser" value { string_value: "hermes" } }
"""
)


def shown_in_docs() -> tuple[str, str]:
    """The model and its configuration."""
    section = DOCS.read_text().partition("## A model of your own")[2]
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[:1]
    [config] = re.findall(r"```\n(.*?)```", section, re.DOTALL)[:1]
    return code, config


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository: Path = tmp_path_factory.mktemp("repository")
    models = {
        "echo": shown_in_docs(),
        "words": (COMPLETING, COMPLETING_CONFIG),
        "caller": (CALLING, CALLING_CONFIG),
    }
    for name, (code, config) in models.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
        (repository / name / "1" / "model.py").write_text(code)
    return repository


@pytest.fixture(scope="module")
def client(repository: Path) -> Iterator[openai.OpenAI]:
    server = InferenceServer(ServerOptions(model_repositories=[repository]))
    server.start()
    with openai_client(server) as client:
        yield client
    assert server.stop(timeout_s=20)


def chat(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    return client.chat.completions.create(model="echo", messages=[{"role": "user", "content": text}], **fields)


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(model="words", prompt=prompt, **fields)


def test_all_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["caller", "echo", "words"]


def test_a_whole_chat_and_its_usage(client: openai.OpenAI) -> None:
    answer = chat(client, "one two three", max_tokens=2)
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 2)


def test_a_streamed_chat_and_its_usage(client: openai.OpenAI) -> None:
    *chunks, usage = chat(client, "one two three", stream=True, stream_options={"include_usage": True})
    contents = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert contents == ["one ", "two ", "three "]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert (usage.choices, usage.usage.total_tokens) == ([], 6)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_several_prompts_in_batches(client: openai.OpenAI, stream: bool) -> None:
    answer = complete(client, ["a b c", "d e"], max_tokens=2, stop=["x"], stream=stream)
    chunks = list(answer) if stream else [answer]
    texts = {0: "", 1: ""}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
    assert texts == {0: " a b", 1: " d e"}


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_read_by_the_parser_that_the_configuration_names(client: openai.OpenAI, stream: bool) -> None:
    text = 'well <tool_call> {"name": "f", "arguments": {"a": 1}} </tool_call>'
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    answer: Any = client.chat.completions.create(
        model="caller", messages=[{"role": "user", "content": text}], tools=tools, max_tokens=9, stream=stream
    )
    choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    calls = [call for one in choices for call in (one.delta if stream else one.message).tool_calls or ()]
    assert "".join(call.function.name or "" for call in calls) == "f"
    assert json.loads("".join(call.function.arguments for call in calls)) == {"a": 1}
    assert choices[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("fields", [{"stop": ["x"]}, {"response_format": {"type": "json_object"}}, {"temperature": 1}])
def test_the_model_in_the_docs_refuses_what_it_does_not_know(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="this model has only 'max_tokens'"):
        chat(client, "a", **fields)


def test_errors_of_the_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="sampling parameter 'temperature' is not supported") as caught:
        complete(client, "a", temperature=0.5)
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.InternalServerError, match="out of words") as failed:
        complete(client, "***")
    assert failed.value.status_code == 503


def test_an_error_after_the_first_text_ends_the_stream(client: openai.OpenAI) -> None:
    chunks = iter(complete(client, "a *** b", stream=True))
    assert next(chunks).choices[0].text == " a"
    with pytest.raises(openai.APIError, match="out of words"):
        next(chunks)


def test_text_that_is_not_utf8_is_the_models_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="model 'words' sent an invalid 'text_output': 'utf-8' codec"):
        complete(client, "latin", stream=True)


@pytest.mark.parametrize("word", ["forever", "twice"])
def test_a_client_that_leaves_cancels_the_model(client: openai.OpenAI, repository: Path, word: str) -> None:
    """At the first text that it does not read, also if the model sends no other one."""
    (repository / "words" / "cancelled").unlink(missing_ok=True)
    with complete(client, word, stream=True) as stream:
        assert next(stream).choices[0].text == f" {word}"
    eventually((repository / "words" / "cancelled").exists)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools"),
        ({"extra_body": {"return_token_ids": True}}, "return_token_ids"),
    ],
)
def test_what_the_model_cannot_honour_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "a", **fields)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")
