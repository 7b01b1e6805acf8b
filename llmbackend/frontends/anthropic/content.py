"""Reads messages of content blocks, tools and tool choices as a conversation.

Independent of chat templates and of how a model writes calls. Invariants: an answer's blocks are accepted as an
assistant message, and yield the same prompt as the answer in a chat; a tool_result follows every tool_use; tools that
Anthropic's servers run, and those that its models know without a schema, are refused. A field without effect is refused
by name; with an `anthropic-beta` header it is ignored and logged, but blocks and tools that the model would not see are
still refused. Source: Anthropic's API reference.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from ..conversation.tools import (
    NAME_EXPECTED,
    NAME_PATTERN,
    ChosenTool,
    Mode,
    OfferedTool,
    ToolChoice,
    ToolUse,
    check_tool_count,
    tool_use,
)
from ..conversation.turns import Turn, Turns, called
from ..generation.sealed_reasoning import SealingKey
from ..http.errors import JsonObject, OpenAIError, as_json, missing, refuse
from ..openai.schema import TEXT_ONLY
from .schema import (
    NO_SERVER_TOOLS,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
)

log = logging.getLogger(__name__)
_MAX_LOGGED_FIELDS: Final = 16
_MAX_NAME_CHARS: Final = 64


class BetaFields:
    """Unknown and unsupported fields of one body."""

    def __init__(self, betas: str) -> None:
        """betas: the header `anthropic-beta`; "": none"""
        self._betas = betas.strip()
        self.passed_over: list[str] = []

    @property
    def are_named(self) -> bool:
        return bool(self._betas)

    def unserved(self, param: str, reason: str = "") -> None:
        """Raises OpenAIError for the field `param`, unless there are betas. reason: "": the field is unknown"""
        if not self._betas:
            if reason:
                message = f"'{param}' is not supported: {reason}"
                raise OpenAIError(message, param=param, code="unsupported_parameter")
            raise OpenAIError(f"unknown field '{param}'", param=param, code="unknown_parameter")
        if len(self.passed_over) < _MAX_LOGGED_FIELDS:
            self.passed_over.append(param[:_MAX_NAME_CHARS])

    def check_names(self, value: Mapping[str, Any], known: Collection[str], param: str) -> None:
        """Checks the field names of the object `param`; a null field counts as absent."""
        if value.keys() <= set(known):
            return
        for name in value:
            if name not in known and value[name] is not None:
                self.unserved(f"{param}.{name}" if param else name)

    def write_log(self) -> None:
        if self.passed_over:
            log.debug("fields under 'anthropic-beta: %s' that are ignored: %s", self._betas, self.passed_over)


def an_object(value: object, param: str) -> dict[str, Any]:
    if value is None:
        raise missing(param)
    if not isinstance(value, dict):
        raise refuse(param, "an object", value)
    return value


def a_list(value: object, param: str) -> list[Any]:
    if value is None:
        raise missing(param)
    if not isinstance(value, list):
        raise refuse(param, "a list", value)
    return value


def a_string(value: object, param: str, *, may_be_empty: bool = False) -> str:
    if value is None:
        raise missing(param)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise refuse(param, "a string" if may_be_empty else "a non-empty string", value)
    return value


def a_flag(value: object, param: str) -> bool:
    """False if the flag is absent."""
    if value is not None and not isinstance(value, bool):
        raise refuse(param, "true or false", value)
    return bool(value)


def check_cache_control(value: object, param: str, beta: BetaFields) -> None:
    """Checks a marker for caching a prefix of the prompt. It has no effect, since every prefix is cached here."""
    if value is None:
        return
    mark = an_object(value, param)
    if mark.get("type") != "ephemeral":
        raise refuse(f"{param}.type", '"ephemeral"', mark.get("type"))
    if mark.get("ttl") not in (None, "5m", "1h"):
        raise refuse(f"{param}.ttl", '"5m" or "1h"', mark["ttl"])
    beta.check_names(mark, ("type", "ttl"), param)


_BILLING_HEADER: Final = "x-anthropic-billing-header:"
"""Start of Claude Code's system prompt. The line changes with every request, so no prefix could be shared."""
_ERROR: Final = "Error: "
"""Prefix of a tool result that is an error: chat templates have no other way to mark one."""
_REFUSED_BLOCKS: Final = {
    "image": TEXT_ONLY,
    "document": TEXT_ONLY,
    "search_result": "send its text in a text block",
    "container_upload": "this server has no containers",
}
_ALLOWED: Final = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Allowed block types, by role."""
_BLOCKS: Final[dict[str, Any]] = {
    "text": TextBlock,
    "tool_result": ToolResultBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
}
_FIELDS: Final = {kind: block.__annotations__.keys() for kind, block in _BLOCKS.items()}
_NAME: Final = re.compile(NAME_PATTERN)
_MODES: Final[dict[str, Mode]] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[JsonObject]
    """The messages in the form that chat templates expect."""
    is_prefilled: bool
    """Whether the answer continues the last message, which is then an assistant's."""
    has_later_system: bool
    """Whether a system message follows another message."""


