"""The differences we want, each pinned to the text we answer instead.

For: compare.py. Does not know: how answers come about. Invariant: a listed difference is an exact substitution in the
golden answer; what else changes there is still a difference. A rule that a full run never needs is stale, and
reported.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from llmbackend import __version__

NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class Rule:
    """`release`: the Triton release whose behaviour it is, "main", or "own".

    `golden` empty: `ours` replaces the whole answer, or NOT_COMPARED accepts any.

    `command` is a part of the command's text, which ends with a line break; empty for every command.
    """

    name: str
    reason: str
    release: str
    transcripts: tuple[str, ...]
    command: str
    golden: str
    ours: str

    def concerns(self, transcript_number: str, command_text: str) -> bool:
        return transcript_number in self.transcripts and self.command in f"{command_text}\n"

    def apply(self, answer: str) -> str:
        return answer.replace(self.golden, self.ours) if self.golden else self.ours


def read_rules(path: Path) -> list[Rule]:
    entries = tomllib.loads(path.read_text())["difference"]
    return [
        Rule(
            name=entry["name"],
            reason=entry["reason"],
            release=entry["release"],
            transcripts=tuple(entry["transcripts"]),
            command=change.get("command", ""),
            golden=change.get("golden", ""),
            ours=change["ours"].replace("@VERSION@", __version__),
        )
        for entry in entries
        for change in entry["change"]
    ]
