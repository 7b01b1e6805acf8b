"""The input `messages`: a conversation as JSON, read and bounded before a template or a tokenizer sees it.

For: request_conversion.py. Does not know: templates, tokenizers. Invariant: what comes out may still be too long for
the context, but not by orders of magnitude: every message is a token at least, and no token stands for more characters
than the longest of the vocabulary. The JSON text is bounded before it is parsed, because a parser holds the
interpreter's lock for the whole of it, and its cost is that of the objects it makes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmbackend.core.backend_api import invalid_argument, shown, unsupported
from llmbackend.core.json_text import count_outside_strings

from .chat_template import Message
from .request_bounds import check_count

MAX_MESSAGES_BYTES = 4 << 20
MAX_VALUES = 1 << 16
"""JSON values in the text: 10 to 30 ms of a parser."""
MAX_TEMPLATE_KWARGS_BYTES = 64 << 10
MAX_TEMPLATE_KWARGS_DEPTH = 32

_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "documents",
)
_INPUT = "input 'messages'"
_JSON_NAMES: dict[type, str] = {list: "list", dict: "object"}


@dataclass(frozen=True, slots=True)
class ChatBounds:
    """What fits: context_tokens counts messages, too; max_chars counts the characters of all texts together.
    max_bytes: of the JSON text."""

    context_tokens: int
    max_chars: int
    max_bytes: int = MAX_MESSAGES_BYTES


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """options: further variables of the template."""

    messages: Sequence[Message]
    tools: list[Any] | None
    options: dict[str, Any]


def read_chat(text: bytes, bounds: ChatBounds) -> ChatRequest:
    """Raises TritonError INVALID_ARG naming what is wrong, or too large and by how much."""
    chat = _parsed(text, bounds)
    for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
        if not isinstance(chat.get(name), kind | None):
            raise invalid_argument(f"'{name}' of {_INPUT} must be a JSON {_JSON_NAMES[kind]}")
    kwargs = chat.get("chat_template_kwargs") or {}
    _check_kwargs(kwargs)
    _check_messages(chat["messages"], bounds)
    for name in ("tools", "documents"):
        if chat.get(name):
            check_count(
                f"'{name}' of {_INPUT}",
                len(json.dumps(chat[name], ensure_ascii=False)),
                bounds.max_chars,
                "characters of JSON",
            )
    options = kwargs | {name: chat[name] for name in ("add_generation_prompt", "documents") if name in chat}
    return ChatRequest(chat["messages"], chat.get("tools"), options)


def _parsed(text: bytes, bounds: ChatBounds) -> dict[str, Any]:
    """The object with the list of messages; the input may also be the list alone."""
    check_count(_INPUT, len(text), bounds.max_bytes, "bytes")
    if text.count(b"{") + text.count(b"[") + text.count(b",") > MAX_VALUES:
        check_count(_INPUT, count_outside_strings(text, b"{[,"), MAX_VALUES, "JSON values")
    try:
        value: Any = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise invalid_argument(f"{_INPUT} is not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise invalid_argument(f"{_INPUT} is not JSON: {error}") from None
    chat = value if isinstance(value, dict) else {"messages": value}
    if not isinstance(chat.get("messages"), list) or not chat["messages"]:
        raise invalid_argument(f"{_INPUT} must be a non-empty JSON list of chat messages")
    unknown = sorted(chat.keys() - set(_FIELDS))
    if unknown:
        raise invalid_argument(f"{_INPUT} has unknown fields {shown(unknown)}, expected {', '.join(_FIELDS)}")
    if chat.get("continue_final_message"):
        raise unsupported(f"'continue_final_message' of {_INPUT} is not supported")
    return chat


def _check_messages(messages: list[Any], bounds: ChatBounds) -> None:
    context = f": the model's context is {bounds.context_tokens} tokens"
    if len(messages) > bounds.context_tokens:
        raise invalid_argument(
            f"{_INPUT} has {len(messages)} messages, expected at most {bounds.context_tokens}{context}"
        )
    num_parts = num_chars = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [content]
        num_parts += len(parts)
        texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
        num_chars += sum(len(text) for text in texts if isinstance(text, str))
    if num_parts > bounds.context_tokens:
        raise invalid_argument(
            f"{_INPUT} has {num_parts} content parts, expected at most {bounds.context_tokens}{context}"
        )
    if num_chars > bounds.max_chars:
        raise invalid_argument(
            f"the prompt has {num_chars} characters and more, expected at most {bounds.max_chars}{context}"
        )


def _check_kwargs(kwargs: dict[str, Any]) -> None:
    what = f"'chat_template_kwargs' of {_INPUT}"
    check_count(what, len(json.dumps(kwargs)), MAX_TEMPLATE_KWARGS_BYTES, "bytes of JSON")
    level: list[Any] = [kwargs]
    for _ in range(MAX_TEMPLATE_KWARGS_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise invalid_argument(f"{what} is nested deeper than {MAX_TEMPLATE_KWARGS_DEPTH} levels")
