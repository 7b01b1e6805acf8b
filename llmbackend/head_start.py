"""The engine's imports begin before the host's own: the two take about as long, and run side by side.

For: `llmbackend serve`, before it imports anything large. Does not know: configurations, backends. Invariants: it only
looks for files, and starts at most one process; a guess that was wrong costs that process, which is ended once the
startup models are loaded, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from llmbackend.engine import nursery


def begin(model: str, repositories: Iterable[Path]) -> None:
    """For a checkpoint to be served, or repositories in which one lies."""
    if model or any(_holds_checkpoint(directory) for directory in repositories):
        nursery.start_ahead()


def end() -> None:
    nursery.end_ahead()


def _holds_checkpoint(repository: Path) -> bool:
    """Whether a version directory is a checkpoint, or its model.json names one."""
    if any(repository.glob("*/*/config.json")):
        return True
    return any('"mock"' not in path.read_text(errors="replace") for path in repository.glob("*/*/model.json"))