def read_conversation(system: object, messages: object, beta: BetaFields, key: SealingKey) -> Conversation:
    """key: opens signatures. Raises OpenAIError naming the first invalid block."""
    reader = _Reader(beta, key)
    if system is not None:
        reader.add_system(system, "system")
    items = a_list(messages, "messages")
    if not items:
        raise refuse("messages", "a non-empty list", items)
    for index, message in enumerate(items):
        reader.add_message(message, f"messages[{index}]")
    return reader.conversation()


class _Reader(Turns):
    def __init__(self, beta: BetaFields, key: SealingKey) -> None:
        super().__init__()
        self._beta = beta
        self._key = key
        self._open_calls: dict[str, str] = {}
        """Function names, by ids of calls without a result."""

    def conversation(self) -> Conversation:
        self._check_results()
        last = self.all[-1]
        is_prefilled = last.role == "assistant"
        if is_prefilled and (last.last_kind != "text" or not any(map(str.strip, last.texts))):
            message = (
                f"'{last.param}' is the final message and from the assistant, expected text for the answer to continue"
            )
            raise OpenAIError(message, param=last.param, code="invalid_value")
        return Conversation(self.messages(), is_prefilled, self.has_later_system)

    def add_system(self, content: object, param: str) -> None:
        blocks = self._blocks(content, param, "system")
        texts = [text for block, at in blocks if not (text := _text(block, at)).startswith(_BILLING_HEADER)]
        if texts:  # consecutive system messages are joined: many templates read only one
            self._turn("system", param).texts.extend(texts)

    def add_message(self, value: object, param: str) -> None:
        message = an_object(value, param)
        self._beta.check_names(message, ("role", "content"), param)
        role = message.get("role")
        if role is None:
            raise missing(f"{param}.role")
        content, at = message.get("content"), f"{param}.content"
        if role == "system":
            self.add_system(content, at)
        elif role == "user":
            self._add_user(content, at)
        elif role == "assistant":
            self._add_assistant(content, at)
        else:
            raise refuse(f"{param}.role", '"user", "assistant" or "system"', role)

    def _add_user(self, content: object, param: str) -> None:
        if content == []:
            raise refuse(param, "a non-empty list", content)
        for block, at in self._blocks(content, param, "user"):
            if block["type"] == "tool_result":
                self.add(self._tool_result(block, at))
            else:
                self._turn("user", param).texts.append(_text(block, at))

    def _add_assistant(self, content: object, param: str) -> None:
        if not self.all or self.all[-1].role != "assistant":
            self._check_results()
        turn = self._turn("assistant", param)
        for block, at in self._blocks(content, param, "assistant"):
            turn.last_kind = block["type"]
            if block["type"] == "text":
                turn.texts.append(_text(block, at))
            elif block["type"] == "tool_use":
                turn.calls.append(self._tool_use(block, at))
            else:
                turn.reasoning.append(_thinking(block, at, self._key))

    def _turn(self, role: str, param: str) -> Turn:
        turn = self.of(role)
        turn.param = param.removesuffix(".content")
        return turn

    def _blocks(self, content: object, param: str, role: str) -> Iterator[tuple[JsonObject, str]]:
        """Each block with its path. A string counts as one text block."""
        if isinstance(content, str):
            yield {"type": "text", "text": content}, param
            return
        if content is not None and not isinstance(content, list):
            raise refuse(param, "a string or a list of content blocks", content)
        for index, value in enumerate(a_list(content, param)):
            at = f"{param}[{index}]"
            block = an_object(value, at)
            kind = block.get("type")
            if kind not in _ALLOWED[role]:
                raise _wrong_block(kind, f"{at}.type", role)
            self._check_fields(block, kind, at)
            yield block, at

    def _check_fields(self, block: JsonObject, kind: str, param: str) -> None:
        check_cache_control(block.get("cache_control"), f"{param}.cache_control", self._beta)
        if kind == "text" and block.get("citations") not in (None, []):
            self._beta.unserved(f"{param}.citations", "citations refer to documents, which this server does not read")
        if kind == "tool_use" and (block.get("caller") or {"type": "direct"}) != {"type": "direct"}:
            self._beta.unserved(f"{param}.caller", NO_SERVER_TOOLS)
        self._beta.check_names(block, _FIELDS[kind], param)

    def _tool_use(self, block: JsonObject, param: str) -> JsonObject:
        id, name = a_string(block.get("id"), f"{param}.id"), a_string(block.get("name"), f"{param}.name")
        if id in self._open_calls:
            raise refuse(f"{param}.id", "an id that is unique within the message", id)
        self._open_calls[id] = name
        arguments = orjson.dumps(an_object(block.get("input"), f"{param}.input")).decode()
        return called(id, name, arguments)

    def _tool_result(self, block: JsonObject, param: str) -> Turn:
        id = a_string(block.get("tool_use_id"), f"{param}.tool_use_id")
        name = self._open_calls.pop(id, None)
        if name is None:
            raise refuse(f"{param}.tool_use_id", "the id of a tool_use in the preceding assistant message", id)
        content = block.get("content")
        parts = [] if content is None else self._blocks(content, f"{param}.content", "system")
        text = "\n".join(_text(part, at) for part, at in parts)
        is_error = a_flag(block.get("is_error"), f"{param}.is_error")
        content_text = f"{_ERROR}{text}" if is_error else text
        return Turn("tool", [content_text], fields={"tool_call_id": id, "name": name}, param=param)

    def _check_results(self) -> None:
        if not self._open_calls:
            return
        turn = next(turn for turn in reversed(self.all) if turn.role == "assistant")
        ids = ", ".join(as_json(id) for id in list(self._open_calls)[:8])
        message = f"'{turn.param}' has tool_use blocks without a tool_result in the next message: {ids}"
        raise OpenAIError(message, param=turn.param, code="invalid_value")


