"""The tables that Triton prints at the end of its start: repository agents, backends, models.

For: people, and the tools that read Triton's log. Does not know: where a log goes. Invariant: a table's lines are
Triton's (TablePrinter without its wrapping); names and reasons in it can not begin a line of their own.
Source: PrintBackendAndModelSummary in Triton's server.cc; golden transcript 57.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from .lifecycle.model_versions import ModelState

log = logging.getLogger(__name__)

NO_VERSION = "Not loaded: No model version was found"

States = Mapping[str, Mapping[int, tuple[ModelState, str]]]
"""State and reason of each version of each model."""


def log_tables(agents: Iterable[Sequence[str]], backends: Iterable[Sequence[str]], models: States) -> None:
    for text in (
        table(("Repository Agent", "Path"), agents),
        table(("Backend", "Path", "Config"), backends),
        table(("Model", "Version", "Status"), model_rows(models)),
    ):
        log.info("\n%s", text, extra={"is_table": True})  # its lines stay lines in a log that escapes line ends


def model_rows(models: States) -> Iterable[tuple[str, str, str]]:
    for name, versions in models.items():
        if not versions:
            yield name, "-", NO_VERSION
        for number, (state, reason) in versions.items():
            yield name, str(number), f"{state.value}: {reason}" if reason else state.value


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [[" ".join(cell.split()) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in (head, *cells)) for column in range(len(head))]
    rule = "".join(f"+{'-' * (width + 2)}" for width in widths) + "+"
    lines = [_line(row, widths) for row in (head, *cells)]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule, ""])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"| {cell:<{width}} " for cell, width in zip(row, widths, strict=True)) + "|"
