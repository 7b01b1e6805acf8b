"""Arbitrary JSON: a request is parsed, or refused with a field's name, and nothing else happens."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from llmbackend.frontends.http.errors import OpenAIError
from llmbackend.frontends.openai.responses_api.items import ITEM_FORMS, REFUSED_ITEMS
from llmbackend.frontends.openai.responses_api.schema import ResponsesBody

from .parsed import chat, parsed

TYPES = st.sampled_from([*ITEM_FORMS, *REFUSED_ITEMS, "input_text", "output_text", "refusal", "function", "custom",
                         "namespace", "tool_search", "grammar", "text", "json_schema", "allowed_tools"])  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5) | TYPES
KEYS = st.text(max_size=4) | st.sampled_from(["type", "text", "name", "tools", "id", "format", "schema", "effort"])
JSON = st.recursive(
    SCALARS,
    lambda items: st.lists(items, max_size=3) | st.dictionaries(KEYS, items, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    sorted({field.alias or name for name, field in ResponsesBody.__pydantic_fields__.items()} - {"model"})
)
ITEM_FIELDS = st.sampled_from(sorted({name for form in ITEM_FORMS.values() for name in form.__annotations__}))
ITEM = st.builds(lambda fields, kind: fields | {"type": kind}, st.dictionaries(ITEM_FIELDS, JSON, max_size=4), TYPES)
MESSAGE = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "developer"]),
    JSON,
)


def parse(body: dict[str, Any]) -> None:
    try:
        request = parsed(**body)
    except OpenAIError as error:
        assert error.status in (400, 404)
        assert error.param
        assert orjson.loads(error.body())["error"]["message"]
    else:
        assert chat(request)["messages"] and request.echo["tool_choice"]
        orjson.dumps(request.echo)


@given(fields=st.dictionaries(FIELDS, JSON, max_size=4))
def test_arbitrary_fields(fields: dict[str, Any]) -> None:
    parse(fields)


@given(items=st.lists(ITEM | MESSAGE, min_size=1, max_size=3))
def test_arbitrary_items(items: list[Any]) -> None:
    parse({"input": items})
