"""A model's chat template, rendered as Hugging Face's tokenizers render it.

For: the `messages` input. Does not know: tokens, tensors. Invariant: rendering cannot reach outside its sandbox, and
every failure is the request's own (INVALID_ARG with the template's text). The environment follows transformers'
documented chat-template interface: sandboxed jinja2 with trimmed blocks, loop controls, `tojson` without HTML escaping,
`raise_exception`, `strftime_now`, and the special tokens as variables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmbackend.core.backend_api import invalid_argument, shown, unsupported

Message = dict[str, Any]


class _GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's text for training; here it only renders its
    body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. Thread safe: rendering keeps no state."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: `bos_token` … as the template's variables. Raises ValueError when the template does not
        compile."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. `options` are further template variables (`enable_thinking`, `documents` …);
        `add_generation_prompt` is true unless they say otherwise.

        Raises TritonError INVALID_ARG with the template's complaint.
        """
        variables: dict[str, Any] = {**self._special_tokens, "add_generation_prompt": True, "tools": tools or None}
        variables |= options or {}
        try:
            return self._template.render(messages=normalise_messages(messages), **variables)
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
            raise invalid_argument(f"the model's chat template refuses 'messages': {error}") from error


def normalise_messages(messages: Sequence[Message]) -> list[Message]:
    """Copies with text as one string and tool-call arguments as objects, which is what templates expect.

    OpenAI's clients send text as a list of parts, null for no text, and arguments as JSON text.
    Raises TritonError INVALID_ARG for a malformed message, UNSUPPORTED for a part that is not text.
    """
    return [_normalise(index, message) for index, message in enumerate(messages)]


def _normalise(index: int, message: Message) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid_argument(f"'messages[{index}]' must be an object with a string 'role'")
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
        raise invalid_argument(f"'messages[{index}].content' must be a string or a list of parts")
    return "\n".join(_part_text(index, part) for part in content)


def _part_text(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise unsupported(f"'messages[{index}].content' has a part of type {shown(kind)}; only 'text' is supported")
    if not isinstance(part.get("text"), str):
        raise invalid_argument(f"'messages[{index}].content' has a text part without 'text'")
    return str(part["text"])


def _normalise_call(index: int, call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid_argument(f"'messages[{index}].tool_calls' must hold objects with a 'function' that has a 'name'")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise invalid_argument(f"'messages[{index}].tool_calls' has 'arguments' that are not JSON") from None
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


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
