"""The input `messages`: a conversation as JSON, checked for size and fields.

Used by request conversion. Independent of tokens, tensors, and how a template renders the conversation
(chat_template.py). Invariant: every error is an INVALID_ARG that names the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llmbackend.core.backend_api import invalid_argument, shown, unsupported
from llmbackend.core.json_text import count_outside_strings

from ..limits import MAX_MESSAGES_BYTES, check_at_most

MAX_VALUES = 1 << 16
"""JSON values in the text. Parsing this many takes 10 to 30 ms with the GIL held."""
MAX_TEMPLATE_CHARS = 64 << 10
"""Limit for a request's own template."""
MAX_TEMPLATE_KWARGS_BYTES = 64 << 10
MAX_TEMPLATE_KWARGS_DEPTH = 32

SYSTEM_IS_ANYWHERE = "system_is_anywhere"
"""true = a later system message that the template refuses or drops is rendered as a user's."""
CONTENT_AS_PARTS = "content_as_parts"
"""true = the template gets a message's content as a list of parts. Not a field of requests."""
_FIELDS = (
    "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "documents",
    "reasoning_effort", SYSTEM_IS_ANYWHERE, "chat_template",
)  # fmt: skip
_END_TAG: Final = "END_OF_FINAL_MESSAGE "
"""Added to the text of a message that the model continues. It ends with a space so that trimming is noticed."""
_INPUT = "input 'messages'"
_JSON_NAMES: dict[type, str] = {list: "list", dict: "object"}


@dataclass(frozen=True, slots=True)
class PromptBounds:
    """Limits on a prompt."""

    below_tokens: int
    max_chars: int
    """All texts together."""
    max_messages: int
    """Messages and content parts."""
    why: str
    """The reason, appended to errors."""
    max_bytes: int = MAX_MESSAGES_BYTES
    """Limit for a conversation's JSON text."""
    trusts_templates: bool = False
    """Whether a request may contain its own template."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    messages: Sequence[Message]
    tools: list[Any] | None
    options: dict[str, Any]
    """Additional variables of the template."""
    template: str = ""
    """The request's own template; "" = the model's."""
    continues_final_message: bool = False
    """Whether the model continues the last message."""

    @property
    def for_template(self) -> Sequence[Message]:
        """The messages that the template renders, to be passed to `prompt_of`."""
        return _with_end_tag(self.messages) if self.continues_final_message else self.messages

    def prompt_of(self, rendered: str) -> str:
        """The prompt. rendered: `for_template` by the template. Raises TritonError INVALID_ARG."""
        return _up_to_end_tag(rendered, self.messages[-1]) if self.continues_final_message else rendered


def read_chat(text: bytes, bounds: PromptBounds, value: Any = None) -> ChatRequest:
    """Parses and checks the input. Raises TritonError INVALID_ARG.

    value: the parsed `text`, if available; it must not change
    The result may be too long for the context, but not by orders of magnitude: every message takes at least a token,
    and no token has more characters than the longest in the vocabulary.
    """
    chat = _parsed(text, bounds, value)
    for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
        if not isinstance(chat.get(name), kind | None):
            raise invalid_argument(f"'{name}' of {_INPUT} must be a JSON {_JSON_NAMES[kind]}, got {shown(chat[name])}")
    kwargs = chat.get("chat_template_kwargs") or {}
    _check_kwargs(kwargs)
    _check_messages(chat["messages"], bounds)
    for name in ("tools", "documents"):
        if chat.get(name):
            num_chars = len(json.dumps(chat[name], ensure_ascii=False))
            check_at_most(f"'{name}' of {_INPUT}", num_chars, bounds.max_chars, "characters of JSON", param=name)
    own = ("add_generation_prompt", "documents", "reasoning_effort", SYSTEM_IS_ANYWHERE)
    options = kwargs | {name: chat[name] for name in own if name in chat}
    continues = _continues(chat)
    if continues:
        options["add_generation_prompt"] = False
    return ChatRequest(chat["messages"], chat.get("tools"), options, _own_template(chat, bounds), continues)


def _continues(chat: dict[str, Any]) -> bool:
    continues = chat.get("continue_final_message") or False
    if not isinstance(continues, bool):
        raise invalid_argument(f"'continue_final_message' is {shown(continues)}, expected true or false",
                               param="continue_final_message")  # fmt: skip
    if continues and chat.get("add_generation_prompt"):
        raise invalid_argument(
            "'continue_final_message' and 'add_generation_prompt' are both true, expected one: the model either "
            "continues the last message or begins a new one",
            param="continue_final_message",
        )
    return continues


def _own_template(chat: dict[str, Any], bounds: PromptBounds) -> str:
    template = chat.get("chat_template") or ""
    if not isinstance(template, str):
        raise invalid_argument(f"'chat_template' is {shown(template)}, expected a string", param="chat_template")
    if template and not bounds.trusts_templates:
        raise invalid_argument(
            "'chat_template' was given, but templates in requests are not trusted; to trust them, start with "
            "--trust-request-chat-template",
            param="chat_template",
        )
    check_at_most("'chat_template'", len(template), MAX_TEMPLATE_CHARS, "characters", param="chat_template")
    return template


def _with_end_tag(messages: Sequence[Message]) -> list[Message]:
    *others, last = messages
    return [*others, {**last, "content": _tagged(last.get("content"))} if isinstance(last, dict) else last]


def _tagged(content: Any) -> Any:
    """Returns malformed content, which is refused later, unchanged."""
    match content:
        case str():
            return content + _END_TAG
        case [*parts, str() | dict() as last]:
            return [*parts, _tagged(last)]
        case {"text": str(text)}:
            return {**content, "text": text + _END_TAG}
    return content


def _up_to_end_tag(rendered: str, message: Message) -> str:
    """The prompt up to the end of the last message's text, even if the template trims trailing spaces from it. Source:
    transformers' apply_chat_template."""
    found = rendered.rfind(_END_TAG.strip()) if _content_text(-1, message.get("content")).strip() else -1
    if found < 0:
        raise invalid_argument(
            "'continue_final_message' is true, but the last message has no text, or the chat template leaves its text "
            "out",
            param="continue_final_message",
        )
    return rendered[:found] if rendered.startswith(_END_TAG, found) else rendered[:found].rstrip()


