"""What a body may contain and still be refused: contradictions, and languages that JSON Schema cannot describe.

Used by schemathesis_hooks.py. Independent of schemathesis. Invariant: a body that the OpenAPI document permits remains
permitted; whatever is removed has its own tests (grammars and schemas in `make schemas`, tools, which the mock model
cannot call, and the other contradictions in tests/frontends).
"""

from __future__ import annotations

from typing import Any

_LANGUAGES = (
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "guided_whitespace_pattern",
    "output_format",
    "structural_tag",
    "structured_outputs",
)
"""Fields that hold the answer to a grammar or a schema."""
_ABOUT_OTHER_FIELDS = (
    "allowed_token_ids",
    "background",
    "chat_template",
    "continue_final_message",
    "documents",
    "function_call",
    "functions",
    "previous_response_id",
    "priority",
    "request_id",
    "suffix",
    "thinking_token_budget",
    "tool_choice",
    "tools",
    "truncate_prompt_tokens",
)
"""Fields whose value has to fit to others, to the server's flags, to its models or to what it has stored."""
_FROM_ELSEWHERE = ("redacted_thinking", "thinking", "tool_result", "tool_use")
"""Parts of a message's content that have to fit to a former answer."""

_FIELDS_OF_MESSAGES = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio", "reasoning_content"}
)
"""Others are variables of the chat template, which has to read them."""


def take_out(body: dict[str, Any]) -> None:
    """In place."""
    if body.get("previous_response_id"):
        body["input"] = body.get("input") or "x"
    for name in (*_LANGUAGES, *_ABOUT_OTHER_FIELDS):
        body.pop(name, None)
    if body.get("response_format"):
        body["response_format"] = _plain_format(body["response_format"])
    for config in ("text", "output_config"):
        if isinstance(body.get(config), dict):
            body[config].pop("format", None)
    items = body.get("input")
    if isinstance(items, list):
        items = body["input"] = [item for item in items if item.get("type") != "compaction"] or "x"
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict):
            item.pop("encrypted_content", None)
            item.pop("tools", None)
    for message in body.get("messages") or []:
        if isinstance(message.get("content"), list):
            message["content"] = [part for part in message["content"] if part["type"] not in _FROM_ELSEWHERE] or "x"
        for name in message.keys() - _FIELDS_OF_MESSAGES:
            del message[name]
    if body.get("messages") and body["messages"][-1].get("role") == "assistant":
        body["messages"].append({"role": "user", "content": "x"})


def _plain_format(format: dict[str, Any]) -> dict[str, Any]:
    return {"type": "text" if format["type"] == "text" else "json_object"}


def take_out_of_query(query: dict[str, Any]) -> None:
    """`after` is to be an item's id, and `starting_after` comes with `stream`."""
    for name in ("after", "starting_after"):
        query.pop(name, None)
