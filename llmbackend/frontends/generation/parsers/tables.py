"""The description of a format of tool calls or of reasoning: what the parser reads, and what a grammar enforces.

For: formats/, which makes both from one statement of the format; the parser; grammars of calls. Does not know: how
calls are read. Invariant: descriptions are frozen values; the name of a format is vLLM's name of the parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

ANY_NAME = re.compile(r"\s*(?P<name>[^\s\"'`<>(){}\[\]|]{1,256})\s*")
ANY_KEY = re.compile(r"\s*(?P<name>[^\s<>\"](?:[^<>\"\n]*[^\s<>\"])?)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCall:
    """A call as one JSON object: `{"name": "f", "arguments": {…}}`, its fields in any order.

    All families' models also write `parameters` for `arguments`, and some an id.
    """

    other_keys: tuple[str, ...] | None = None
    """Further fields that a call may have; None: any. Other objects are no calls, but content."""
    only_known_names: bool = False
    """Whether an object whose name is none of the request's functions is content (for calls without a marker)."""
    name_key: str = "name"
    """The field of the name; "": the object's first field is called as the function, and its value the arguments."""
    id_key: str = "id"

    @property
    def begin(self) -> str:
        return "{"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadedCall:
    """A call whose name stands before its arguments: `f[ARGS]{…}`."""

    begin: str = ""
    header_end: tuple[str, ...]
    """What the arguments follow; "{" is their own first character."""
    header: re.Pattern[str] = ANY_NAME
    """All of the text up to there, with the groups `name` and, if the model writes ids, `id`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCall:
    """A call whose parameters are tagged text: `<function=f><parameter=k>v</parameter></function>`.

    A value that is no text becomes JSON by the type that the function's schema gives the parameter.
    """

    begin: str = ""
    header_end: tuple[str, ...] = ()
    """What follows the name, besides `key_begin` and the call's end."""
    header: re.Pattern[str] = ANY_NAME
    key_begin: str
    key_end: str
    key: re.Pattern[str] = ANY_KEY
    """All of the text between `key_begin` and `key_end`, with the group `name`. Where the model says of each value
    whether it is text, a group `text` matches for those that are; else the function's schema says it."""
    value_begin: str = ""
    """Behind `key_end`, with white space before it."""
    value_end: str
    text_begin: str = ""
    """From here to `text_end` nothing in a value is a marker; neither of them is part of the value."""
    text_end: str = ""
    may_omit_value_end: bool = False
    """Whether a value also ends where the next key begins or the call ends."""
    json_begin: str = ""
    """Stands before a JSON object of all arguments, where the model writes one instead of tags; what stands after it
    is among the section's `call_end`."""
    end: tuple[str, ...] = ()
    """What ends the call, besides what ends its section."""
    trims_newline: bool = False
    """Whether a newline at each end of a value is layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralCall:
    """A call with its arguments as a language's literals: `f(k=1, l="text")` in Python; they become JSON."""

    begin: str = ""
    open: str = "("
    close: str = ")"
    assign: str = "="
    quotes: tuple[str, ...] = ('"', "'")
    """What stands around a string. Only in strings between single characters a backslash escapes."""
    has_bare_keys: bool = False
    """Whether the keys of mappings stand without quotes."""
    only_known_names: bool = False
    """Whether a call of none of the request's functions is content (for calls without a marker)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedCall:
    """A call whose parameters are tags of their own names, and so are the members of objects within them: `<a>v</a>`.

    The items of a list stand in tags `<item>`. Other values are as those of a TaggedCall.
    """

    begin: str
    header_end: tuple[str, ...]
    header: re.Pattern[str] = ANY_NAME
    mark: str
    """Stands before each tag, and in no value."""


CallSyntax = JsonCall | HeadedCall | TaggedCall | LiteralCall | NestedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedCalls:
    """Calls in sections after a marker, or at the output's beginning without one; other text is content.

    White space next to a call is layout.
    """

    begin: tuple[str, ...] = ()
    """Markers, each of which opens a section."""
    bare_begin: tuple[str, ...] = ()
    """Texts that open a section only as the first of the output (or after its reasoning), and belong to it."""
    calls: tuple[CallSyntax, ...]
    """The ways in which a call may be written; they begin differently."""
    list_begin: str = ""
    """Opens a list of calls, and `list_end` closes it. Optional in what the model writes."""
    list_end: str = "]"
    separators: tuple[str, ...] = (",",)
    """May stand between calls."""
    call_end: tuple[str, ...] = ()
    """Texts after a call that say nothing."""
    end: tuple[str, ...] = ()
    """What closes a section. Optional in what the model writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """A whole output of messages, each with a header that says what it is (OpenAI's harmony).

    `start`assistant`channel`NAME to=RECIPIENT`message`text`end`: the analysis channel is reasoning, a message to one of
    the functions a call, any other content. All markers are special tokens.
    """

    start: str
    channel: str
    message: str
    end: tuple[str, ...]
    reasoning_channel: str
    functions: str
    """What the recipient of a call begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """How a grammar writes calls: `begin` + call (+ `separator` + call)… + `end`.

    A call is `call_begin` + name + `name_end` + arguments + `call_end`. The arguments are a JSON object, or, where
    `key_end` is given, for each parameter `key_begin` + name + `key_end` + value + `value_end`: a plain string's value
    as its text, any other as JSON.
    """

    begin: str = ""
    call_begin: str
    name_end: str
    call_end: str
    separator: str = ""
    end: str = ""
    key_begin: str = ""
    key_end: str = ""
    json_key_end: str = ""
    """Stands for `key_end` before a value that is written as JSON; "" = the same."""
    value_end: str = ""
    name_closes: str = ""
    """Where not "": after `value_end`, the parameter's name once more, and this."""
    text_excludes: tuple[str, ...] = ()
    """What the text of a string may not hold, as it would end there."""
    text_quote: str | None = ""
    """What a plain string's text stands between; None: it is JSON like any other value."""

    @classmethod
    def of(cls, call: str, parameter: str = "", **other: Any) -> CallGrammar:
        """Of calls that are written like `call`, where the first `…` stands for the name and the second for the
        arguments. In `parameter`, the first stands for the name, the second for the value, and a third for the name
        once more. other: further fields."""
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
    """How a family of models writes tool calls."""

    name: str
    body: MarkedCalls | Messages
    grammar: CallGrammar
    trigger: str = ""
    """The text at which a grammar for voluntary calls sets in: a beginning of `grammar.begin + grammar.call_begin`.
    "": calls begin without a marker, so only required calls can be enforced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family of models writes its reasoning: `start` text `end`, before all content.

    Content may stand in markers too, `content_begin` text `content_end`, which say nothing.
    """

    name: str
    start: str
    end: str
    ended_by: tuple[str, ...] = ()
    """Markers of content or calls that end the reasoning too, where the model has left out `end`."""
    content_begin: tuple[str, ...] = ()
    """Read after the reasoning or calls, and at the output's beginning. Optional in what the model writes."""
    content_end: tuple[str, ...] = ()
    """Read anywhere in content."""
    messages: Messages | None = None
    """Set where reasoning is a kind of message, in outputs that consist of messages."""
