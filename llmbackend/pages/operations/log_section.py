"""LogSection: the server's log with filters by level and text.

Used by page.py. Independent of where lines come from. Invariants: lines are shown as text, never as HTML; the browser
has at most MAX_LINES_SHOWN lines; `show` sends all new lines at once; filters apply to all retained lines.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from nicegui import ui

from .sections import card

MAX_LINES_KEPT: Final = 1000
MAX_LINES_SHOWN: Final = 300
_MAX_REPEATED: Final = 20
_LEVELS: Final = {"All": 0, "Info": 20, "Warnings": 30, "Errors": 40}
_NUMBER_OF: Final = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}


@dataclass(frozen=True, slots=True)
class LogLine:
    time: float
    """Unix seconds."""
    level: str
    text: str


class LogSection:
    def __init__(self) -> None:
        self._lines: deque[LogLine] = deque(maxlen=MAX_LINES_KEPT)
        self._new: deque[LogLine] = deque(maxlen=MAX_LINES_SHOWN)
        """Lines since the last `show`."""
        made, self._note = card("Server log")
        with made, ui.element("div") as self._body:
            with ui.element("div").classes("ops-filter"):
                self._level = ui.toggle(list(_LEVELS), value="All", on_change=self._show_again)
                self._level.props('no-caps dense unelevated aria-label="Level"').classes("ops-filter__level")
                self._text = ui.input("Text in the line", on_change=self._show_again)
                self._text.props('dense outlined clearable debounce=200 spellcheck="false"').classes("ops-filter__text")
            self._log = ui.log(max_lines=MAX_LINES_SHOWN).classes("ops-log")
            self._log.props('tabindex=0 role=log aria-label="Server log" aria-live=off')
            self._count = ui.label().classes("muted")

    def refuse(self, why: str) -> None:
        self.clear()
        self._note.text = why
        self._body.set_visibility(False)

    def allow(self) -> None:
        self._note.text = ""
        self._body.set_visibility(True)

    def clear(self) -> None:
        """For a feed that restarts with the lines that the server retains."""
        self._lines.clear()
        self._new.clear()
        self._log.clear()

    def add(self, line: LogLine) -> None:
        """Ignores duplicates: a line may arrive both as a retained line and as an event."""
        if line in itertools.islice(reversed(self._lines), _MAX_REPEATED):
            return
        self._lines.append(line)
        self._new.append(line)

    def show(self) -> None:
        """Sends new lines to the browser."""
        if self._new:
            new = list(self._new)
            self._new.clear()
            self._push(new)

    def _wants(self, line: LogLine) -> bool:
        wanted = str(self._text.value or "").casefold()
        return _NUMBER_OF.get(line.level, 20) >= _LEVELS[self._level.value] and wanted in line.text.casefold()

    def _show_again(self) -> None:
        self._new.clear()
        self._log.clear()
        self._push(self._lines)

    def _push(self, lines: Iterable[LogLine]) -> None:
        for line in [line for line in lines if self._wants(line)][-MAX_LINES_SHOWN:]:
            stamp = time.strftime("%H:%M:%S", time.localtime(line.time))
            self._log.push(f"{line.level[:1]} {stamp}  {line.text}", classes=f"ops-line ops-line--{line.level.lower()}")
        num_shown = min(sum(map(self._wants, self._lines)), MAX_LINES_SHOWN)
        self._count.text = f"{num_shown} of {len(self._lines)} lines"
