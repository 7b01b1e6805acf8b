"""Checks chat messages and puts them into the form that chat templates read.

For: the chat endpoint. Does not know: templates or models. Invariant: what this server (or another one) once sent as
an assistant message is accepted as input again: null content, refusal, reasoning_content, tool_calls. The form:
`content` is always a string (text parts are joined by a newline, as vLLM does for templates that read strings), a
"developer" message is a "system" one (what OpenAI's role stands for, and what templates know).
"""

from __future__ import annotations

from .errors import OpenAIError, refuse
from .fields import Fields, JsonObject

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PART_KEYS = {"text": "text", "refusal": "refusal"}


def parse_messages(value: object) -> list[JsonObject]:
    """The messages as a list of template-ready objects. Raises OpenAIError naming the first wrong field."""
    if not isinstance(value, list) or not value:
        raise refuse("messages", "a non-empty list of messages", value)
    return [_parse_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _parse_message(value: object, path: str) -> JsonObject:
    if not isinstance(value, dict):
        raise refuse(path, "an object", value)
    fields = Fields(value, path + ".")
    role = fields.require("role")
    if role not in _ROLES:
        raise refuse(f"{path}.role", "one of " + ", ".join(_ROLES), role)
    message: JsonObject = {"role": "system" if role == "developer" else role}
    content = _parse_content(fields.take("content"), f"{path}.content")
    if role == "assistant":
        content = _take_assistant_fields(fields, path, content, message)
    elif role == "tool":
        message["tool_call_id"] = _required_text(fields, "tool_call_id")
    if content is None:
        raise OpenAIError(
            f"missing required field '{path}.content'", param=f"{path}.content", code="missing_required_parameter"
        )
    message["content"] = content
    if (name := fields.text("name")) is not None:
        message["name"] = name
    fields.only("function_call", ())
    _finish_ignoring_nulls(fields, value)
    return message


def _take_assistant_fields(fields: Fields, path: str, content: str | None, message: JsonObject) -> str | None:
    """Reads what only an assistant says into `message`; returns the content, which may be "" here."""
    refusal = fields.text("refusal")
    reasoning = fields.text("reasoning_content") or fields.text("reasoning")
    fields.take("reasoning")  # some servers send the same text under both names
    tool_calls = _parse_tool_calls(fields.take("tool_calls"), f"{path}.tool_calls")
    fields.only("audio", ())
    fields.only("annotations", ([],))
    if reasoning:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = tool_calls
    if content is None and (refusal or reasoning or tool_calls):
        return refusal or ""
    return content


def _parse_content(value: object, path: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse(path, "a string or a list of text parts", value)
    return "\n".join(_parse_part(part, f"{path}[{index}]") for index, part in enumerate(value))


def _parse_part(value: object, path: str) -> str:
    if not isinstance(value, dict):
        raise refuse(path, "an object", value)
    fields = Fields(value, path + ".")
    kind = fields.require("type")
    key = _TEXT_PART_KEYS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise OpenAIError(
            f"content part type '{kind}' is not supported yet; only 'text' is accepted",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    text = _required_text(fields, key)
    fields.finish()
    return text


def _parse_tool_calls(value: object, path: str) -> list[JsonObject]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise refuse(path, "a list of tool calls", value)
    return [_parse_tool_call(item, f"{path}[{index}]") for index, item in enumerate(value)]


def _parse_tool_call(value: object, path: str) -> JsonObject:
    if not isinstance(value, dict):
        raise refuse(path, "an object", value)
    fields = Fields(value, path + ".")
    call: JsonObject = {"id": _required_text(fields, "id"), "type": "function"}
    fields.only("type", ("function",))
    fields.take("index")  # clients that assemble a stream's deltas leave it in
    function = fields.object("function")
    if function is None:
        raise OpenAIError(
            f"missing required field '{path}.function'", param=f"{path}.function", code="missing_required_parameter"
        )
    call["function"] = {
        "name": _required_text(function, "name"),
        "arguments": _required_text(function, "arguments"),
    }
    _finish_ignoring_nulls(function, value["function"])
    _finish_ignoring_nulls(fields, value)
    return call


def _required_text(fields: Fields, field: str) -> str:
    value = fields.require(field)
    if not isinstance(value, str):
        raise refuse(fields.name(field), "a string", value)
    return value


def _finish_ignoring_nulls(fields: Fields, value: JsonObject) -> None:
    """Clients dump whole objects of their own: a null of theirs says nothing, whatever its name."""
    for name, item in value.items():
        if item is None:
            fields.take(name)
    fields.finish()