def _text(block: JsonObject, param: str) -> str:
    return a_string(block.get("text"), f"{param}.text", may_be_empty=True)


def _thinking(block: JsonObject, param: str, key: SealingKey) -> str:
    """The reasoning of a block as the server sent it; the signature contains it."""
    field = "data" if block["type"] == "redacted_thinking" else "signature"
    sealed = a_string(block.get(field), f"{param}.{field}")
    try:
        text = key.unseal(sealed)
    except ValueError as error:
        raise OpenAIError(f"'{param}.{field}': {error}", param=f"{param}.{field}", code="invalid_value") from None
    if field == "signature" and a_string(block.get("thinking"), f"{param}.thinking", may_be_empty=True) not in (
        "",
        text,
    ):
        message = f"'{param}.thinking' does not match its 'signature'"
        raise OpenAIError(message, param=f"{param}.thinking", code="invalid_value")
    return text


def _wrong_block(kind: Any, param: str, role: str) -> OpenAIError:
    if kind is None:
        return missing(param)
    if not isinstance(kind, str):
        return refuse(param, "a string", kind)
    reason = _REFUSED_BLOCKS.get(kind) or (NO_SERVER_TOOLS if "tool" in kind and kind not in _FIELDS else "")
    expected = f"expected one of {', '.join(_ALLOWED[role])}"
    message = f"'{param}' is {as_json(kind)}, {expected}" + (f": {reason}" if reason else "")
    return OpenAIError(message, param=param, code="unsupported_parameter" if reason else "invalid_value")


