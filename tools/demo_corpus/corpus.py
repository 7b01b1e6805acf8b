"""The mixture of skills, and how a sample becomes text with the parts to be learned marked.

Independent of tokenizers and weights. Invariant: the text of a chat is what the model's own chat template renders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from . import memory, order, schemas, talk, tasks, tool_use
from .dialogue import Dialogue, Drill, Sample
from .documents import document, drill
from .source import Source, side_of

TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")

SKILLS: dict[str, tuple[Callable[[Source], Sample], float]] = {
    "small_talk": (talk.small_talk, 4),
    "facts": (talk.facts, 16),
    "failures": (talk.failures, 5),
    "everyday": (talk.everyday, 6),
    "unknown": (talk.unknown, 13),
    "mixed": (talk.mixed, 2.5),
    "stories": (talk.stories, 0.5),
    "persona": (talk.persona, 3.5),
    "ordered": (talk.ordered, 2.5),
    "echo": (tasks.echo, 15),
    "count": (tasks.counting, 12),
    "lists": (tasks.lists, 5),
    "sort": (tasks.sorting, 12),
    "order": (order.order, 8),
    "orders": (order.orders, 3),
    "json": (tasks.json_objects, 8),
    "schemas": (schemas.schema_chat, 6),
    "arithmetic": (tasks.arithmetic, 8),
    "sums": (tasks.sums, 5),
    "neighbours": (tasks.neighbours, 7),
    "words": (tasks.words, 9),
    "mixed_tasks": (tasks.mixed_tasks, 2),
    "memory": (memory.memory, 6),
    "forgotten": (memory.forgotten, 1.5),
    "context": (memory.context, 3),
    "tools": (tool_use.tool_calls, 8),
    "short_tools": (tool_use.short_calls, 10),
    "parallel_tools": (tool_use.parallel_calls, 4),
    "documents": (document, 2),
    "drill": (drill, 9),
}

_MAKERS = [maker for maker, _ in SKILLS.values()]
WEIGHTS = {name: weight for name, (_, weight) in SKILLS.items()}
"""Of the skills in the mixture, in their order."""
_ANSWER = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", re.DOTALL)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment


_RENDER = _environment().from_string(TEMPLATE)


def draw(source: Source, weights: Mapping[str, float] = WEIGHTS) -> Sample:
    """A sample of the mixture, whose questions are on the source's side."""
    return draw_skill(source, source.choices(_MAKERS, list(weights.values()))[0])


def draw_skill(source: Source, maker: Callable[[Source], Sample]) -> Sample:
    """The next sample of one skill whose last question is on the source's side."""
    while True:
        sample = maker(source)
        if not isinstance(sample, Dialogue) or side_of(_last_question(sample)) == source.side:
            return sample


def _last_question(dialogue: Dialogue) -> str:
    """With what was told before it: two chats with the same last question are different."""
    return "\n".join(str(message["content"]) for message in dialogue.messages[:-1] if message["role"] != "assistant")


def render(dialogue: Dialogue) -> str:
    context: dict[str, Any] = {"messages": dialogue.messages, "tools": dialogue.tools or None}
    return _RENDER.render(**context)


def segments(sample: Sample) -> list[tuple[str, bool]]:
    """The sample's text in pieces; True marks those whose tokens the model learns to write."""
    if isinstance(sample, Drill):
        return [("<|endoftext|>" + sample.given, False), (sample.learned + "<|endoftext|>", True)]
    if not isinstance(sample, Dialogue):
        return [("<|endoftext|>", False), (sample.text + "<|endoftext|>", True)]
    pieces = _ANSWER.split(render(sample))
    return [
        (piece, index % 2 == 1)
        for index, piece in enumerate(pieces)
        if piece and (index % 2 or index < len(pieces) - 1)
    ]
