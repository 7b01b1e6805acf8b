"""Bodies of create-response requests, parsed."""

from __future__ import annotations

from typing import Any

import orjson

from llmbackend.frontends.openai.responses_api.parsing import (
    NO_HISTORY,
    History,
    ResponsesRequest,
    parse_responses,
    read_responses,
)


def parsed(history: History = NO_HISTORY, **body: Any) -> ResponsesRequest:
    return parse_responses(read_responses({"model": "m", "input": "Hi!"} | body), history)


def chat(request: ResponsesRequest) -> dict[str, Any]:
    """The messages, and the options of the template."""
    value = orjson.loads(request.generation.prompts[0].data.item(0))
    return value if isinstance(value, dict) else {"messages": value}


def messages(items: list[dict[str, Any]], **body: Any) -> list[dict[str, Any]]:
    """What templates read of `items`."""
    found: list[dict[str, Any]] = chat(parsed(input=items, **body))["messages"]
    return found
