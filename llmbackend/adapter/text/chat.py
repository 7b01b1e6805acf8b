"""The input `messages`: a conversation as JSON, checked for size, and rendered by the model's chat template.

For: request conversion (`read_chat`) and tokenizers (`ChatTemplate`). Does not know: tokens, tensors. Invariants:
rendering cannot leave its sandbox; every failure is an INVALID_ARG of the request with the template's text.
Source: transformers' documented chat-template interface.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmbackend.core.backend_api import TritonError, invalid_argument, shown, unsupported
from llmbackend.core.json_text import count_outside_strings

from ..generation_bounds import check_at_most
from .called_arguments import CalledArguments
from .system_messages import has_all, later_texts, said_as_user

MAX_MESSAGES_BYTES = 4 << 20
MAX_VALUES = 1 << 16
"""JSON values in the text; parsing so many takes 10 to 30 ms, during which the parser holds the GIL."""
MAX_TEMPLATE_CHARS = 64 << 10
"""Of a request's own template."""
MAX_TEMPLATE_KWARGS_BYTES = 64 << 10
MAX_TEMPLATE_KWARGS_DEPTH = 32

_EFFORT_IS_HINT = "reasoning_effort_is_hint"
"""true: a template that can only answer in one way, without an effort or a switch, takes no notice of it."""
_SYSTEM_IS_ANYWHERE = "system_is_anywhere"
"""true: a system message behind the start that the template refuses or leaves out is said as the user's."""
_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    _EFFORT_IS_HINT,
    _SYSTEM_IS_ANYWHERE,
    "chat_template",
)
_INPUT = "input 'messages'"
_JSON_NAMES: dict[type, str] = {list: "list", dict: "object"}


@dataclass(frozen=True, slots=True)
class ChatBounds:
    """What a conversation must fit into."""

    max_messages: int
    """Also the largest number of content parts."""
    max_chars: int
    """Of all texts together."""
    why: str
    """Behind the text of an error about them."""
    max_bytes: int = MAX_MESSAGES_BYTES
    """Of the JSON text."""
    trusts_templates: bool = False
    """Whether a request may bring its own template."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    messages: Sequence[Message]
    tools: list[Any] | None
    options: dict[str, Any]
    """Further variables of the template."""
    template: str = ""
    """The request's own; "" = the model's."""
    continues_final_message: bool = False
    """Whether the prompt ends within the last message, which the model goes on with."""

    def prompt_of(self, rendered: str) -> str:
        """The prompt, from all messages as the template rendered them. Raises TritonError INVALID_ARG."""
        return _up_to_final_message(rendered, self.messages[-1]) if self.continues_final_message else rendered


def read_chat(text: bytes, bounds: ChatBounds) -> ChatRequest:
    """Parses and checks the input. Raises TritonError INVALID_ARG naming what is wrong, or too large and by how
    much.

    The result may be too long for the context, but not by orders of magnitude: every message is at least a token, and
    no token has more characters than the longest of the vocabulary.
    """
    chat = _parsed(text, bounds)
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
    own = ("add_generation_prompt", "documents", "reasoning_effort", _EFFORT_IS_HINT, _SYSTEM_IS_ANYWHERE)
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
            "'continue_final_message' and 'add_generation_prompt' are both true, expected one: the model goes on with "
            "the last message, or begins one",
            param="continue_final_message",
        )
    return continues


def _own_template(chat: dict[str, Any], bounds: ChatBounds) -> str:
    template = chat.get("chat_template") or ""
    if not isinstance(template, str):
        raise invalid_argument(f"'chat_template' is {shown(template)}, expected a string", param="chat_template")
    if template and not bounds.trusts_templates:
        raise invalid_argument(
            "'chat_template' was given, but templates of requests are not trusted here; to trust them, start with "
            "--trust-request-chat-template",
            param="chat_template",
        )
    check_at_most("'chat_template'", len(template), MAX_TEMPLATE_CHARS, "characters", param="chat_template")
    return template


def _up_to_final_message(rendered: str, message: Message) -> str:
    """Cuts what the template wrote behind the text of the last message. Where it trimmed that text, the prompt ends
    without the spaces. Source: transformers' apply_chat_template."""
    text = _content_text(-1, message.get("content"))
    bare = text.strip()
    found = rendered.rfind(bare) if bare else -1
    if found < 0:
        raise invalid_argument(
            "'continue_final_message' is true, but the text of the last message is empty, or not in what the chat "
            "template makes of it",
            param="continue_final_message",
        )
    whole = text.lstrip()
    return rendered[: found + len(whole if rendered.startswith(whole, found) else bare)]


def _parsed(text: bytes, bounds: ChatBounds) -> dict[str, Any]:
    """The object with `messages` and other fields; the input may also be just the list of messages."""
    check_at_most(_INPUT, len(text), bounds.max_bytes, "bytes")
    if text.count(b"{") + text.count(b"[") + text.count(b",") > MAX_VALUES:
        check_at_most(_INPUT, count_outside_strings(text, b"{[,"), MAX_VALUES, "JSON values")
    try:
        value: Any = json.loads(text.decode())
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


def _check_messages(messages: list[Any], bounds: ChatBounds) -> None:
    if len(messages) > bounds.max_messages:
        raise invalid_argument(
            f"{_INPUT} has {len(messages)} messages, expected at most {bounds.max_messages}: {bounds.why}"
        )
    num_parts = num_chars = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [content]
        num_parts += len(parts)
        texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
        num_chars += sum(len(text) for text in texts if isinstance(text, str))
    if num_parts > bounds.max_messages:
        raise invalid_argument(
            f"{_INPUT} has {num_parts} content parts, expected at most {bounds.max_messages}: {bounds.why}"
        )
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


