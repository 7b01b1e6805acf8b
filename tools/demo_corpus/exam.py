"""The exam: 24 questions of each of twelve kinds, built from names, words, numbers, wordings and schemas that the
training text never contains (`source.py`), with rules that judge answers.

Independent of models. Invariant: all models get the same questions, none of which is in the training text
(tests/e2e/test_demo_corpus.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import memory, schemas, talk, tasks, tool_use
from .corpus import draw_skill
from .dialogue import Dialogue, Message
from .facts import ANSWERS
from .source import Source

QUESTIONS_OF_A_KIND = 24
_FIXED_ANSWERS = {answer for _, answer in ANSWERS}
"""Their questions are no frames, and the training text may hold them before the last question of a chat."""

KINDS: dict[str, tuple[Callable[[Source], Dialogue], ...]] = {
    "copying": (tasks.echo,),
    "arithmetic": (tasks.arithmetic,),
    "counting": (tasks.counting,),
    "lists and order": (tasks.lists, tasks.sorting),
    "words": (tasks.words, tasks.neighbours),
    "JSON": (tasks.json_objects,),
    "JSON by schema": (schemas.schema_chat,),
    "memory": (memory.memory, memory.context),
    "tool calls": (tool_use.tool_calls, tool_use.parallel_calls),
    "tool results": (tool_use.tool_calls,),
    "not known": (talk.unknown,),
    "this project": (talk.facts,),
}


@dataclass(frozen=True)
class Question:
    """kind      one of KINDS
    messages  the chat, up to the user's or a tool's message that is to be answered
    tools     that the chat offers
    expected  the message of a right answer
    """

    kind: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    expected: Message

    def is_right(self, answer: str) -> bool:
        """answer: the model's text, without the mark of its end."""
        if calls := self.expected.get("tool_calls"):
            return _calls(answer) == [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        expected = str(self.expected["content"])
        return _plain(answer) == _plain(expected) or _same_json(answer, expected)


def questions() -> list[Question]:
    return [question for kind, makers in KINDS.items() for question in _of_kind(kind, makers)]


def _of_kind(kind: str, makers: Sequence[Callable[[Source], Dialogue]]) -> list[Question]:
    source = Source(f"exam: {kind}", "exam")
    found: dict[str, Question] = {}
    while len(found) < QUESTIONS_OF_A_KIND:
        question = _question(kind, draw_skill(source, makers[len(found) % len(makers)]))
        if question is not None:
            found[json.dumps(question.messages)] = question
    return list(found.values())


def _question(kind: str, sample: object) -> Question | None:
    """None: the drawn chat does not end with what this kind asks for, or asks in a wording that has no side."""
    assert isinstance(sample, Dialogue)
    answers = [at for at, message in enumerate(sample.messages) if message["role"] == "assistant"]
    if kind == "tool calls":
        answers = [at for at in answers if sample.messages[at].get("tool_calls")]
    if kind == "tool results":
        answers = [at for at in answers if sample.messages[at - 1]["role"] == "tool"]
    if not answers:
        return None
    at = answers[-1]
    if sample.messages[at]["content"] in _FIXED_ANSWERS:
        return None
    return Question(kind, sample.messages[:at], sample.tools, sample.messages[at])


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip(" .")


def _same_json(answer: str, expected: str) -> bool:
    try:
        return bool(json.loads(answer) == json.loads(expected))
    except ValueError:
        return False


def _calls(answer: str) -> list[tuple[str, Any]] | None:
    """The tool calls in an answer that holds nothing else; None: something else."""
    if re.sub(r"<tool_call>.*?</tool_call>", "", answer, flags=re.DOTALL).strip():
        return None
    try:
        calls = [json.loads(text) for text in re.findall(r"<tool_call>(.*?)</tool_call>", answer, re.DOTALL)]
        return [(call["name"], call["arguments"]) for call in calls]
    except (ValueError, KeyError, TypeError):
        return None
