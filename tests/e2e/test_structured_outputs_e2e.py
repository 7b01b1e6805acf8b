"""Structured output of the bundled model through every protocol: what ends by itself has its form; stream = whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
import tritonclient.grpc as grpc_client

from tests.helpers.server_process import ServerProcess, post

pytestmark = pytest.mark.slow
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
CODE = r"[A-Z]{2}-\d{3}"


@pytest.fixture
def client(demo_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{demo_server.http}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def chat(client: openai.OpenAI, seed: int, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": f"Make a JSON object with name Anna and age {30 + seed}"}]
    options = {"max_tokens": 320, "temperature": 1.0, "seed": seed} | options
    return client.chat.completions.create(model="demo", messages=messages, **options)


def streamed(chunks: Any) -> tuple[str, str]:
    text, reason = "", ""
    for chunk in chunks:
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    return text, reason


def test_answers_of_a_schema_validate_and_streams_are_the_whole_answers(client: openai.OpenAI) -> None:
    ended = 0
    for seed in range(8):
        whole = chat(client, seed, response_format=FORMAT).choices[0]
        assert streamed(chat(client, seed, response_format=FORMAT, stream=True)) == (
            whole.message.content,
            whole.finish_reason,
        )
        if whole.finish_reason == "stop":  # those that the limit cut off are no JSON
            jsonschema.validate(json.loads(whole.message.content), SCHEMA)
            ended += 1
    assert ended  # how many depends on the weights: between the parts of JSON they may write much white space


def test_forms_other_than_schemas(client: openai.OpenAI) -> None:
    choice = chat(client, 1, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}).choices[0]
    assert choice.message.content in ("yes", "no")
    completion = client.completions.create(model="demo", prompt="Code: ", extra_body={"guided_regex": CODE})
    assert re.fullmatch(CODE, completion.choices[0].text)
    grammar = 'root ::= pair pair\npair ::= "(" [0-9] pair? ")"'
    nested = chat(client, 2, extra_body={"guided_grammar": grammar}).choices[0]
    assert re.fullmatch(r"[()0-9]+", nested.message.content)
    if nested.finish_reason == "stop":
        assert nested.message.content.count("(") == nested.message.content.count(")") >= 2


def test_a_wrong_schema_is_a_400_in_the_fields_that_were_sent(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, 0, response_format=wrong)
    assert caught.value.param == "response_format"
    assert "'response_format.json_schema.schema' at /properties/a/not" in str(caught.value)


def test_generate_and_grpc_take_vllms_parameters(demo_server: ServerProcess) -> None:
    body = {"text_input": "Say ", "structured_outputs": json.dumps({"choice": ["left", "right"]}), "max_tokens": 9}
    body |= {"exclude_input_in_output": True, "seed": 3}
    status, answer = post(demo_server, "/v2/models/demo/generate", body)
    assert status == 200, answer
    assert json.loads(answer)["text_output"] in ("left", "right")
    body |= {"structured_outputs": json.dumps({"json": {"const": 1, "not": {}}}), "return_not_enforced": True}
    status, answer = post(demo_server, "/v2/models/demo/generate", body)
    assert status == 200, answer
    assert json.loads(json.loads(answer)["not_enforced"]) == ["structured_outputs#/json/not"]

    tensors = []
    sampling = json.dumps({"structured_outputs": {"regex": CODE}, "max_tokens": 20, "seed": 1})
    for name, value in (("text_input", "Code: "), ("sampling_parameters", sampling)):
        tensors.append(grpc_client.InferInput(name, [1], "BYTES"))
        tensors[-1].set_data_from_numpy(np.array([value.encode()], dtype=object))
    tensors.append(grpc_client.InferInput("exclude_input_in_output", [1], "BOOL"))
    tensors[-1].set_data_from_numpy(np.array([True]))
    results: list[Any] = []
    with grpc_client.InferenceServerClient(demo_server.grpc) as grpc:
        grpc.start_stream(callback=lambda result, error: results.append((result, error)))
        grpc.async_stream_infer("demo", tensors)
        grpc.stop_stream()
    result, error = results[0]
    assert error is None
    assert re.fullmatch(CODE, result.as_numpy("text_output")[0].decode())
