"""Chat templates, which render a conversation as a model's prompt text.

Used by tokenizers. Independent of tokens and of where a conversation comes from (chat.py). Invariants: rendering cannot
escape its sandbox; every failure is an INVALID_ARG of the request with the template's text.
Source: transformers' documented chat-template interface.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, groupby
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import do_items
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmbackend.core.backend_api import TritonError, invalid_argument

from .chat import CONTENT_AS_PARTS, SYSTEM_IS_ANYWHERE, Message, UnreadableArguments, normalise_messages


class _GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's text for training; here, its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. Thread-safe, because rendering keeps no state.

    As in transformers: sandboxed jinja2 with trimmed blocks, loop controls, `tojson` without HTML escaping,
    `raise_exception`, `strftime_now`, and the special tokens as variables. Tools, documents and other message fields
    that the template does not read are refused by name.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: `bos_token` …, variables of the template. Raises ValueError if it does not compile."""
        self.source = source
        self.special_tokens = dict(special_tokens)
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
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
        """The prompt text. options: additional template variables (`enable_thinking`, `documents` …);
        `add_generation_prompt` is true by default.

        Raises TritonError INVALID_ARG with the template's error, or naming what the template does not read.
        """
        options = self._with_effort(options or {})
        for name, value in (("tools", tools), ("documents", options.get("documents"))):
            if value and name not in self._variables:
                raise _not_read(f"'{name}' of input 'messages'", name)
        variables: dict[str, Any] = {**self.special_tokens, "add_generation_prompt": True, "tools": tools or None}
        is_anywhere, as_parts = options.get(SYSTEM_IS_ANYWHERE) is True, options.get(CONTENT_AS_PARTS) is True
        ours = (SYSTEM_IS_ANYWHERE, CONTENT_AS_PARTS)
        variables |= {name: value for name, value in options.items() if name not in ours}
        conversation = [self._as_read(index, one) for index, one in enumerate(normalise_messages(messages, as_parts))]
        later = later_system_texts(conversation) if is_anywhere and not as_parts else []
        if later:
            with contextlib.suppress(TritonError):
                prompt = self._rendered(conversation, variables)
                if contains_in_order(prompt, later):
                    return prompt
            conversation = with_system_as_user(conversation)
        return self._rendered(conversation, variables)

    def _rendered(self, conversation: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """A conversation that the template refuses is rendered with simpler messages, if it has any calls."""
        try:
            return self._template.render(messages=conversation, **variables)
        except _TEMPLATE_ERRORS as error:
            simpler = with_simple_calls(conversation)
            if simpler != conversation:
                with contextlib.suppress(*_TEMPLATE_ERRORS):
                    return self._template.render(messages=simpler, **variables)
            raise invalid_argument(f"the model's chat template refuses 'messages': {error}") from error

    def _as_read(self, index: int, message: Message) -> Message:
        """The message with its reasoning under the names that the template reads. Raises for other unread fields."""
        for name in message.keys() - _MESSAGE_FIELDS:
            if name not in self._names:
                raise _not_read(f"'messages[{index}].{name}'", f"messages[{index}].{name}")
        reasoning = message.get("reasoning_content")
        if reasoning is None:
            return message
        return message | {name: reasoning for name in _REASONING_NAMES if name in self._names}

    def _with_effort(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """`options` with `reasoning_effort` in the form that the template reads: by name, or as a switch for reasoning.
        If it reads neither, the effort is ignored (as in vLLM), unless it is "none" and the template would reason
        (raises)."""
        effort = options.get("reasoning_effort")
        if effort is None:
            return options
        switch = next((name for name in _THINKING_SWITCHES if name in self._variables), None)
        if "reasoning_effort" in self._variables:
            return {switch: False, **options} if effort == "none" and switch else options
        if switch is None and effort == "none" and "think" in self.source:
            raise _not_read("'reasoning_effort'", "reasoning_effort")
        switched = {switch: effort != "none"} if switch else {}
        return switched | {name: value for name, value in options.items() if name != "reasoning_effort"}


@functools.lru_cache(maxsize=32)
def request_template(source: str, special_tokens: tuple[tuple[str, str], ...] = ()) -> ChatTemplate:
    """A request's own template. Raises TritonError INVALID_ARG if it does not compile."""
    try:
        return ChatTemplate(source, dict(special_tokens))
    except ValueError as error:
        raise invalid_argument(f"'chat_template': {error}", param="chat_template") from None


_TEMPLATE_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip
"""What the expressions of a template can raise."""
_MESSAGE_FIELDS = frozenset(("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"))
"""Fields of OpenAI and vLLM that a template is free to ignore."""
_REASONING_NAMES = ("reasoning", "thinking")
"""Names that templates use for the reasoning of an earlier answer, in addition to `reasoning_content`."""
_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables that switch reasoning on and off."""


def _names(tree: nodes.Template) -> Iterator[str]:
    """Names of all fields that a template may read: `message.x`, `message["x"]`, `"x" in message`."""
    yield from (node.attr for node in tree.find_all(nodes.Getattr))
    yield from (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


def _not_read(what: str, param: str) -> TritonError:
    return invalid_argument(f"{what} was given, but the model's chat template does not use it", param=param)


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


def _items(value: Any) -> Any:
    return value.items() if isinstance(value, UnreadableArguments) else do_items(value)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.filters["items"] = _items
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def later_system_texts(messages: Sequence[Message]) -> list[str]:
    """The texts of system messages other than the first message."""
    return [text.strip() for _, text in _later(messages)]


def contains_in_order(prompt: str, texts: Iterable[str]) -> bool:
    """Whether the prompt contains them in this order. Takes time proportional to the prompt."""
    at = 0
    for text in texts:
        found = prompt.find(text, at)
        if found < 0:
            return False
        at = found + len(text)
    return True


def with_system_as_user(messages: Sequence[Message]) -> list[Message]:
    """The conversation with later system messages rewritten as user messages."""
    later = {index for index, _ in _later(messages)}
    said: list[Message] = []
    for is_user, group in groupby(enumerate(messages), lambda one: one[0] in later or one[1]["role"] == "user"):
        members = list(group)
        if not is_user or later.isdisjoint(index for index, _ in members):
            said.extend(message for _, message in members)
        else:
            said.append({"role": "user", "content": "\n".join(message["content"] for _, message in members)})
    return said


def with_simple_calls(messages: Sequence[Message]) -> list[Message]:
    """The conversation with one call in each message, followed by its result, and without content beside both reasoning
    and calls: it is at the end of the reasoning. Some templates can write no others, although their models do."""
    said: list[Message] = []
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls") or ()
        simpler = _without_content_beside_reasoning(message) if calls else message
        if len(calls) < 2:
            said.append(simpler)
            continue
        results: defaultdict[str, list[Message]] = defaultdict(list)
        while rest and rest[0]["role"] == "tool":
            results[str(rest[0].get("tool_call_id"))].append(rest.popleft())
        for call in calls:
            said += [{**simpler, "tool_calls": [call]}, *results.pop(str(call.get("id")), ())]
            simpler = {"role": message["role"], "content": ""}
        said.extend(chain.from_iterable(results.values()))
    return said


def _without_content_beside_reasoning(message: Message) -> Message:
    content, reasoning = message["content"], message.get("reasoning_content")
    if not reasoning or not content or not isinstance(content, str):
        return message
    names = [name for name in ("reasoning_content", *_REASONING_NAMES) if name in message]
    return message | dict.fromkeys(names, f"{reasoning}\n\n{content}") | {"content": ""}


def _later(messages: Sequence[Message]) -> list[tuple[int, str]]:
    return [(index, one["content"]) for index, one in enumerate(messages) if index and one["role"] == "system"]
