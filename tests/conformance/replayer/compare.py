"""Compares one answer with its golden one.

For: run.py. Does not know: servers. Invariant: `rules` of an outcome are those without which the answers would differ.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from .by_design import NOT_COMPARED, Rule
from .normalise import normalise
from .transcript import Command


@dataclass(frozen=True)
class CommandOutcome:
    """`diff` is empty when the answers agree, but for the differences by design in `rules`."""

    command: Command
    rules: tuple[Rule, ...] = ()
    diff: str = ""


@dataclass(frozen=True)
class TranscriptOutcome:
    name: str
    commands: tuple[CommandOutcome, ...] = field(default=())

    @property
    def differs(self) -> bool:
        return any(outcome.diff for outcome in self.commands)

    @property
    def by_design(self) -> bool:
        return not self.differs and any(outcome.rules for outcome in self.commands)

    @property
    def matches(self) -> bool:
        return not self.differs and not self.by_design


def compare(transcript_number: str, command: Command, answer: str, rules: Sequence[Rule]) -> CommandOutcome:
    expected, got = normalise(command.answer), normalise(answer)
    if expected == got:
        return CommandOutcome(command)
    used = []
    for rule in rules:
        if rule.concerns(transcript_number, _full_text(command)):
            changed = rule.apply(expected)
            if changed.strip() != expected.strip():
                used.append(rule)
                expected = changed
    if expected.strip() in (got.strip(), NOT_COMPARED):
        return CommandOutcome(command, tuple(used))
    return CommandOutcome(command, (), _diff(expected, got))


def _full_text(command: Command) -> str:
    return command.text if command.script is None else command.script


def _diff(expected: str, got: str) -> str:
    lines = difflib.unified_diff(expected.splitlines(), got.splitlines(), "triton", "ours", lineterm="", n=1)
    return "\n".join(list(lines)[2:]) or "only the number of line ends at the end differs"
