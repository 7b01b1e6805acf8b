"""System messages behind the start of a conversation, for chat templates that know them at its start only.

For: ChatTemplate. Does not know: templates. Invariant: no text is lost: what a template would refuse or leave out as a
system message is said in the same place as the user's, in one message with the user's that it stands beside, since such
templates want roles to alternate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

Message = dict[str, Any]


def later_texts(messages: Sequence[Message]) -> list[str]:
    """Of system messages that another message stands before."""
    return [text.strip() for _, text in _later(messages)]


def has_all(prompt: str, texts: Iterable[str]) -> bool:
    """Whether they are in the prompt in this order; in time that grows with the prompt alone."""
    at = 0
    for text in texts:
        found = prompt.find(text, at)
        if found < 0:
            return False
        at = found + len(text)
    return True


def said_as_user(messages: Sequence[Message]) -> list[Message]:
    """The conversation with those messages as the user's."""
    later = {index for index, _ in _later(messages)}
    said: list[Message] = []
    for is_user, group in groupby(enumerate(messages), lambda one: one[0] in later or one[1]["role"] == "user"):
        members = list(group)
        if not is_user or later.isdisjoint(index for index, _ in members):
            said.extend(message for _, message in members)
        else:
            said.append({"role": "user", "content": "\n".join(message["content"] for _, message in members)})
    return said


def _later(messages: Sequence[Message]) -> list[tuple[int, str]]:
    return [(index, one["content"]) for index, one in enumerate(messages) if index and one["role"] == "system"]
