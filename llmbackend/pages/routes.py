"""Routes of the pages, each imported when it is first opened, and of the files that all pages share."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import Final

import nicegui
from nicegui import App, ui

from .shell import FILES_URL, PAGES, Page, shell

KATEX_URL: Final = "/_nicegui/katex.js"
"""Imported by static/math.js."""

log = logging.getLogger(__name__)


def add_to(app: App) -> None:
    app.on_page_exception(_show_failure)
    app.add_static_files(FILES_URL, Path(__file__).parent / "static", max_cache_age=0)
    _add_katex(app)
    for page in PAGES:
        _add(page, page.path)
    _add(PAGES[0], "/")


def _add_katex(app: App) -> None:
    """Serves NiceGUI's own copy, which it uses for diagrams; the file's name contains a hash."""
    found = sorted(Path(nicegui.__file__).parent.glob("elements/mermaid/dist/katex-*.js"))
    if found:
        app.add_static_file(local_file=found[0], url_path=KATEX_URL)
    else:
        log.warning("this release of NiceGUI has no KaTeX: formulas are shown as TeX")


def _add(page: Page, path: str) -> None:
    @ui.page(path, title=f"{page.title} · llmbackend", response_timeout=30)
    async def show() -> None:
        viewer = shell(page)
        import_module(page.module).build(viewer)
        await viewer.arrive()


def _show_failure(error: Exception) -> None:
    """Logs the details, which NiceGUI's own page would show to every viewer."""
    log.error("a page cannot be shown", exc_info=error)
    ui.label("This page cannot be shown. See the server's log.").classes("page")
