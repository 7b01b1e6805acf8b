"""BrowserStore: the chats of one browser, in its localStorage.

Used by the chat page. Independent of what is shown. Invariants: only the browser stores chats; unreadable ones are
skipped, not deleted.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
from nicegui import Client

from .conversation import Chat, ChatSettings, UnfinishedAnswer

_TIMEOUT_S: Final = 10.0
_MAX_STORED_BYTES: Final = 7 << 19
"""Limit of what is stored for a chat: it must fit in one message of the browser (pages/main.py)."""
STORAGE_FULL: Final = "The browser's storage is full: this chat is not saved. Delete older ones."
TOO_LARGE: Final = "This chat is too large to be saved. Start a new one."


class ChatEntry(msgspec.Struct, frozen=True):
    """A chat in the list."""

    id: str
    title: str


class BrowserStore:
    """Each method waits for the browser (static/chat.js); if it does not answer, the storage appears empty."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def entries(self) -> list[ChatEntry]:
        """The chats, most recently changed first."""
        try:
            return msgspec.convert(await self._call("list"), list[ChatEntry])
        except msgspec.ValidationError:
            return []

    async def load(self, chat_id: str) -> Chat | None:
        try:
            return Chat.of_json(str(await self._call("load", chat_id) or ""))
        except ValueError:
            return None

    async def save(self, chat: Chat) -> str:
        """Saves the chat, under a new id if another page has changed it. Returns why it is not saved, "" if it is."""
        if not _fits(chat.to_json()):
            return TOO_LARGE
        saved = await self._call("save", chat.id, chat.shown_title, chat.to_json())
        if saved == "changed":
            chat.id = Chat.new(chat.settings).id
            saved = await self._call("save", chat.id, chat.shown_title, chat.to_json())
        return "" if saved == "saved" else STORAGE_FULL

    async def unfinished(self, chat: Chat) -> UnfinishedAnswer | None:
        """The answer after the chat's last turn, if one was being generated."""
        try:
            found = UnfinishedAnswer.of_json(str(await self._call("answer", chat.id) or ""))
        except ValueError:
            return None
        return found if found.index == len(chat.turns) else None

    async def save_answer(self, chat_id: str, answer: UnfinishedAnswer) -> None:
        if _fits(text := answer.to_json()):
            await self._call("saveAnswer", chat_id, text)

    async def forget_answer(self, chat_id: str) -> None:
        await self._call("forgetAnswer", chat_id)

    async def search(self, text: str) -> set[str] | None:
        """Ids of the chats that contain `text`, ignoring case; None = all chats."""
        return set(await self._call("search", text) or ()) if text.strip() else None

    async def remove(self, chat_id: str) -> None:
        await self._call("remove", chat_id)

    async def settings(self) -> ChatSettings:
        """The settings that were changed last; new chats start with them."""
        try:
            return msgspec.json.decode(str(await self._call("settings") or "{}"), type=ChatSettings)
        except msgspec.DecodeError:
            return ChatSettings()

    async def save_settings(self, settings: ChatSettings) -> None:
        await self._call("saveSettings", msgspec.json.encode(settings).decode())

    async def _call(self, name: str, *arguments: str) -> Any:
        values = ", ".join(json.dumps(argument) for argument in arguments)
        try:
            return await self._client.run_javascript(f"return llmbackendChat.{name}({values})", timeout=_TIMEOUT_S)
        except TimeoutError:  # the browser is disconnected
            return None


def _fits(text: str) -> bool:
    """Whether the browser can send the text back, as a JSON string."""
    return len(msgspec.json.encode(text)) <= _MAX_STORED_BYTES
