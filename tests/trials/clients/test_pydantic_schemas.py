"""Schemas that Pydantic writes, sent by the `openai` package: enforced as far as they can be, and what is not enforced
is said; a `strict` one is refused by name.

Every answer is short because its schema bounds it, so that any model passes.
"""

from __future__ import annotations

import enum
import ipaddress
import json
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import anthropic
import openai
import pytest
from pydantic import UUID4, BaseModel, ConfigDict, Field, SecretStr

pytestmark = pytest.mark.slow

MODEL = "demo"
HELLO: list[Any] = [{"role": "user", "content": "Make a JSON object."}]
NOT_ENFORCED, VALID = "x-schema-not-enforced", "x-schema-valid"
Short = Annotated[str, Field(max_length=4)]


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


class Enforced(BaseModel):
    """All of it is."""

    colors: set[Color]
    id: UUID4
    network: ipaddress.IPv4Network
    sizes: dict[Literal["a", "b"], bool]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    big: Annotated[int, Field(ge=0, le=2**63 - 1, multiple_of=10)] | None


class Texts(BaseModel):
    """Of formats that every string has."""

    path: Annotated[pathlib.Path, Field(json_schema_extra={"maxLength": 4})]
    secret: Annotated[SecretStr, Field(max_length=4)]
    raw: Annotated[bytes, Field(max_length=4)]


class Word(BaseModel):
    model_config = ConfigDict(regex_engine="python-re")
    words: Annotated[set[Short], Field(max_length=2)]
    code: Annotated[str, Field(pattern=r"^(?=a)[ab]{1,3}$", max_length=3)]


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def form(model: type[BaseModel], **more: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "m", "schema": model.model_json_schema(), **more}}


def tool(parameters: dict[str, Any], **more: Any) -> Any:
    return {"type": "function", "function": {"name": "save", "parameters": parameters, **more}}


def ask(client: openai.OpenAI, **options: Any) -> Any:
    """The raw response of a chat."""
    given: Any = {"temperature": 0, "max_tokens": 250, "messages": HELLO} | options
    return client.chat.completions.with_raw_response.create(model=MODEL, **given)


@pytest.mark.parametrize("model", [Enforced, Texts])
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_enforced_is_parsed(client: openai.OpenAI, model: type[BaseModel], strict: bool) -> None:
    for seed in range(2):
        raw = ask(client, response_format=form(model, strict=strict), temperature=1, seed=seed)
        choice = raw.parse().choices[0]
        assert NOT_ENFORCED not in raw.headers
        if choice.finish_reason == "stop":
            assert model.model_validate_json(choice.message.content)


def test_the_clients_own_parse(client: openai.OpenAI) -> None:
    """It sends `strict`."""
    answer = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Cat, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Cat)
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Word, temperature=0)


def test_what_is_not_enforced_is_said_with_a_verdict(client: openai.OpenAI) -> None:
    raw = ask(client, response_format=form(Word))
    where = "response_format.json_schema.schema#/properties"
    assert raw.headers[NOT_ENFORCED] == f"{where}/words/uniqueItems, {where}/code/pattern"
    content = raw.parse().choices[0].message.content
    parsed = json.loads(content)
    assert all(len(word) <= 4 for word in parsed["words"])  # the rest of the schema holds
    is_valid = len(set(parsed["words"])) == len(parsed["words"]) and parsed["code"].startswith("a")
    is_valid = is_valid and set(parsed["code"]) <= {"a", "b"}
    assert raw.headers[VALID] == ("true" if is_valid else "false")


def test_a_stream_says_what_is_not_enforced_before_its_answer(client: openai.OpenAI) -> None:
    raw = ask(client, response_format=form(Word), stream=True)
    assert NOT_ENFORCED in raw.headers and VALID not in raw.headers
    assert any(chunk.choices for chunk in raw.parse())


def test_a_verdict_of_each_kind(client: openai.OpenAI) -> None:
    def verdict(schema: dict[str, Any], **options: Any) -> str:
        wanted = {"type": "json_schema", "json_schema": {"name": "m", "schema": schema}}
        return str(ask(client, response_format=wanted, **options).headers[VALID])

    assert verdict({"const": 1, "not": {"const": 2}}) == "true"
    assert verdict({"const": 1, "not": {"const": 1}}) == "false"
    assert verdict({"const": 1, "not": {"$ref": "https://example.com/x"}}) == "unknown"
    assert verdict({"const": "aaaaaaaa", "not": {"const": 2}}, max_tokens=1) == "false"  # cut off


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "save"}}])
def test_forced_calls_follow_what_can_be_enforced(client: openai.OpenAI, choice: Any) -> None:
    parameters = {**Word.model_json_schema(), "strict": True}
    raw = ask(client, tools=[tool(parameters)], tool_choice=choice)
    where = "tools[0].function.parameters#"
    assert raw.headers[NOT_ENFORCED] == ", ".join(
        f"{where}{path}" for path in ("/properties/words/uniqueItems", "/properties/code/pattern", "/strict")
    )
    (call, *_) = raw.parse().choices[0].message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"words", "code"}
    assert raw.headers[VALID] in ("true", "false")


