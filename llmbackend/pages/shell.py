"""The common parts of all pages: header with navigation, theme, the viewer's key.

Used by routes.py and the pages' builders, which get a Viewer. Independent of what a page shows. Invariant: only the
browser stores key and theme (static/shell.js); in this process, a key lives as long as its page.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from nicegui import context, ui

from .api import Api

FILES_URL: Final = "/_nicegui/pages"
_STORAGE_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    path: str
    module: str
    """Contains `build(viewer)`."""
    icon: str


PAGES: Final = (
    Page("Chat", "/chat", "llmbackend.pages.chat.page", "chat"),
    Page("Engine", "/engine", "llmbackend.pages.engine.page", "memory"),
    Page("Operations", "/operations", "llmbackend.pages.operations.page", "tune"),
)

_NEEDS_KEY: Final = "This server requires an API key. Enter the one that its operator gave you."
_WRONG_KEY: Final = "The server does not accept this API key. Enter another one."

OnKey = Callable[[], Awaitable[None]]


class Viewer:
    """One open page of one browser."""

    def __init__(self) -> None:
        self.key = ""
        self.api = Api(lambda: self.key)
        self._on_key: list[OnKey] = []
        self._dialog = _KeyDialog(self)
        self.header_start: ui.element | None = None
        """Left of the navigation, for the button of a page's drawer."""
        self.header_end: ui.element | None = None
        """Right of the navigation, for a page's buttons."""

    def on_key(self, callback: OnKey) -> None:
        """`callback` is called once the browser is connected and its key is known, and when the key changes."""
        self._on_key.append(callback)

    def ask_for_key(self, why: str = "") -> None:
        """Opens the key dialog, which shows `why`."""
        self._dialog.open(why)

    def need_key(self) -> None:
        """Opens the key dialog because the API refused the viewer's key, or a request without one."""
        self.ask_for_key(_WRONG_KEY if self.key else _NEEDS_KEY)

    async def arrive(self) -> None:
        """Waits for the browser, then reads the key from its storage."""
        await context.client.connected()
        self.key = str(await ui.run_javascript("return llmbackend.key()", timeout=_STORAGE_TIMEOUT_S) or "")
        await self._tell()

    async def change_key(self, key: str) -> None:
        self.key = key
        await ui.run_javascript(f"llmbackend.setKey({json.dumps(key)})", timeout=_STORAGE_TIMEOUT_S)
        await self._tell()

    async def _tell(self) -> None:
        for callback in self._on_key:
            await callback()


class _KeyDialog:
    """The dialog for the API key."""

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer
        with ui.dialog() as self._dialog, ui.card().classes("dialog").props('role="dialog" aria-label="API key"'):
            ui.label("API key").classes("dialog__title")
            self._why = ui.label().classes("dialog__text")
            ui.label("It is stored in this browser and sent with each request of the pages.").classes("muted")
            self._input = ui.input("Key", password=True, password_toggle_button=True).classes("full-width")
            self._input.props('outlined dense autocomplete="off" spellcheck="false"').on("keydown.enter", self._save)
            with ui.row().classes("dialog__actions"):
                ui.button("Forget", on_click=self._forget).props("flat no-caps color=negative")
                ui.space()
                ui.button("Cancel", on_click=self._dialog.close).props("flat no-caps")
                ui.button("Save", on_click=self._save).props("unelevated no-caps")

    def open(self, why: str) -> None:
        self._why.set_text(why)
        self._why.set_visibility(bool(why))
        self._dialog.open()

    async def _save(self) -> None:
        await self._close_with(str(self._input.value or "").strip())

    async def _forget(self) -> None:
        await self._close_with("")

    async def _close_with(self, key: str) -> None:
        self._dialog.close()
        self._input.set_value("")  # the key does not stay in the page
        await self._viewer.change_key(key)


def shell(page: Page) -> Viewer:
    """Builds the header of `page`."""
    ui.colors(primary="#0b7a5e", dark_page="#101316", dark="#171b20")
    ui.add_head_html(
        f'<link rel="stylesheet" href="{FILES_URL}/pages.css"><script src="{FILES_URL}/shell.js"></script>'
    )
    viewer = Viewer()
    with ui.header().classes("header").props("role=banner"):
        with ui.element("div").classes("header__start") as viewer.header_start:
            ui.label("llmbackend").classes("header__name")
        with ui.element("nav").classes("header__nav").props('aria-label="Pages"'):
            for other in PAGES:
                _link(other, is_current=other is page)
        ui.space()
        viewer.header_end = ui.element("div").classes("header__end")
        ui.button(icon="key", color=None, on_click=lambda: viewer.ask_for_key()).props(
            'flat round dense aria-label="API key"'
        ).tooltip("API key")
        theme = (
            ui.button(icon="brightness_auto", color=None)
            .props('flat round dense aria-label="Theme"')
            .classes("theme-button")
        )
        theme.on("click", js_handler="() => llmbackend.nextTheme()").tooltip("Theme: light, dark or the system's")
    with ui.element("button").classes("hidden ask-for-key").props("aria-hidden=true tabindex=-1") as asked:
        asked.on("ask", lambda event: _ask(viewer, str(event.args or "")), js_handler="(event) => emit(event.detail)")
    ui.element("div").props("id=content tabindex=-1")
    return viewer


def _ask(viewer: Viewer, why: str) -> None:
    """Handles a page script's request for a key."""
    if why:
        viewer.ask_for_key(why)
    else:
        viewer.need_key()


def _link(page: Page, *, is_current: bool) -> None:
    with ui.link(target=page.path).classes("nav-link") as link:
        ui.icon(page.icon).classes("nav-link__icon").props("aria-hidden=true")
        ui.label(page.title)
    if is_current:
        link.classes("nav-link--current").props("aria-current=page")
