"""Chat: the turns of a chat and the settings of its requests.

Used by the chat page. Independent of HTTP and of what is shown. Invariants: turns are frozen; a chat read from a
browser's storage, which anyone may have changed, has the declared types, or reading it raises ValueError.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import (
    Any,
    Final,
    Literal,
    Self,  # in typing only from Python 3.11 on
)

import msgspec

TITLE_CHARACTERS: Final = 60
_MAX_VERSIONS: Final = 10
"""Maximum number of versions of one turn, each with the turns after it; the oldest are dropped."""
_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "seed",
    "presence_penalty",
    "frequency_penalty",
)
"""Settings that are copied into requests if they are set."""
_TOP_LOGPROBS: Final = 5


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class TokenProbability(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()
    """The most likely tokens at this position, with their logprobs."""


class Timing(msgspec.Struct, frozen=True):
    """Durations of an answer, measured by the page process."""

    first_token_ms: float
    tokens_per_s: float
    """The rate after the first token; 0: the answer was too short to measure it."""
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int = 0
    """Tokens of the prompt that were cached."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "tool"]
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """The call that a tool's result answers."""
    finish_reason: str = ""
    error: str = ""
    """The API's error text for a failed answer."""
    timing: Timing | None = None
    recovery_ms: float | None = None
    """How long the answer paused after its engine died; None: the engine did not die."""
    probabilities: tuple[TokenProbability, ...] = ()
    others: tuple[tuple[Turn, ...], ...] = ()
    """The other versions of this turn, each with the turns after it, oldest first."""
    place: int = 0
    """Index of this version among all versions."""

    @property
    def is_empty(self) -> bool:
        """Whether this is an answer without content."""
        return self.role == "assistant" and not (self.content or self.reasoning or self.tool_calls)

    @property
    def can_be_continued(self) -> bool:
        """Whether this is an answer that stopped before the model finished it."""
        ended_early = self.error or self.finish_reason in ("length", STOPPED, INTERRUPTED)
        return bool(self.role == "assistant" and self.content and not self.tool_calls and ended_early)


STOPPED: Final = "stopped by you"
INTERRUPTED: Final = "interrupted"
"""Finish reasons of answers that the model did not finish."""


class _Stored:
    """Stored in the browser, as JSON."""

    __slots__ = ()

    @classmethod
    def of_json(cls, text: str) -> Self:
        """Raises ValueError."""
        return msgspec.json.decode(text, type=cls)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


class UnfinishedAnswer(_Stored, msgspec.Struct, frozen=True, kw_only=True):
    """An answer that is being generated, as stored in the browser, so that a reloaded page can continue it."""

    key: str
    """Idempotency key of the request; a second request with it gets the first one's answer."""
    index: int
    """Index of the answer among the turns."""
    base: Turn
    """The answer before this request: the text to continue, other versions."""
    turn: Turn
    """The answer so far."""
    stream_id: str = ""
    """Id of the resumable stream; "" = nothing has arrived."""

    @classmethod
    def new(cls, index: int, base: Turn) -> UnfinishedAnswer:
        return cls(key=secrets.token_hex(16), index=index, base=base, turn=base)


class ChatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """None and "" mean the server's default."""

    model: str = ""
    system: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str = ""
    """One stop string per line."""
    tools: str = ""
    """JSON: a list as OpenAI's `tools`."""
    schema: str = ""
    """JSON: the schema of answers."""
    with_probabilities: bool = False


class Chat(_Stored, msgspec.Struct, kw_only=True):
    id: str
    title: str = ""
    settings: ChatSettings = ChatSettings()
    turns: list[Turn] = []

    @classmethod
    def new(cls, settings: ChatSettings) -> Chat:
        return cls(id=secrets.token_hex(8), settings=settings)

    @property
    def shown_title(self) -> str:
        return self.title or "New chat"

    def add_user(self, text: str, version: Turn | None = None) -> None:
        """version: the result of `cut`, if the new turn replaces another one"""
        version = version or Turn(role="user")
        self.turns.append(msgspec.structs.replace(version, content=text))
        self.title = self.title or " ".join(text.split())[:TITLE_CHARACTERS]

    def cut(self, index: int) -> Turn:
        """Removes the turns from `index` on. Returns an empty turn to replace them, with them as another version."""
        tail = self.turns[index:]
        del self.turns[index:]
        others = (tail[0].others if tail[0].is_empty else _versions(tail))[-_MAX_VERSIONS:]
        return Turn(role=tail[0].role, others=others, place=len(others))

    def show_version(self, index: int, place: int) -> None:
        """Replaces the turn at `index` and the turns after it by another version."""
        versions = list(_versions(self.turns[index:]))
        first, *following = versions.pop(place)
        self.turns[index:] = [msgspec.structs.replace(first, others=tuple(versions), place=place), *following]

    def open_calls(self) -> tuple[ToolCall, ...]:
        """The calls in the last answer that have no result yet."""
        return self.turns[-1].tool_calls if self.turns and self.turns[-1].role == "assistant" else ()

    def request(self, begun: Turn) -> dict[str, Any]:
        """The body of the chat completion that answers the last turn. begun: the answer so far, to be continued. Raises
        ValueError for invalid tools or an invalid schema."""
        settings = self.settings
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": self._messages(),
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if begun.content:
            body["messages"].append(_message(begun))
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        body |= {name: value for name in _SAMPLING if (value := getattr(settings, name)) is not None}
        if stop := [line for line in settings.stop.split("\n") if line]:
            body["stop"] = stop
        if settings.tools.strip():
            body["tools"] = json_setting("tools", settings.tools)
        if settings.schema.strip():
            schema = {"name": "answer", "schema": json_setting("schema", settings.schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if settings.with_probabilities:
            body |= {"logprobs": True, "top_logprobs": _TOP_LOGPROBS}
        return body

    def _messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.settings.system}] if self.settings.system else []
        return system + [_message(turn) for turn in self.turns if not turn.is_empty]


def _message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
    return message


def _versions(tail: Sequence[Turn]) -> tuple[tuple[Turn, ...], ...]:
    """All versions of the first turn of `tail`, each with the turns after it."""
    first, *following = tail
    own = (msgspec.structs.replace(first, others=(), place=0), *following)
    return (*first.others[: first.place], own, *first.others[first.place :])


JSON_SETTINGS: Final = {
    "tools": ("Tools", list, "a list as in OpenAI's API"),
    "schema": ("JSON schema", dict, "an object"),
}
"""Settings that are JSON: (name shown to the viewer, type, expectation)."""
_KINDS: Final = {
    dict: "object", list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"
}  # fmt: skip


def json_setting(setting: str, text: str) -> Any:
    """The value of one of JSON_SETTINGS. Raises ValueError with a text for the viewer."""
    name, kind, expected = JSON_SETTINGS[setting]
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a JSON {_KINDS[type(value)]}, expected {expected}")
    return value
