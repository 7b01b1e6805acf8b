"""ResponsesRequest: what the body of a create-response request asks for, and the history that it goes on from.

For: the parser that makes one, the writers of responses, their store. Does not know: HTTP, the host. Invariant: a
request that exists is valid as far as it can be judged without the model; all that an answer says of its request is
decided here, so that an answer is a function of the request, its identity and the tokens.
Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...conversation.tools import NamedTool
from ..errors import JsonObject
from ..requests import GenerationRequest

ENCRYPTED_REASONING = "reasoning.encrypted_content"
OUTPUT_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class WantedHistory:
    """What a body refers to, to be fetched from the store."""

    previous_response_id: str | None = None
    conversation: str | None = None
    """Its id."""
    item_ids: tuple[str, ...] = ()
    """Of `item_reference` items."""

    @property
    def is_empty(self) -> bool:
        return not (self.previous_response_id or self.conversation or self.item_ids)


@dataclass(frozen=True, slots=True)
class History:
    """What the store has of it."""

    items: tuple[JsonObject, ...] = ()
    """Of the previous responses or the conversation, oldest first: inputs and outputs."""
    by_id: Mapping[str, JsonObject] = field(default_factory=dict)
    """The items that the body refers to."""
    size_bytes: int = 0
    """Of the JSON that all of it was read from."""


NO_HISTORY = History()


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """What a client asked for."""

    generation: GenerationRequest
    echo: JsonObject
    """The fields of the response object that the request decides: all of them."""
    input_items: tuple[JsonObject, ...]
    """What the body itself brought, in the form in which it is stored and listed, without ids where it has none."""
    tools: Mapping[str, NamedTool]
    """By the name that the model calls."""
    store: bool
    background: bool
    include: frozenset[str]
    previous_response_id: str | None
    conversation: str | None
    """Its id."""
    max_tool_calls: int | None

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names by which the model calls custom tools."""
        return frozenset(name for name, tool in self.tools.items() if tool.kind == "custom")

    @property
    def includes_encrypted_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in self.include
