"""From the tokens of an answer to the items of a response's output, and what happens to them on the way.

For: response_state.py. Does not know: JSON of events, the response around the output. Invariant: one item is open at a
time; items are a function of the request, the response's id and the tokens, and put together from the same happenings
that a stream tells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import orjson

from ...conversation.tools import INPUT, NamedTool
from ..answer_plan import AnswerPlan
from ..answers import AnswerReader
from ..logprobs import ChatLogprobs, LogprobForm
from ..parsers import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from ..responses import DEFAULT_FINISH_REASON
from ..tensors import Delta, TokenEntries
from .output_items import CALLS, MESSAGE, REASONING, ItemKind, OutputItem, item_id


@dataclass(frozen=True, slots=True)
class ItemAdded:
    item: OutputItem


class TextAdded(msgspec.Struct, frozen=True):
    item: OutputItem
    text: str
    logprobs: bytes
    """JSON: a list's items, b"" for none."""


@dataclass(frozen=True, slots=True)
class ItemDone:
    item: OutputItem


Happening = ItemAdded | TextAdded | ItemDone
LENGTH = "length"


class OutputBuilder:
    """The output of one response. Owner: its ResponseState."""

    def __init__(
        self,
        plan: AnswerPlan | None,
        response_id: str,
        *,
        tools: Mapping[str, NamedTool] | None = None,
        logprobs: LogprobForm | None = None,
        seal: Callable[[str], str] | None = None,
    ) -> None:
        """plan: how the answer is read; None: as text
        tools: those of the request, by the name that the model calls
        seal: makes the sealed form of reasoning; None: it is not asked for
        """
        self.items: list[OutputItem] = []
        self.finish_reason: str | None = None
        """Once the answer has ended."""
        self._response_id = response_id
        self._tools = tools or {}
        self._seal = seal
        self._reader = None if plan is None else AnswerReader(plan, response_id, 0)
        self._logprobs = None if logprobs is None else ChatLogprobs(logprobs)
        self._pending: list[TokenEntries] = []
        """Of tokens whose text has not been shown yet."""
        self._open: OutputItem | None = None
        self._input: CustomInput | None = None
        """Of the custom tool's call that is open."""
        self._happenings: list[Happening] = []

    @property
    def num_reasoning_tokens(self) -> int | None:
        """None: what is reasoning is not known."""
        return None if self._reader is None else self._reader.num_reasoning_tokens

    def add(self, delta: Delta) -> list[Happening]:
        """What the next tokens do to the output."""
        if self._reader is None:
            if delta.text or delta.logprobs:
                self._add_text(MESSAGE, delta.text, delta.logprobs)
        elif self._logprobs is None:
            for event in self._reader.read(delta):
                self._add_event(event, [])
        else:
            for token in by_token(delta):
                self._add_token(self._reader, token)
        if (delta.finish_reason or delta.is_final) and self.finish_reason is None:
            self._finish(delta.finish_reason or DEFAULT_FINISH_REASON)
        happenings, self._happenings = self._happenings, []
        return happenings

    def stop(self) -> None:
        """The output ends where it is: the request failed or was cancelled."""
        if self._open is not None:
            self._open.status = "incomplete"
            self._open = None

    def _add_token(self, reader: AnswerReader, token: Delta) -> None:
        """A token whose text is content gives its log probabilities to that, with those of the tokens before it whose
        text was held back until now. Tokens of reasoning, of calls and of markers give theirs to nothing."""
        before = reader.num_reasoning_tokens
        self._pending += token.logprobs
        events = reader.read(token)
        for event in events:
            is_content = isinstance(event, ContentDelta)
            self._add_event(event, self._pending if is_content else [])
            self._pending = []
        is_marker = any(is_special for _, _, is_special in token.text_tokens)
        if reader.num_reasoning_tokens > before or (is_marker and token.finish_reason is None):
            self._pending = []

    def _add_event(self, event: Event, positions: list[TokenEntries]) -> None:
        match event:
            case ContentDelta(text):
                self._add_text(MESSAGE, text, positions)
            case ReasoningDelta(text):
                self._add_text(REASONING, text, [])
            case ToolCallStart(_, name, id):
                tool = self._tools.get(name) or NamedTool("function", name)
                self._begin(CALLS[tool.kind], tool, id or "")
                self._input = CustomInput() if tool.kind == "custom" else None
            case ToolCallArguments(_, text):
                self._add_piece(text if self._input is None else self._input.push(text))
            case ToolCallEnd():
                self._end(is_complete=True)

    def _add_text(self, kind: ItemKind, text: str, positions: list[TokenEntries]) -> None:
        if self._open is None or self._open.kind is not kind:
            self._begin(kind)
        render = self._logprobs
        if render is None or not positions:
            self._add_piece(text)
        else:
            self._add_piece(text, orjson.dumps(render.render(positions)["content"])[1:-1])

    def _begin(self, kind: ItemKind, tool: NamedTool | None = None, call_id: str = "") -> None:
        self._end()
        index = len(self.items)
        item = OutputItem(kind, item_id(kind.type, self._response_id, "o", index), index, tool, call_id, self._seal)
        self._open = item
        self.items.append(item)
        self._happenings.append(ItemAdded(item))

    def _add_piece(self, text: str, logprobs: bytes = b"") -> None:
        item = self._open
        if item is not None and (text or logprobs):
            item.pieces.append(text)
            if logprobs:
                item.logprobs.append(logprobs)
            self._happenings.append(TextAdded(item, text, logprobs))

    def _end(self, *, is_complete: bool | None = None) -> None:
        """Ends the item that is open. is_complete: None: unless it is a call, which is complete where its end was
        seen."""
        if self._open is None:
            return
        if self._input is not None:
            self._add_piece(self._input.finish())
            self._input = None
        is_text = self._open.tool is None
        self._open.status = "completed" if (is_text if is_complete is None else is_complete) else "incomplete"
        self._happenings.append(ItemDone(self._open))
        self._open = None

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        if self._pending and self._open is not None and self._open.kind is MESSAGE:
            self._add_text(MESSAGE, "", self._pending)
        if not self.items:
            self._begin(MESSAGE)
        self._end(is_complete=False if reason == LENGTH else None)


