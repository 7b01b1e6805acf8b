"""The exam's questions about tools and schemas, sent to a running server's chat completions: the tools in `tools`, the
calls read from `tool_calls`, the schema in `response_format`.

Independent of how the server was started. Invariant: a question is the exam's own; only its form differs.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from typing import Any

from .dialogue import Message
from .exam import Question

KINDS = ("tool calls", "tool results", "JSON by schema")


def ask(url: str, question: Question) -> tuple[str, bool]:
    """url: the server's HTTP address. The answer's text, calls as JSON, and whether it is right."""
    message = _post(f"{url}/v1/chat/completions", request(question))["choices"][0]["message"]
    if calls := message.get("tool_calls"):
        return json.dumps(calls), _called(calls) == _expected_calls(question)
    text = message["content"] or ""
    return text, question.is_right(text)


def request(question: Question) -> dict[str, Any]:
    """The body of the chat completion."""
    body: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 160}
    body["messages"] = _sent(question.messages)
    if question.tools:
        body["tools"] = list(question.tools)
    if question.kind == "JSON by schema":
        schema = {"name": "answer", "schema": schema_of(question), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def schema_of(question: Question) -> dict[str, Any]:
    """The JSON schema that the chat holds; of bare properties, the object that requires them all."""
    text = "\n".join(str(message["content"]) for message in question.messages)
    found: dict[str, Any] = json.JSONDecoder().raw_decode(text, text.index("{"))[0]
    properties = found["properties"] if isinstance(found.get("type"), str) else found
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _sent(messages: Sequence[Message]) -> list[Message]:
    """With the ids and the encoded arguments that the API wants."""
    sent: list[Message] = []
    for at, message in enumerate(messages):
        call_id = f"call_{at - 1 if message['role'] == 'tool' else at}"
        if message["role"] == "tool":
            sent.append({**message, "tool_call_id": call_id})
        elif calls := message.get("tool_calls"):
            sent.append({**message, "tool_calls": [_encoded(call, call_id) for call in calls]})
        else:
            sent.append(message)
    return sent


def _encoded(call: dict[str, Any], call_id: str) -> dict[str, Any]:
    function = call["function"]
    return {**call, "id": call_id, "function": {**function, "arguments": json.dumps(function["arguments"])}}


def _called(calls: Sequence[dict[str, Any]]) -> list[tuple[str, Any]] | None:
    """None: arguments that are no JSON."""
    try:
        return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    except ValueError:
        return None


def _expected_calls(question: Question) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in question.expected.get("tool_calls", ())
    ]


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    sent = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(sent, timeout=300) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
