"""vllm_backend's tensors: what auto-complete writes, and how a request's inputs are read."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tritonclient.grpc.model_config_pb2 import TYPE_INT32, TYPE_STRING, ModelConfig

from llmbackend.adapter.schemas.schema import LlmInputs
from llmbackend.adapter.schemas.vllm import INPUTS, OUTPUTS, VllmSchema
from llmbackend.core.backend_api import ErrorCode, TritonError
from tests.helpers.llm_host import tensor


def read(
    parameters: dict[str, Any] | None = None, outputs: list[str] | None = None, decoupled: bool = True, **inputs: Any
) -> LlmInputs:
    tensors = {name: tensor(name, value) for name, value in inputs.items()}
    request: Any = SimpleNamespace(
        inputs=tensors, parameters=parameters or {}, requested_outputs=outputs or list(OUTPUTS)
    )
    config = ModelConfig()
    config.model_transaction_policy.decoupled = decoupled
    (read,) = VllmSchema(config).read(request)
    return read


def complete(config: ModelConfig) -> ModelConfig:
    return VllmSchema(config).complete(config)


def test_auto_complete_writes_vllm_backends_interface() -> None:
    completed = complete(ModelConfig(name="m", backend="llm", max_batch_size=8))
    assert [one.name for one in completed.input] == list(INPUTS)
    assert all(one.optional for one in completed.input)
    assert [(one.name, tuple(one.dims)) for one in completed.output] == [
        (name, kind.dims) for name, kind in OUTPUTS.items()
    ]
    assert (completed.max_batch_size, completed.model_transaction_policy.decoupled) == (0, True)


def test_what_the_model_declares_itself_stays() -> None:
    config = ModelConfig(name="m")
    config.input.add(name="text_input", data_type=TYPE_STRING, dims=[1])
    config.model_transaction_policy.decoupled = False
    completed = complete(config)
    assert completed.input[0].name == "text_input"
    assert len(completed.input) == len(INPUTS)
    assert not completed.model_transaction_policy.decoupled


@pytest.mark.parametrize(
    ("name", "data_type", "dims", "expected"),
    [
        ("prompt", TYPE_STRING, [1], "input 'prompt' is not one of the llm backend's"),
        ("text_input", TYPE_INT32, [1], "input 'text_input' is TYPE_INT32[1], expected TYPE_STRING[1]"),
        ("text_input", TYPE_STRING, [-1], "input 'text_input' is TYPE_STRING[-1], expected TYPE_STRING[1]"),
    ],
)
def test_a_declared_tensor_that_does_not_fit_is_a_load_error(
    name: str, data_type: Any, dims: list[int], expected: str
) -> None:
    config = ModelConfig(name="m")
    config.input.add(name=name, data_type=data_type, dims=dims)
    with pytest.raises(TritonError) as caught:
        complete(config)
    assert expected in caught.value.message


@pytest.mark.parametrize("inputs", [{}, {"text_input": "a", "input_ids": [1]}, {"messages": "[]", "text_input": "a"}])
def test_exactly_one_prompt(inputs: dict[str, Any]) -> None:
    with pytest.raises(
        TritonError, match="exactly one of the inputs text_input, messages, input_ids must be given, got"
    ):
        read(**inputs)


@pytest.mark.parametrize("name", ["image", "embedding_request"])
def test_inputs_that_are_not_served_are_refused_by_name(name: str) -> None:
    unsupported: dict[str, Any] = {name: "x"}
    with pytest.raises(TritonError, match=f"'{name}' is not supported") as caught:
        read(text_input="a", **unsupported)
    assert caught.value.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize(
    ("inputs", "prepends"),
    [
        ({"text_input": "a"}, True),
        ({"text_input": "a", "stream": True}, False),
        ({"text_input": "a", "exclude_input_in_output": True}, False),
        ({"messages": "[]"}, False),
        ({"input_ids": [1]}, False),
        ({"input_ids": [1], "exclude_input_in_output": False}, True),
    ],
)
def test_when_the_prompt_is_prepended(inputs: dict[str, Any], prepends: bool) -> None:
    assert read(**inputs).options.prepend_prompt is prepends


def test_a_stream_cannot_prepend_the_prompt() -> None:
    with pytest.raises(TritonError) as caught:
        read(text_input="a", stream=True, exclude_input_in_output=False)
    assert caught.value.message == "When streaming, `exclude_input_in_output` = False is not allowed."


def test_a_model_that_is_not_decoupled_cannot_stream() -> None:
    assert not read(text_input="a", decoupled=False).options.stream
    with pytest.raises(TritonError, match="decoupled: false"):
        read(text_input="a", stream=True, decoupled=False)


def test_outputs_are_those_that_flags_enable_and_the_client_wants() -> None:
    assert read(text_input="a").options.outputs == {"text_output"}
    flags: dict[str, Any] = {"return_finish_reason": True, "return_output_ids": True, "return_logprobs": False}
    assert read(text_input="a", **flags).options.outputs == {"text_output", "finish_reason", "output_ids"}
    wanted = read(text_input="a", outputs=["output_ids", "logprobs"], **flags)
    assert wanted.options.outputs == {"output_ids"}


def test_sampling_comes_from_the_tensor_or_else_from_request_parameters() -> None:
    parameters = {"temperature": 0, "triton_enable_empty_final_response": True, "id": "42"}
    assert read(parameters, text_input="a").sampling == {"temperature": 0, "id": "42"}
    assert read(parameters, text_input="a", sampling_parameters='{"top_k": 3}').sampling == {"top_k": 3}


@pytest.mark.parametrize(("text", "expected"), [("{", "is not JSON"), ("[1]", "expected a JSON object")])
def test_malformed_sampling_parameters(text: str, expected: str) -> None:
    with pytest.raises(TritonError, match=f"'sampling_parameters'.*{expected}"):
        read(text_input="a", sampling_parameters=text)


def test_the_sampling_parameters_are_bounded_before_they_are_parsed() -> None:
    many = json.dumps(dict.fromkeys(map(str, range(50_000))))  # to look for the longest would take long
    for text in ("{" * 262_145, '{"stop": "' + "x" * (5 << 20) + '"}', many):
        with pytest.raises(TritonError, match=r"'sampling_parameters' has [0-9]+ bytes, expected at most 262144"):
            read(text_input="a", sampling_parameters=text)
    long = json.dumps({"seed": 1, "stop": ["x"] * 100_000, "top_k": 1})
    with pytest.raises(TritonError, match="parameter 'stop' has 500000 bytes of JSON, expected at most 262144"):
        read(text_input="a", sampling_parameters=long)
    for value in ("[" * 262_144, "é" * 262_144):
        with pytest.raises(
            TritonError, match="parameter 'guided_json' has 262144 characters, expected at most 262144"
        ) as caught:
            read({"guided_json": value, "cache_salt": "x", "seed": 1}, text_input="a")
        assert caught.value.param == "guided_json"
    with pytest.raises(TritonError, match="the request has 257 parameters, expected at most 256"):
        read(dict.fromkeys(map(str, range(257))), text_input="a")


def test_text_must_be_utf8() -> None:
    with pytest.raises(TritonError, match="'text_input' is not UTF-8"):
        read(text_input=b"\xff")
