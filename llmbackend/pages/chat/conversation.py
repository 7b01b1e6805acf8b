"""What a chat consists of: its turns and the settings that its requests are made with.

For: the chat page. Does not know: what is shown, HTTP. Invariant: turns are frozen, and a chat that was read out of a
browser's storage, where anyone may have changed it, has the declared types, or reading it raises ValueError.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, Final, Literal

import msgspec

TITLE_CHARACTERS: Final = 60
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
"""Fields of a request that are sent as they are, where they are set."""
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
    """The likeliest tokens at this place, with their logprobs."""


class Timing(msgspec.Struct, frozen=True):
    """How long an answer took, as seen by the page process."""

    first_token_ms: float
    tokens_per_s: float
    """After the first token; 0: not measured, the answer was too short."""
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int = 0
    """Of the prompt."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "tool"]
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Of a tool's result: the call that it answers."""
    finish_reason: str = ""
    error: str = ""
    """The API's text, of an answer that failed."""
    timing: Timing | None = None
    recovery_ms: float | None = None
    """How long the answer paused because its engine had died; None: it had not."""
    probabilities: tuple[TokenProbability, ...] = ()


class ChatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """None and "" leave a field to the server's default."""

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
    """JSON: a list as in OpenAI's `tools`."""
    with_probabilities: bool = False


class Chat(msgspec.Struct, kw_only=True):
    id: str
    title: str = ""
    settings: ChatSettings = ChatSettings()
    turns: list[Turn] = []

    @classmethod
    def new(cls, settings: ChatSettings) -> Chat:
        return cls(id=secrets.token_hex(8), settings=settings)

    @classmethod
    def of_json(cls, text: str) -> Chat:
        """Raises ValueError."""
        return msgspec.json.decode(text, type=cls)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @property
    def shown_title(self) -> str:
        return self.title or "New chat"

    def add_user(self, text: str) -> None:
        self.turns.append(Turn(role="user", content=text))
        self.title = self.title or " ".join(text.split())[:TITLE_CHARACTERS]

    def open_calls(self) -> tuple[ToolCall, ...]:
        """The calls of the last answer, if they wait for their results."""
        return self.turns[-1].tool_calls if self.turns and self.turns[-1].role == "assistant" else ()

    def request(self) -> dict[str, Any]:
        """The body of the chat completion that answers the last turn. Raises ValueError for tools that are none."""
        settings = self.settings
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": self._messages(),
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        body |= {name: value for name in _SAMPLING if (value := getattr(settings, name)) is not None}
        if stop := [line for line in settings.stop.split("\n") if line]:
            body["stop"] = stop
        if settings.tools.strip():
            body["tools"] = tools_of(settings.tools)
        if settings.with_probabilities:
            body |= {"logprobs": True, "top_logprobs": _TOP_LOGPROBS}
        return body

    def _messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.settings.system}] if self.settings.system else []
        return system + [_message(turn) for turn in self.turns if not turn.error or turn.content]


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


def tools_of(text: str) -> list[Any]:
    """Raises ValueError, with a text for the viewer."""
    try:
        tools = json.loads(text)
    except ValueError as error:
        raise ValueError(f"tools is not JSON: {error}") from None
    if not isinstance(tools, list):
        raise ValueError(f"tools is a {type(tools).__name__}, expected a list as in OpenAI's API")
    return tools
