"""ChatList: a drawer with this browser's chats: search, open, rename, export, import, delete.

Used by page.py. Independent of the content of chats.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from nicegui import events, ui

from .browser_store import ChatEntry


@dataclass(frozen=True, slots=True)
class ChatActions:
    new: Callable[[], Awaitable[None]]
    open: Callable[[str], Awaitable[None]]
    rename: Callable[[str, str], Awaitable[None]]
    remove: Callable[[str], Awaitable[None]]
    search: Callable[[], Awaitable[None]]
    """Called when the search text has changed."""
    import_text: Callable[[str], Awaitable[None]]
    """Called with the text of a file."""


class ChatList:
    def __init__(self, actions: ChatActions) -> None:
        self._actions = actions
        with (
            ui.left_drawer(value=None, bordered=True).classes("chats").props("width=270 breakpoint=800") as self.drawer
        ):
            new = ui.button("New chat", icon="add", on_click=actions.new).classes("chats__new")
            new.props("unelevated no-caps align=left").tooltip("Ctrl+K")
            self._search = ui.input(placeholder="Search", on_change=actions.search).classes("full-width")
            self._search.props('outlined dense clearable debounce=300 aria-label="Search in chats"')
            self._list = ui.element("nav").classes("chats__list").props('aria-label="Chats"')
            ui.space()
            import_button = ui.button("Import", icon="upload_file", color=None).props("flat no-caps align=left")
            import_button.classes("full-width").tooltip("A chat exported as JSON")
            import_button.on("click", self._import, js_handler="() => llmbackendChat.pickFile(emit)")

    @property
    def searched(self) -> str:
        return str(self._search.value or "")

    async def _import(self, event: events.GenericEventArguments) -> None:
        await self._actions.import_text(str(event.args or ""))

    def show(self, entries: Sequence[ChatEntry], current_id: str) -> None:
        self._list.clear()
        with self._list:
            if not entries and self.searched:
                ui.label("No chat contains this text.").classes("muted")
            for entry in entries:
                self._show(entry, is_current=entry.id == current_id)

    def _show(self, entry: ChatEntry, *, is_current: bool) -> None:
        with ui.element("div").classes("chats__row") as row:
            opener = ui.element("button").classes("chats__open").props("type=button")
            opener.on("click", lambda: self._actions.open(entry.id))
            with opener:
                ui.label(entry.title).classes("chats__title").props("dir=auto")
            with (
                ui.button(icon="more_horiz", color=None).props('flat round dense size=sm aria-label="Chat menu"'),
                ui.menu(),
            ):
                ui.menu_item("Rename", lambda: self._rename(entry))
                ui.menu_item("Export as JSON").on(
                    "click", js_handler=f"() => llmbackendChat.exportChat('{_plain(entry.id)}')"
                )
                ui.menu_item("Delete", lambda: self._actions.remove(entry.id)).classes("danger")
        if is_current:
            row.classes("chats__row--current")
            opener.props("aria-current=true")

    async def _rename(self, entry: ChatEntry) -> None:
        with ui.dialog() as dialog, ui.card().classes("dialog").props('aria-label="Rename the chat"'):
            title = ui.input("Title", value=entry.title).classes("full-width").props("outlined dense autofocus")
            title.on("keydown.enter", lambda: dialog.submit(True))
            with ui.row().classes("dialog__actions"):
                ui.space()
                ui.button("Cancel", color=None, on_click=dialog.close).props("flat no-caps")
                ui.button("Rename", on_click=lambda: dialog.submit(True)).props("unelevated no-caps")
        if await dialog and str(title.value).strip():
            await self._actions.rename(entry.id, str(title.value).strip())
        dialog.delete()


def _plain(chat_id: str) -> str:
    """A chat's id for use in a script, without characters that could end the string."""
    return "".join(character for character in chat_id if character.isalnum())
