"""Reads a golden transcript: commands, and the exact text that each one answered.

For: run.py. Does not know: servers or what answers mean. Invariant: the answers, joined with the commands and notes,
are the file: no character of an answer is lost. Layout (lib.sh of the recording): `$ command`, its output, an empty
line; `python - <<'PY'` commands end with a line `PY`; a line `# note` stands directly before a command.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HEREDOC_START = "python - <<'PY'"
HEREDOC_END = "PY"


@dataclass(frozen=True)
class Command:
    """`script` is the Python text of a heredoc, None for a shell command; `line` is where it stands in the file."""

    text: str
    answer: str
    line: int
    script: str | None = None


@dataclass(frozen=True)
class Transcript:
    """`name` is the file's stem, e.g. `01_health`; `number` its first two digits."""

    name: str
    title: str
    commands: tuple[Command, ...]

    @property
    def number(self) -> str:
        return self.name.partition("_")[0]


def read_transcript(path: Path) -> Transcript:
    lines = path.read_text().splitlines(keepends=True)
    starts = [index for index, line in enumerate(lines) if line.startswith("$ ")]
    ends = [_without_note(lines, start) for start in starts[1:]] + [len(lines)]
    commands = tuple(_command(lines, start, end) for start, end in zip(starts, ends, strict=True))
    return Transcript(path.stem, lines[0].removeprefix("# ").strip(), commands)


def _without_note(lines: list[str], start: int) -> int:
    return start - 1 if lines[start - 1].startswith("# ") else start


def _command(lines: list[str], start: int, end: int) -> Command:
    text = lines[start].removeprefix("$ ").rstrip("\n")
    if text != HEREDOC_START:
        return Command(text, "".join(lines[start + 1 : end]), start + 1)
    close = lines.index(HEREDOC_END + "\n", start)
    return Command(text, "".join(lines[close + 1 : end]), start + 1, "".join(lines[start + 1 : close]))
