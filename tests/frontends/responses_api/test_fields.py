"""Fields of a create-response request: what they become, and how wrong ones are refused."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from openai.types.responses import response_create_params, response_includable, response_input_item_param, tool_param

from llmbackend.core.errors import invalid_argument
from llmbackend.frontends.generation.request import STRUCTURED_OUTPUTS, GenerationRequest
from llmbackend.frontends.http.errors import OpenAIError
from llmbackend.frontends.openai.responses_api.items import ITEM_FORMS, REFUSED_ITEMS
from llmbackend.frontends.openai.responses_api.parsing import History, effective_sampling
from llmbackend.frontends.openai.responses_api.schema import INCLUDABLE, ResponsesBody
from llmbackend.frontends.openai.responses_api.tools import REFUSED_TOOLS, WEB_SEARCHES

from .parsed import chat, parsed

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LOGPROBS = "message.output_text.logprobs"


def generation(**body: Any) -> GenerationRequest:
    return parsed(**body).generation


def refused(**body: Any) -> OpenAIError:
    with pytest.raises(OpenAIError) as caught:
        parsed(**body)
    return caught.value


def types_of(union: Any) -> set[str]:
    """The `type`s of a union of TypedDicts."""
    found: set[str] = set()
    for member in typing.get_args(union):
        hints = typing.get_type_hints(member)
        found |= {name for name in typing.get_args(hints["type"]) if isinstance(name, str)}
    return found


def test_every_field_of_the_official_client_is_known() -> None:
    known = {field.alias or name for name, field in ResponsesBody.__pydantic_fields__.items()}
    official = typing.get_type_hints(response_create_params.ResponseCreateParamsBase)
    assert official.keys() | {"stream"} <= known


def test_every_item_of_the_official_client_is_known() -> None:
    assert types_of(response_input_item_param.ResponseInputItemParam) <= ITEM_FORMS.keys() | REFUSED_ITEMS.keys()


def test_every_tool_of_the_official_client_is_known() -> None:
    served = {"function", "custom", "namespace", "tool_search", *WEB_SEARCHES}
    assert types_of(tool_param.ToolParam) <= served | REFUSED_TOOLS.keys()


def test_everything_that_the_official_client_may_include_is_known() -> None:
    assert set(typing.get_args(response_includable.ResponseIncludable)) == set(INCLUDABLE)


def test_a_text_is_a_message_of_the_user() -> None:
    request = parsed(input="Hi!", instructions="Be brief.")
    assert chat(request) == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    }
    content = [{"type": "input_text", "text": "Hi!"}]
    assert request.input_items == ({"type": "message", "role": "user", "content": content, "status": "completed"},)
    assert request.generation.id_prefix == "resp_" and request.store and not request.background


def test_sampling() -> None:
    asked = generation(temperature=0.5, top_p=0.9, seed=7, top_k=5, stop="x", max_output_tokens=9, stream=True)
    assert asked.sampling == {
        "temperature": 0.5, "top_p": 0.9, "seed": 7, "top_k": 5, "stop": ["x"], "max_tokens": 9,
    }  # fmt: skip
    assert asked.stream is not None and asked.stream.include_usage
    assert asked.max_tokens_field == "max_output_tokens"
    assert generation().max_tokens_field == "" and generation().sampling == {"max_tokens": None}


@pytest.mark.parametrize(
    ("text", "constraint"),
    [
        ({"format": {"type": "text"}}, None),
        ({"format": {"type": "json_object"}}, {"json_object": True}),
        ({"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, {"json": SCHEMA}),
        (
            {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
            {"json": SCHEMA, "strict": True},
        ),
    ],
)
def test_text_format(text: dict[str, Any], constraint: dict[str, Any] | None) -> None:
    assert generation(text=text).sampling.get(STRUCTURED_OUTPUTS) == constraint


def test_structured_outputs_of_vllm() -> None:
    asked = generation(structured_outputs={"regex": "a+"})
    assert asked.sampling[STRUCTURED_OUTPUTS] == {"regex": "a+"} and asked.structure_field == STRUCTURED_OUTPUTS


def test_variables_of_the_template() -> None:
    options = chat(
        parsed(reasoning={"effort": "low"}, text={"verbosity": "high"}, chat_template_kwargs={"documents": []})
    )
    assert options["reasoning_effort"] == "low"
    assert options["chat_template_kwargs"] == {"documents": [], "verbosity": "high"}


def test_logprobs() -> None:
    asked = generation(include=[LOGPROBS], top_logprobs=3)
    assert asked.logprobs is not None and asked.logprobs.top == 3 and asked.sampling["logprobs"] == 3
    assert generation().logprobs is None


def test_truncation() -> None:
    assert generation(truncation="auto").sampling["truncate_prompt_tokens"] == -1
    assert "truncate_prompt_tokens" not in generation(truncation="disabled").sampling
    for sent, budget in ((0, 0), (-1, None), (None, None)):
        assert generation(thinking_token_budget=sent).reasoning.budget_tokens == budget


def test_labels_are_bounded() -> None:
    labels = generation(user="u", metadata={"a": "b"}, client_metadata={"turn_id": "x" * 10_000}).labels
    assert labels["user"] == "u" and labels["metadata"] == {"a": "b"}
    assert labels["client_metadata"].startswith('{"turn_id":"xxx') and len(labels["client_metadata"]) == 256


def test_the_echo_has_every_field() -> None:
    assert parsed().echo == {
        "background": False, "conversation": None, "frequency_penalty": 0.0, "instructions": None,
        "max_output_tokens": None, "max_tool_calls": None, "metadata": {}, "parallel_tool_calls": True,
        "presence_penalty": 0.0, "previous_response_id": None, "prompt_cache_key": None,
        "prompt_cache_retention": None, "reasoning": {"effort": None, "summary": None}, "safety_identifier": None,
        "service_tier": "default", "store": True,
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "tool_choice": "auto", "tools": [],
        "top_logprobs": 0, "truncation": "disabled", "user": None,
    }  # fmt: skip


def test_the_effective_sampling_is_the_requests_then_the_models() -> None:
    assert effective_sampling({}, {}) == {"temperature": 1.0, "top_p": 1.0}
    assert effective_sampling({}, {"temperature": 0.6, "top_k": 20}) == {"temperature": 0.6, "top_p": 1.0}
    asked = generation(temperature=0.0, top_p=0.5).sampling
    assert effective_sampling(asked, {"temperature": 0.6}) == {"temperature": 0.0, "top_p": 0.5}


def test_the_echo_has_what_was_sent() -> None:
    sent: dict[str, Any] = {
        "background": True, "frequency_penalty": 0.5, "instructions": "Be brief.", "max_output_tokens": 5,
        "max_tool_calls": 2, "metadata": {"a": "b"}, "parallel_tool_calls": False, "presence_penalty": 1.0,
        "prompt_cache_key": "k", "safety_identifier": "s", "store": True, "top_logprobs": 2,
        "tool_choice": "none", "truncation": "auto", "user": "u",
    }  # fmt: skip
    echo = parsed(**sent, include=[LOGPROBS]).echo
    assert {name: echo[name] for name in sent} == sent
    assert parsed(conversation="conv_1", history=History(({"type": "message", "role": "user", "content": "a"},))).echo[
        "conversation"
    ] == {"id": "conv_1"}
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    assert parsed(text={"format": form}).echo["text"]["format"] == form | {"description": None, "strict": False}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "missing_required_parameter"),
        ({"input": [5]}, "input[0]", "invalid_value"),
        ({"input": [{}]}, "input[0].type", "missing_required_parameter"),
        ({"input": [{"type": "foo"}]}, "input[0].type", "invalid_value"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "unsupported_parameter"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "invalid_value"),
        ({"input": [{"role": "user", "content": "a", "foo": 1}]}, "input[0].foo", "unknown_parameter"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "input[0].content[0].type",
            "unsupported_parameter",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
            "input[0].content[0].text",
            "invalid_value",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "foo": 5}]}]},
            "input[0].content[0].foo",
            "unknown_parameter",
        ),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "input[0].call_id",
            "missing_required_parameter",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}]},
            "input[0].output[0].type",
            "unsupported_parameter",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "abc"}]},
            "input[0].encrypted_content",
            "invalid_value",
        ),
        ({"input": [{"id": "msg_1"}]}, "input[0].id", "not_found"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema",
         "missing_required_parameter"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema", None),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}, "structured_outputs": {}},
         STRUCTURED_OUTPUTS, None),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "unsupported_parameter"),
        ({"include": ["foo"]}, "include[0]", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"background": True, "store": False}, "background", "invalid_value"),
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "conversation", None),
        ({"stream_options": {}}, "stream_options", "invalid_value"),
        ({"service_tier": "flex"}, "service_tier", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "unsupported_parameter"),
        ({"request_id": "mine"}, "request_id", "unsupported_parameter"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "unsupported_parameter"),
        ({"n": 2}, "n", "unknown_parameter"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(body: dict[str, Any], param: str, code: str | None) -> None:
    error = refused(**body)
    assert (error.param, error.code) == (param, code)
    assert f"'{param}'" in error.message


def test_errors_of_the_model_name_the_clients_field() -> None:
    request = generation(text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
                         max_output_tokens=5, reasoning={"effort": "low"})  # fmt: skip
    found = [
        request.in_client_fields(OpenAIError(f"'{param}' is wrong", param=param)).param
        for param in ("max_tokens", "reasoning_effort", STRUCTURED_OUTPUTS, "temperature")
    ]
    assert found == ["max_output_tokens", "reasoning.effort", "text.format", "temperature"]
    error = OpenAIError(f"'{STRUCTURED_OUTPUTS}' at /json/properties/a: no", param=STRUCTURED_OUTPUTS)
    assert request.in_client_fields(error).message == "'text.format.schema' at /properties/a: no"


def test_an_error_stops_at_the_first_wrong_item() -> None:
    error = refused(input=[{"role": "user", "content": "a"}, {"type": "x"}, {"type": "y"}])
    assert error.param == "input[1].type"


def test_a_prompt_that_is_too_long_is_the_input() -> None:
    told = invalid_argument("input 'messages' has 5331850 bytes, expected at most 4194304")
    error = parsed().generation.in_client_fields(OpenAIError.of(told))
    assert (error.param, error.message) == ("input", "'input' has 5331850 bytes, expected at most 4194304")


def test_an_empty_input_is_said_to_be_empty() -> None:
    with pytest.raises(OpenAIError, match="'input' is empty, expected a string or a list of at least one item"):
        parsed(input=[])
    with pytest.raises(OpenAIError, match="missing required field 'input'"):
        parsed(input=None)