def test_strict_functions_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=[tool(Word.model_json_schema(), strict=True)], tool_choice="required")
    assert caught.value.param == "tools[0].function.parameters" and "/properties/words/uniqueItems" in str(caught.value)


def test_overlapping_alternatives(client: openai.OpenAI) -> None:
    alternatives = [{"properties": {"a": {"type": "boolean"}}}, {"properties": {"b": {"type": "boolean"}}}]
    schema = {"type": "object", "maxProperties": 1, "oneOf": alternatives}
    raw = ask(client, response_format={"type": "json_object", "schema": schema})
    assert raw.headers[NOT_ENFORCED] == "response_format.schema#/maxProperties, response_format.schema#/oneOf"


def test_responses_and_vllms_fields(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1, "not": {}}}, "required": ["a"]}
    closed = {**schema, "additionalProperties": False}
    text: Any = {"format": {"type": "json_schema", "name": "m", "schema": closed}}
    raw = client.responses.with_raw_response.create(model=MODEL, input="hi", text=text, temperature=0)
    assert raw.headers[NOT_ENFORCED] == "text.format.schema#/properties/a/not" and raw.headers[VALID] == "false"
    strict: Any = {"format": {**text["format"], "strict": True}}
    with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema"):
        client.responses.create(model=MODEL, input="hi", text=strict)
    for field, value in (("guided_json", closed), ("structured_outputs", {"json": closed})):
        path = "" if field == "guided_json" else "/json"
        raw = ask(client, extra_body={field: value})
        assert raw.headers[NOT_ENFORCED] == f"{field}#{path}/properties/a/not" and raw.headers[VALID] == "false"


def test_the_messages_api(base_url: str) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1, "not": {"const": 2}}}, "required": ["a"]}
    named: Any = {"name": "save", "input_schema": schema}
    options: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 100}
    options["tool_choice"] = {"type": "any"}
    with anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        raw = client.messages.with_raw_response.create(tools=[named], **options)
        assert raw.headers[NOT_ENFORCED] == "tools[0].input_schema#/properties/a/not" and raw.headers[VALID] == "true"
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.input_schema"):
            client.messages.create(tools=[{**named, "strict": True}], **options)


def test_a_json_object_with_a_schema(client: openai.OpenAI) -> None:
    """As llama.cpp and Together take it."""
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    raw = ask(client, response_format={"type": "json_object", "schema": schema})
    assert json.loads(raw.parse().choices[0].message.content) == {"n": 7}
    assert NOT_ENFORCED not in raw.headers
    with pytest.raises(openai.BadRequestError, match=r"response_format\.schema"):
        ask(client, response_format={"type": "json_object", "schema": {"type": "strnig"}})
    with pytest.raises(openai.BadRequestError, match=r"response_format\.schema.*does not belong to the type"):
        ask(client, response_format={"type": "text", "schema": schema})


LONG_CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 200}},
    "required": ["city"],
}
ERROR = "Error: the arguments are not JSON."


class TestArgumentsThatWereCutOff:
    """A call whose arguments are no JSON does not end the conversation."""

    def test_in_a_chat(self, client: openai.OpenAI) -> None:
        options = {"tools": [tool(LONG_CITY)], "max_tokens": 40}
        choice = ask(client, tool_choice="required", **options).parse().choices[0]
        (call,) = choice.message.tool_calls
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": ERROR}
        messages = [*HELLO, choice.message.model_dump(exclude_none=True), result]
        assert ask(client, messages=messages, **options).parse().choices

    def test_in_a_chain_of_stored_responses(self, client: openai.OpenAI) -> None:
        named: Any = {"type": "function", "name": "save", "parameters": LONG_CITY}
        options: Any = {"model": MODEL, "tools": [named], "max_output_tokens": 40, "temperature": 0}
        first = client.responses.create(input="hi", tool_choice="required", **options)
        (call,) = [item for item in first.output if item.type == "function_call"]
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.arguments)
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": ERROR}
        second = client.responses.create(input=[result], previous_response_id=first.id, **options)
        assert second.status in ("completed", "incomplete")