def _parsed(text: bytes, bounds: PromptBounds, value: Any) -> dict[str, Any]:
    """The object with `messages` and other fields; the input may also be a bare list of messages."""
    check_at_most(_INPUT, len(text), bounds.max_bytes, "bytes")
    if text.count(b"{") + text.count(b"[") + text.count(b",") > MAX_VALUES:
        check_at_most(_INPUT, count_outside_strings(text, b"{[,"), MAX_VALUES, "JSON values")
    try:
        value = json.loads(text.decode()) if value is None else value
    except UnicodeDecodeError as error:
        raise invalid_argument(f"{_INPUT} is not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise invalid_argument(f"{_INPUT} is not JSON: {error}") from None
    chat = value if isinstance(value, dict) else {"messages": value}
    if not isinstance(chat.get("messages"), list) or not chat["messages"]:
        got = shown(chat.get("messages"))
        raise invalid_argument(f"{_INPUT} must be a non-empty JSON list of chat messages, got {got}")
    unknown = sorted(chat.keys() - set(_FIELDS))
    if unknown:
        raise invalid_argument(f"{_INPUT} has unknown fields {shown(unknown)}, expected {', '.join(_FIELDS)}")
    return chat


def _check_messages(messages: list[Any], bounds: PromptBounds) -> None:
    num_parts = num_chars = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [content]
        num_parts += len(parts)
        texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
        num_chars += sum(len(text) for text in texts if isinstance(text, str))
    for count, what in ((len(messages), "messages"), (num_parts, "content parts")):
        if count > bounds.max_messages:
            most = f"expected at most {bounds.max_messages}: {bounds.why}"
            raise invalid_argument(f"{_INPUT} has {count} {what}, {most}")
    if num_chars > bounds.max_chars:
        raise invalid_argument(
            f"the prompt has {num_chars} characters and more, expected at most {bounds.max_chars}: {bounds.why}"
        )


def _check_kwargs(kwargs: dict[str, Any]) -> None:
    what = f"'chat_template_kwargs' of {_INPUT}"
    check_at_most(what, len(json.dumps(kwargs)), MAX_TEMPLATE_KWARGS_BYTES, "bytes of JSON")
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


Message = dict[str, Any]


def normalise_messages(messages: Sequence[Message], as_parts: bool = False) -> list[Message]:
    """Copies in the form that templates expect: text as one string or as a list of parts, and tool-call arguments as
    objects. OpenAI's clients send lists of parts, null for no text, and arguments as JSON text; arguments that are not
    a JSON object are kept, because a model wrote them.

    Raises TritonError INVALID_ARG for a malformed message, UNSUPPORTED for a part that is not text.
    """
    return [_normalise(index, message, as_parts) for index, message in enumerate(messages)]


def _normalise(index: int, message: Message, as_parts: bool) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid_argument(f"'messages[{index}]' must be an object with a string 'role', got {shown(message)}")
    result = dict(message)
    content = message.get("content")
    result["content"] = _content_text(index, content)
    if as_parts:
        texts = [_part_text(index, part) for part in content] if isinstance(content, list) else [result["content"]]
        result["content"] = [{"type": "text", "text": text} for text in texts]
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise invalid_argument(f"'messages[{index}].tool_calls' is {shown(calls)}, expected a list of calls")
        result["tool_calls"] = [_normalise_call(index, call) for call in calls]
    return result


def _content_text(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_argument(f"'messages[{index}].content' must be a string or a list of parts, got {shown(content)}")
    return "\n".join(_part_text(index, part) for part in content)


def _part_text(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise unsupported(f"'messages[{index}].content' has a part of type {shown(kind)}; only 'text' is supported")
    if not isinstance(part.get("text"), str):
        raise invalid_argument(f"'messages[{index}].content' has a text part without 'text': {shown(part)}")
    return str(part["text"])


def _normalise_call(index: int, call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid_argument(
            f"'messages[{index}].tool_calls' must hold objects with a 'function' that has a 'name', got {shown(call)}"
        )
    return {**call, "function": {**function, "arguments": called_arguments(function.get("arguments"))}}


UNREADABLE: Final = "arguments"
"""The name of the only argument, whose value is a text that is not an object."""


def called_arguments(sent: object) -> object:
    """The arguments of a tool call, given as an object, as its JSON text, or as whatever text a model wrote instead."""
    if sent is None or sent == "":
        return CalledArguments({})
    if isinstance(sent, dict):
        return CalledArguments(sent)
    if not isinstance(sent, str):
        return sent
    try:
        arguments = json.loads(sent)
    except (ValueError, RecursionError):
        arguments = None
    return CalledArguments(arguments, sent) if isinstance(arguments, dict) else UnreadableArguments(sent)


class CalledArguments(dict[str, Any]):
    """An object that a template can also insert as its JSON text. Must not be modified."""

    __slots__ = ("_text",)

    def __init__(self, arguments: dict[str, Any], text: str | None = None) -> None:
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        if self._text is None:
            self._text = json.dumps(self, ensure_ascii=False)
        return self._text

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class UnreadableArguments(str):
    """A text that is not a JSON object, such as truncated arguments. To a template that iterates over items, it is an
    object with the text as its only member."""

    __slots__ = ()

    def items(self) -> list[tuple[str, str]]:
        return [(UNREADABLE, str(self))]

    def keys(self) -> list[str]:
        return [UNREADABLE]

    def values(self) -> list[str]:
        return [str(self)]

    def get(self, name: str, default: Any = None) -> Any:
        return str(self) if name == UNREADABLE else default

    def __iter__(self) -> Iterator[str]:
        return iter((UNREADABLE,))

    def __getitem__(self, name: Any) -> str:
        return str(self) if name == UNREADABLE else str(self)[name]
