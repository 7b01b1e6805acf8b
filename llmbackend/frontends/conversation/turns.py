"""The turns of a conversation as messages for chat templates: identical for the same conversation over every API."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..http.errors import JsonObject


def called(id: str, name: str, arguments: str) -> JsonObject:
    """One of a message's `tool_calls`. arguments: JSON text"""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(slots=True)
class Turn:
    """Consecutive parts of one role."""

    role: str
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[JsonObject] = field(default_factory=list)
    fields: JsonObject = field(default_factory=dict)
    """Additional fields of a tool's message."""
    joint: str = "\n"
    """Separator of the texts; an assistant's texts are joined as the model wrote them."""
    param: str = ""
    """The request field of the last part."""
    last_kind: str = "text"
    """The kind of the last part."""

    def message(self) -> JsonObject:
        message: JsonObject = {"role": self.role}
        if reasoning := "".join(self.reasoning):
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        joint = "" if self.role == "assistant" else self.joint
        return message | self.fields | {"content": joint.join(self.texts)}


class Turns:
    """The turns of one conversation, oldest first."""

    def __init__(self) -> None:
        self.all: list[Turn] = []

    def add(self, turn: Turn) -> Turn:
        self.all.append(turn)
        return turn

    def of(self, role: str) -> Turn:
        """The last turn if it has this role, else a new one."""
        return self.all[-1] if self.all and self.all[-1].role == role else self.add(Turn(role))

    @property
    def has_later_system(self) -> bool:
        """Whether a system message follows another message."""
        return any(turn.role == "system" for turn in self.all[1:])

    def messages(self) -> list[JsonObject]:
        return [turn.message() for turn in self.all]
