"""Descriptions of tool-call and reasoning formats, for the parser and for grammars, under vLLM's parser names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

ANY_NAME = re.compile(r"\s*(?P<name>[^\s\"'`<>(){}\[\]|]{1,256})\s*")
ANY_KEY = re.compile(r"\s*(?P<name>[^\s<>\"](?:[^<>\"\n]*[^\s<>\"])?)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCall:
    """A call as one JSON object: `{"name": "f", "arguments": {…}}`, fields in any order. `parameters`: alias of
    `arguments`."""

    other_keys: tuple[str, ...] | None = None
    """Other fields that a call may have; None: any. Objects with more fields are content."""
    only_known_names: bool = False
    """For calls without a marker: an object is content unless it names a function of the request."""
    name_key: str = "name"
    """The field with the name; "": the first field's key is the name, its value the arguments."""
    id_key: str = "id"

    @property
    def begin(self) -> str:
        return "{"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadedCall:
    """A call whose name precedes its arguments: `f[ARGS]{…}`."""

    begin: str = ""
    header_end: tuple[str, ...]
    """Texts between the name and the arguments; "{" is also the first character of the arguments."""
    header: re.Pattern[str] = ANY_NAME
    """The text up to there, with the groups `name` and, if the model writes ids, `id`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCall:
    """A call with tagged parameters: `<function=f><parameter=k>v</parameter></function>`. The function's schema says
    which values are strings; others are converted to JSON."""

    begin: str = ""
    header_end: tuple[str, ...] = ()
    """Texts that may follow the name, in addition to `key_begin` and the end of the call."""
    header: re.Pattern[str] = ANY_NAME
    key_begin: str
    key_end: str
    key: re.Pattern[str] = ANY_KEY
    """The text between `key_begin` and `key_end`, with the group `name`, and `text` if the model marks values as
    text."""
    value_begin: str = ""
    """Text after `key_end` and white space."""
    value_end: str
    text_begin: str = ""
    """Between this text and `text_end`, a value contains no markers. Neither text is part of the value."""
    text_end: str = ""
    may_omit_value_end: bool = False
    """A value also ends where the next key begins or the call ends."""
    json_begin: str = ""
    """Precedes a JSON object of all arguments, written instead of tags; what follows it is in `call_end`."""
    end: tuple[str, ...] = ()
    """Texts that end the call, in addition to the end of its section."""
    trims_newline: bool = False
    """Whether one newline at each end of a value is layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralCall:
    """A call with literals as arguments: `f(k=1, l="text")` in Python; they are converted to JSON."""

    begin: str = ""
    open: str = "("
    close: str = ")"
    assign: str = "="
    quotes: tuple[str, ...] = ('"', "'")
    """Quotes of strings. Backslashes escape only within quotes of one character."""
    only_known_names: bool = False
    """For calls without a marker: a call is content unless it names a function of the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedCall:
    """A call whose parameters, and the members of objects in them, are tags named after them: `<a>v</a>`; items of
    lists are `<item>` tags. Other values are as in a TaggedCall."""

    begin: str
    header_end: tuple[str, ...]
    header: re.Pattern[str] = ANY_NAME
    mark: str
    """Precedes each tag, and does not occur in values."""


CallSyntax = JsonCall | HeadedCall | TaggedCall | LiteralCall | NestedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedCalls:
    """Calls in sections after a marker, or at the output's beginning without one. Other text is content, except white
    space between calls."""

    begin: tuple[str, ...] = ()
    """Markers that open a section."""
    bare_begin: tuple[str, ...] = ()
    """Texts that open a section only at the beginning of the output or after its reasoning. A bracket also opens the
    first call or the list of calls."""
    calls: tuple[CallSyntax, ...]
    """Alternative syntaxes, which begin differently."""
    list_begin: str = ""
    """Opens a list of calls, which `list_end` closes. Optional."""
    list_end: str = "]"
    separators: tuple[str, ...] = (",",)
    """Optional between calls."""
    call_end: tuple[str, ...] = ()
    """Texts after a call that are ignored."""
    end: tuple[str, ...] = ()
    """Texts that close a section; optional."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """An output of messages with headers (OpenAI's harmony).

    `start`assistant`channel`NAME to=RECIPIENT`message`text`end`: a message in the reasoning channel is reasoning, a
    message to a function is a call, any other is content. All markers are special tokens.
    """

    start: str
    channel: str
    message: str
    end: tuple[str, ...]
    reasoning_channel: str
    content_channels: tuple[str, ...]
    """That of the answer first."""
    functions: str
    """Prefix of the recipient of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """How a grammar writes calls: `begin` + call (+ `separator` + call)… + `end`.

    A call is `call_begin` + name + `name_end` + arguments + `call_end`. The arguments are a JSON object or, with
    `key_end`, for each parameter `key_begin` + name + `key_end` + value + `value_end`: unrestricted strings as text,
    other values as JSON.
    """

    begin: str = ""
    call_begin: str
    name_end: str
    number: str = ""
    """A number in `name_end` that the model counts."""
    call_end: str
    separator: str = ""
    end: str = ""
    key_begin: str = ""
    key_end: str = ""
    json_key_end: str = ""
    """Replaces `key_end` before a JSON value; "": no replacement."""
    value_end: str = ""
    name_closes: str = ""
    """If not "", `value_end` is followed by the parameter's name and this."""
    text_excludes: tuple[str, ...] = ()
    """Texts that a string cannot contain, because they would end it."""
    text_quote: str | None = ""
    """Quotes around a string's text; None: it is written as JSON."""

    @classmethod
    def of(cls, call: str, parameter: str = "", **other: Any) -> CallGrammar:
        """call: an example with `…` for name and arguments. parameter: with `…` for name, value, and optionally name
        again"""
        call_begin, name_end, call_end = call.split("…")
        key_begin, key_end, value_end, *name_closes = parameter.split("…") if parameter else ("", "", "")
        return cls(
            call_begin=call_begin,
            name_end=name_end,
            call_end=call_end,
            key_begin=key_begin,
            key_end=key_end,
            value_end=value_end,
            name_closes="".join(name_closes),
            **other,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    name: str
    body: MarkedCalls | Messages
    grammar: CallGrammar
    only_required: bool = False
    """Whether a grammar can enforce only required calls, because ordinary text may begin like an optional one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Reasoning: `start` text `end`, before all content. A call ends it, too, if the model omits `end`. Content may
    have markers, which are ignored: `content_begin` text `content_end`."""

    name: str
    start: str
    end: str
    content_begin: tuple[str, ...] = ()
    """Accepted after reasoning or calls and at the output's beginning. Optional."""
    content_end: tuple[str, ...] = ()
    """Accepted anywhere in content."""
    messages: Messages | None = None
    """For outputs that consist of messages, one kind of which is reasoning."""