class _GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. Thread safe: rendering keeps no state.

    As transformers: sandboxed jinja2 with trimmed blocks, loop controls, `tojson` without HTML escaping,
    `raise_exception`, `strftime_now`, and the special tokens as variables. What a template does not read is refused by
    name: tools, documents, a reasoning effort, further fields of messages.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: `bos_token` …, variables of the template. Raises ValueError when it does not compile."""
        self.source = source
        self.special_tokens = dict(special_tokens)
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self._variables = frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
        self._names = frozenset(_names(tree))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. options: further template variables (`enable_thinking`, `documents` …);
        `add_generation_prompt` is true by default.

        Raises TritonError INVALID_ARG with the template's error, or naming what the template does not read.
        """
        options = self._with_effort(options or {})
        for name, value in (("tools", tools), ("documents", options.get("documents"))):
            if value and name not in self._variables:
                raise _not_read(f"'{name}' of {_INPUT}", name)
        variables: dict[str, Any] = {**self.special_tokens, "add_generation_prompt": True, "tools": tools or None}
        is_anywhere = options.get(_SYSTEM_IS_ANYWHERE) is True
        variables |= {name: value for name, value in options.items() if name != _SYSTEM_IS_ANYWHERE}
        conversation = [self._as_read(index, one) for index, one in enumerate(normalise_messages(messages))]
        later = later_texts(conversation) if is_anywhere else []
        if later:
            with contextlib.suppress(TritonError):
                prompt = self._rendered(conversation, variables)
                if has_all(prompt, later):
                    return prompt
            conversation = said_as_user(conversation)
        return self._rendered(conversation, variables)

    def _rendered(self, conversation: Sequence[Message], variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(messages=conversation, **variables)
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
            raise invalid_argument(f"the model's chat template refuses 'messages': {error}") from error

    def _as_read(self, index: int, message: Message) -> Message:
        """The message with its reasoning under the names that the template reads. Raises for a field that it does not
        read."""
        for name in message.keys() - _MESSAGE_FIELDS:
            if name not in self._names:
                raise _not_read(f"'messages[{index}].{name}'", f"messages[{index}].{name}")
        reasoning = message.get("reasoning_content")
        if reasoning is None:
            return message
        return message | {name: reasoning for name in _REASONING_NAMES if name in self._names}

    def _with_effort(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """`options` with `reasoning_effort` as the template reads it: by its name, or as the switch of a template that
        can only think or not. Raises for one that reads neither, unless the effort is a hint."""
        is_hint = options.get(_EFFORT_IS_HINT) is True
        options = {name: value for name, value in options.items() if name != _EFFORT_IS_HINT}
        effort = options.get("reasoning_effort")
        if effort is None:
            return options
        switch = next((name for name in _THINKING_SWITCHES if name in self._variables), None)
        if "reasoning_effort" in self._variables:
            return {switch: False, **options} if effort == "none" and switch else options
        is_unmet = "think" in self.source if effort == "none" else not is_hint
        if switch is None and is_unmet:
            raise _not_read("'reasoning_effort'", "reasoning_effort")
        switched = {switch: effort != "none"} if switch else {}
        return switched | {name: value for name, value in options.items() if name != "reasoning_effort"}


@functools.lru_cache(maxsize=32)
def request_template(source: str, special_tokens: tuple[tuple[str, str], ...] = ()) -> ChatTemplate:
    """A request's own template. Raises TritonError INVALID_ARG when it does not compile."""
    try:
        return ChatTemplate(source, dict(special_tokens))
    except ValueError as error:
        raise invalid_argument(f"'chat_template': {error}", param="chat_template") from None


_MESSAGE_FIELDS = frozenset(("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"))
"""Of OpenAI and vLLM: a template need not read them."""
_REASONING_NAMES = ("reasoning", "thinking")
"""What templates call the reasoning of an earlier answer, besides `reasoning_content`."""
_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which a template lets the model reason or not."""


def _names(tree: nodes.Template) -> Iterator[str]:
    """All names of fields that a template may read: `message.x`, `message["x"]`, `"x" in message`."""
    yield from (node.attr for node in tree.find_all(nodes.Getattr))
    yield from (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


def _not_read(what: str, param: str) -> TritonError:
    return invalid_argument(f"{what} was given, but the model's chat template does not read it", param=param)


def normalise_messages(messages: Sequence[Message]) -> list[Message]:
    """Copies with text as one string and tool-call arguments as objects, as templates expect them.

    OpenAI's clients send text as a list of parts, null for no text, and arguments as JSON text.

    Raises TritonError INVALID_ARG for a malformed message, UNSUPPORTED for a part that is not text.
    """
    return [_normalise(index, message) for index, message in enumerate(messages)]


def _normalise(index: int, message: Message) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid_argument(f"'messages[{index}]' must be an object with a string 'role', got {shown(message)}")
    result = dict(message)
    result["content"] = _content_text(index, message.get("content"))
    if message.get("tool_calls"):
        result["tool_calls"] = [_normalise_call(index, call) for call in message["tool_calls"]]
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
    sent = function.get("arguments")
    arguments: Any = {} if sent is None else sent
    if isinstance(sent, str):
        try:
            arguments = json.loads(sent or "{}")
        except ValueError:
            raise invalid_argument(
                f"'messages[{index}].tool_calls' has 'arguments' that are not JSON: {shown(sent)}"
            ) from None
    if isinstance(arguments, dict):
        arguments = CalledArguments(arguments, sent if isinstance(sent, str) and sent else None)
    return {**call, "function": {**function, "arguments": arguments}}


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