def by_token(delta: Delta) -> Iterator[Delta]:
    """`delta`, which has text tokens, as one delta for each of them; the last one has what is said of all together."""
    last = len(delta.text_tokens) - 1
    if last < 1:
        yield delta
        return
    positions = iter(delta.logprobs)
    ids = iter(delta.token_ids)
    for index, token in enumerate(delta.text_tokens):
        is_token = token[0] >= 0
        own_positions = [entry for entry in [next(positions, None)] if entry is not None] if is_token else []
        own_ids = [one for one in [next(ids, None)] if one is not None] if is_token else []
        if index < last:
            yield Delta(token[1], None, own_positions, 0, 0, False, None, (token,), token_ids=own_ids)
        else:
            yield msgspec.structs.replace(
                delta,
                text=token[1],
                logprobs=[*own_positions, *positions],
                text_tokens=(token,),
                token_ids=[*own_ids, *ids],
            )


_OPENING = ("{", f'"{INPUT}"', ":", '"')
"""What stands before the string's characters; between these may be white space."""
_SPACE = " \t\r\n"
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_UNIT = re.compile(rf'[^"\\]+|{_PAIR}|\\u[0-9a-fA-F]{{4}}|\\[^u]|"', re.DOTALL)
_MAY_GO_ON = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD][c-fC-F]?[0-9a-fA-F]?)?)?)?)?"
)
"""An escape that is cut off, and the first half of a pair."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class CustomInput:
    """The input of one call of a custom tool, read from the JSON text of its arguments as it comes: models write such a
    call as the call of a function with one string parameter, and a client gets that string. The pieces put together do
    not depend on how the text was cut, and hold no half character. Arguments of another form, which a model may write
    that is not held to a grammar, are the input as they stand. Owner: the builder of its output."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        """As long as they may have another form."""
        self._token, self._matched_chars = 0, 0
        self._is_other_form = False
        self._held = ""
        self._is_closed = False

    def push(self, text: str) -> str:
        """The new characters of the input that the next piece of the arguments tells."""
        if self._token < len(_OPENING):
            self._arguments.append(text)
            text = self._open(text)
        return self._decoded(text) if text else ""

    def finish(self) -> str:
        """The rest, when the arguments have ended."""
        if self._token == len(_OPENING):
            return ""  # what is held back is half an escape
        return _of_other_form("".join(self._arguments))

    def _open(self, text: str) -> str:
        """Reads the opening; returns what stands behind it."""
        for index, char in enumerate(text):
            if self._is_other_form:
                return ""
            expected = _OPENING[self._token]
            if self._matched_chars == 0 and char in _SPACE:
                continue
            if char != expected[self._matched_chars]:
                self._is_other_form = True
                return ""
            self._matched_chars += 1
            if self._matched_chars == len(expected):
                self._token, self._matched_chars = self._token + 1, 0
            if self._token == len(_OPENING):
                self._arguments.clear()
                return text[index + 1 :]
        return ""

    def _decoded(self, text: str) -> str:
        if self._is_closed:
            return ""
        text, at, pieces = self._held + text, 0, []
        while at < len(text):
            if _MAY_GO_ON.fullmatch(text, at):
                break
            unit = _UNIT.match(text, at)
            if unit is None:  # \u without four digits: no JSON, shown as it stands
                pieces.append(text[at])
                at += 1
                continue
            at = unit.end()
            if unit[0] == '"':
                self._is_closed = True
                at = len(text)
            else:
                pieces.append(_unescaped(unit[0]))
        self._held = text[at:]
        return "".join(pieces)


def _unescaped(unit: str) -> str:
    if unit[0] != "\\":
        return unit
    if unit[1] != "u":
        return _ESCAPES.get(unit[1], unit[1])
    if len(unit) > 6:
        return chr(0x10000 + ((int(unit[2:6], 16) - 0xD800) << 10) + int(unit[8:], 16) - 0xDC00)
    char = chr(int(unit[2:], 16))
    return "\ufffd" if "\ud800" <= char <= "\udfff" else char


def _of_other_form(arguments: str) -> str:
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return "" if _is_begun(arguments) else arguments
    if value == {}:
        return ""
    found = value.get(INPUT) if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments


def _is_begun(arguments: str) -> bool:
    """Whether they were cut off before the first character of the input."""
    return "".join(_OPENING).startswith("".join(arguments.split()))
