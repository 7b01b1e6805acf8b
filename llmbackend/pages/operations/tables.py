"""Tables of the Operations page (cards on narrow screens), whose rows are shown as text, never as HTML."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Literal

from nicegui import ui

Kind = Literal["text", "number", "code", "state", "progress", "actions"]
Tone = Literal["ok", "busy", "bad", "quiet"]
OnAction = Callable[[str, str], Awaitable[None]]
"""Called with the row's id and the action's name."""
SIGNS: Final[dict[Tone, str]] = {"ok": "●", "busy": "◐", "bad": "✕", "quiet": "○"}


def column(name: str, label: str, kind: Kind = "text") -> dict[str, Any]:
    align = "right" if kind in ("number", "actions") else "left"
    return {"name": name, "label": label, "field": name, "align": align, "kind": kind}


def state(text: str, tone: Tone) -> dict[str, str]:
    """The value of a `state` cell."""
    return {"text": text, "tone": tone, "sign": SIGNS[tone]}


def progress(text: str, share: float | None = None, *, is_busy: bool = False) -> dict[str, Any]:
    """A progress cell. share: how much of the bar is filled; None = no bar, or a moving one if `is_busy`"""
    return {"text": text, "share": share, "busy": is_busy}


def action(name: str, label: str, subject: str, *, is_disabled: bool = False) -> dict[str, Any]:
    """A button. subject: the object of the action"""
    return {"name": name, "label": label, "subject": subject, "disabled": is_disabled}


class DataTable(ui.element, component="data_table.js"):
    """Shows rows: dicts with an `id` and a value for each column."""

    def __init__(self, label: str, columns: Sequence[dict[str, Any]], empty: str, on_action: OnAction | None = None):
        """label: names the table; empty: text of a table without rows"""
        super().__init__()
        self._props |= {"label": label, "columns": list(columns), "rows": [], "empty": empty}
        if on_action is not None:
            self.on("action", lambda event: on_action(str(event.args[0]), str(event.args[1])))

    def show(self, rows: list[dict[str, Any]]) -> None:
        """Sends the rows to the browser if they have changed."""
        if self._props["rows"] != rows:
            self._props["rows"] = rows
            self.update()
