"""The Engine page. Its script (view/) reads /v2/engine/events and draws, without work for this process."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from nicegui import ui

from ..shell import FILES_URL, Viewer

_VIEW: Final = Path(__file__).parent / "view"


class EngineView(ui.element, component=_VIEW / "engine_view.js", esm={"llmbackend-engine": str(_VIEW)}):
    """Runs view/engine_view.js in the browser."""


def build(viewer: Viewer) -> None:
    """viewer: unused; the view reads the key from the browser's storage (static/shell.js)"""
    ui.add_head_html(f'<link rel="stylesheet" href="{FILES_URL}/engine.css">')
    EngineView()