def read_tools(tools: object, choice: object, beta: BetaFields) -> ToolUse | None:
    """None: no tool may be called. Raises OpenAIError."""
    items = [] if tools is None else a_list(tools, "tools")
    check_tool_count(items, "tools")
    offered = [_read_tool(tool, f"tools[{index}]", beta) for index, tool in enumerate(items)]
    chosen, max_calls = (None, None) if choice is None else _read_choice(choice, beta)
    return tool_use(offered, chosen, max_calls)


def _read_tool(value: object, param: str, beta: BetaFields) -> OfferedTool:
    tool = an_object(value, param)
    if (kind := tool.get("type")) not in (None, "custom"):
        message = f"'{param}.type' is {as_json(kind)}: this server has no tools of its own, and its models know none "
        message += "without a schema; expected a tool with 'name' and 'input_schema'"
        raise OpenAIError(message, param=f"{param}.type", code="unsupported_parameter")
    name = a_string(tool.get("name"), f"{param}.name")
    if not _NAME.fullmatch(name):
        raise refuse(f"{param}.name", NAME_EXPECTED, name)
    schema = an_object(tool.get("input_schema"), f"{param}.input_schema")
    if (description := tool.get("description")) is not None:
        description = a_string(description, f"{param}.description", may_be_empty=True)
    _check_rest(tool, param, beta)
    is_strict = a_flag(tool.get("strict"), f"{param}.strict")
    return OfferedTool.of(name, description, schema, is_strict, f"{param}.input_schema", f"{param}.name")


def _check_rest(tool: JsonObject, param: str, beta: BetaFields) -> None:
    """Refuses values of unsupported fields that would have an effect."""
    check_cache_control(tool.get("cache_control"), f"{param}.cache_control", beta)
    if tool.get("eager_input_streaming") not in (None, True):
        beta.unserved(f"{param}.eager_input_streaming", "the input of a call is always streamed")
    if tool.get("defer_loading") not in (None, False):
        beta.unserved(f"{param}.defer_loading", "this server has no tool search: every tool is in the prompt")
    callers = tool.get("allowed_callers")
    if callers is not None and (not isinstance(callers, list) or "direct" not in callers):
        beta.unserved(f"{param}.allowed_callers", "only the model calls tools")
    if tool.get("input_examples"):
        beta.unserved(f"{param}.input_examples", "chat templates have no examples; put them into 'description'")
    beta.check_names(tool, Tool.__annotations__, param)


def _read_choice(value: object, beta: BetaFields) -> tuple[ToolChoice, int | None]:
    """Also returns the maximum number of calls in the answer; None: no maximum."""
    choice = an_object(value, "tool_choice")
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in _MODES:
        raise refuse("tool_choice.type", 'one of "auto", "any", "tool", "none"', kind)
    fields = ("type", "name", "disable_parallel_tool_use") if kind == "tool" else ("type", "disable_parallel_tool_use")
    beta.check_names(choice, fields, "tool_choice")
    is_single = a_flag(choice.get("disable_parallel_tool_use"), "tool_choice.disable_parallel_tool_use")
    named: tuple[ChosenTool, ...] | None = None
    if kind == "tool":
        name = a_string(choice.get("name"), "tool_choice.name")
        named = (ChosenTool(name, "tool_choice", "a function of 'tools'"),)
    return ToolChoice(_MODES[kind], named, is_named=named is not None), 1 if is_single else None
