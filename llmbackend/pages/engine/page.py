"""The Engine page, whose script (view/) reads /v2/engine/events itself and draws, so that this process does nothing
while the page is open."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from nicegui import ui

from ..shell import FILES_URL, Viewer

_VIEW: Final = Path(__file__).parent / "view"


class EngineView(ui.element, component=_VIEW / "engine_view.js", esm={"llmbackend-engine": str(_VIEW)}):
    """The view in the browser: view/engine_view.js."""


def build(viewer: Viewer) -> None:
    """viewer: not needed; the view reads the key where the browser keeps it (static/shell.js)."""
    ui.add_head_html(f'<link rel="stylesheet" href="{FILES_URL}/engine.css">')
    EngineView()
