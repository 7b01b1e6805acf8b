"""Every field of every API of text, with values that its own schema forbids: each is refused, by the field's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from llmbackend.frontends.anthropic.content import BetaFields
from llmbackend.frontends.anthropic.requests import parse_message
from llmbackend.frontends.anthropic.schema import MessagesRequest
from llmbackend.frontends.generation.sealed_reasoning import FIXED_KEY
from llmbackend.frontends.http.errors import OpenAIError
from llmbackend.frontends.openai.requests import parse_chat, parse_completion
from llmbackend.frontends.openai.responses_api.parsing import parse_responses, read_responses
from llmbackend.frontends.openai.responses_api.schema import ResponsesBody
from llmbackend.frontends.openai.schema import ChatCompletionRequest, CompletionRequest

Json = dict[str, Any]
MESSAGES = [{"role": "user", "content": "hi"}]
APIS: dict[str, tuple[type[BaseModel], Callable[[Json], Any], Json]] = {
    "chat": (ChatCompletionRequest, parse_chat, {"model": "m", "messages": MESSAGES}),
    "completions": (CompletionRequest, parse_completion, {"model": "m", "prompt": "hi"}),
    "responses": (ResponsesBody, lambda body: parse_responses(read_responses(body)), {"model": "m", "input": "hi"}),
    "messages": (
        MessagesRequest,
        lambda body: parse_message(body, BetaFields(""), FIXED_KEY),
        {"model": "m", "max_tokens": 9, "messages": MESSAGES},
    ),
}
CANDIDATES: tuple[Any, ...] = (
    *(
        None,
        True,
        0.5,
        7,
        -1,
        2**40,
        -(2**70),
        float("1e300"),
        "",
        "no such text",
        [],
        [7],
        [""],
        ["no such text"],
        [[[]]],
        ["a", [1]],
        ["a", ""],
        [1, -1],
    ),
    *({}, {"no such field": 1}, {"messages": []}, {"type": "no such type"}, {"type": ["text"]}),
)


def bounds(schema: Any) -> Iterator[float]:
    """Numbers just outside the ranges that stand anywhere in `schema`."""
    if isinstance(schema, dict):
        yield from (schema[name] - 1 for name in ("minimum", "exclusiveMinimum") if name in schema)
        yield from (schema[name] + 1 for name in ("maximum", "exclusiveMaximum") if name in schema)
    for item in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from bounds(item)


def wrong_values(root: Json, name: str) -> list[Any]:
    schema = root["properties"][name]
    validator = Draft202012Validator(schema | {"$defs": root.get("$defs", {})})
    return [value for value in (*CANDIDATES, *bounds(schema)) if not validator.is_valid(value)]


CASES = [(api, name) for api, (model, _, _) in APIS.items() for name in model.model_json_schema()["properties"]]


@pytest.mark.parametrize(("api", "name"), CASES)
def test_what_the_schema_of_a_field_forbids_is_refused_by_its_name(api: str, name: str) -> None:
    model, parse, good = APIS[api]
    values = wrong_values(model.model_json_schema(), name)
    if (api, name) == ("completions", "logprobs"):
        values.remove(21)  # the server's limit, of which the parser knows nothing
    assert values
    for value in values:
        with pytest.raises(OpenAIError) as refused:
            parse(good | {name: value})
        error = refused.value
        assert error.status == 400 and str(error.param).startswith(name), (value, error.message)
        assert str(error.param) in error.message or "content part type" in error.message, (value, error.message)


@pytest.mark.parametrize("api", APIS)
def test_a_field_that_nobody_knows_is_refused_by_its_name(api: str) -> None:
    _, parse, good = APIS[api]
    with pytest.raises(OpenAIError, match="unknown field 'no_such_field'") as refused:
        parse(good | {"no_such_field": 1})
    assert refused.value.param == "no_such_field"
