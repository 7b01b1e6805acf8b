"""ChatPage: one viewer's chat with a model.

For: routes.py. Does not know: how turns look, where chats are stored, how a request is written. Invariants: at most one
answer is generated at a time on one page; a chat is stored after each change and every few seconds of an answer, so
that a page that is loaded again shows it.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from nicegui import background_tasks, context, ui

from ..api import ApiError
from ..shell import FILES_URL, Viewer
from .browser_store import BrowserStore
from .chat_list import ChatActions, ChatList
from .composer import Composer
from .conversation import Chat, ChatSettings, Turn
from .generation import Generation
from .highlighting import highlight_css
from .settings_panel import SettingsPanel
from .turn_views import AnswerView, TurnActions, show_tool_result, show_user

_SAVE_EVERY_S: Final = 3.0
_WELCOME: Final = "What would you like to know?"


def build(viewer: Viewer) -> None:
    ui.add_head_html(
        f'<link rel="stylesheet" href="{FILES_URL}/chat.css"><script src="{FILES_URL}/chat.js"></script>'
        f"<style>{highlight_css()}</style>"
    )
    viewer.on_key(ChatPage(viewer).begin)


class ChatPage:
    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer
        self._client = context.client
        self._store = BrowserStore(self._client)
        self._chat = Chat.new(ChatSettings())
        self._generation: Generation | None = None
        self._has_begun = False
        self._turn_actions = TurnActions(self._edit, self._regenerate, self._answer_calls)
        self._list = ChatList(ChatActions(self._new, self._open, self._rename, self._remove))
        self._settings = SettingsPanel(self._change_settings)
        self._add_buttons()
        with ui.element("div").classes("chat"):
            self._thread = ui.element("div").classes("thread").props("role=log aria-live=off")
            with ui.element("div").classes("chat__foot"):
                self._composer = Composer(self._send, self._stop, self._choose_model)
        self._said = ui.label().classes("hidden-text").props("role=status aria-live=polite")
        self._client.on_delete(self._stop)
        self._show_chat()

    def _add_buttons(self) -> None:
        assert self._viewer.header_start is not None
        with self._viewer.header_start:
            chats = ui.button(icon="menu", color=None, on_click=self._list.drawer.toggle)
            chats.props('flat round dense aria-label="Chats"').move(target_index=0)
        assert self._viewer.header_end is not None
        with self._viewer.header_end:
            settings = ui.button(icon="tune", color=None, on_click=self._settings.drawer.toggle)
            settings.props('flat round dense aria-label="Settings of this chat"').tooltip("Settings of this chat")

    # --- beginning --------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Called when the browser has connected, and again when its key has changed."""
        if not self._has_begun:
            self._has_begun = True
            entries = await self._store.entries()
            last = await self._store.load(entries[0].id) if entries else None
            self._chat = last or Chat.new(await self._store.settings())
            self._show_chat()
            await self._show_list()
        await self._show_models()

    async def _show_models(self) -> None:
        try:
            answer = await self._viewer.api.get("/v1/models")
        except ApiError as error:
            if error.status == 401:
                self._viewer.ask_for_key(str(error))
            else:
                ui.notify(str(error), type="negative")
            return
        names = [str(model["id"]) for model in answer["data"]]
        self._composer.show_models(names, self._chat.settings.model)

    async def _choose_model(self, name: str) -> None:
        if name and name != self._chat.settings.model:
            await self._change_settings(msgspec.structs.replace(self._chat.settings, model=name))

    async def _change_settings(self, settings: ChatSettings) -> None:
        self._chat.settings = settings
        self._settings.show(settings)
        await self._store.save_settings(settings)
        if self._chat.turns:
            await self._save()

    # --- chats ------------------------------------------------------------------------------------------------------

    async def _new(self) -> None:
        self._stop()
        self._chat = Chat.new(self._chat.settings)
        self._show_chat()
        await self._show_list()
        self._client.run_javascript("llmbackendChat.focusComposer()")

    async def _open(self, chat_id: str) -> None:
        self._stop()
        chat = await self._store.load(chat_id)
        if chat is None:
            ui.notify("This chat can not be read", type="negative")
            return
        self._chat = chat
        self._show_chat()
        await self._show_list()
        if chat.settings.model in self._composer.model.options:
            self._composer.model.set_value(chat.settings.model)

    async def _rename(self, chat_id: str, title: str) -> None:
        chat = self._chat if chat_id == self._chat.id else await self._store.load(chat_id)
        if chat is not None:
            chat.title = title
            await self._store.save(chat)
        await self._show_list()

    async def _remove(self, chat_id: str) -> None:
        if chat_id == self._chat.id:
            self._drop()
        await self._store.remove(chat_id)
        if chat_id == self._chat.id:
            await self._new()
        else:
            await self._show_list()

    async def _show_list(self) -> None:
        self._list.show(await self._store.entries(), self._chat.id)

    async def _save(self) -> None:
        if not await self._store.save(self._chat):
            ui.notify("The browser's storage is full: this chat is not kept. Delete older ones.", type="warning")

    # --- turns ------------------------------------------------------------------------------------------------------

    def _show_chat(self) -> None:
        self._settings.show(self._chat.settings)
        self._show_turns(0)
        if not self._chat.turns:
            with self._thread:
                ui.label(_WELCOME).classes("thread__welcome")

    def _show_turns(self, begin: int) -> None:
        """Shows the turns from `begin` on anew. Each is one element of the thread, at its index."""
        for element in self._thread.default_slot.children[begin:]:
            element.delete()
        with self._thread:
            for index, turn in enumerate(self._chat.turns[begin:], begin):
                self._show_turn(turn, index)

    def _show_turn(self, turn: Turn, index: int) -> None:
        if turn.role == "user":
            show_user(turn, index, self._turn_actions)
        elif turn.role == "tool":
            show_tool_result(turn)
        else:
            is_last = index == len(self._chat.turns) - 1
            AnswerView(index, self._turn_actions).finish(turn, waits_for_results=is_last)

    async def _send(self, text: str) -> None:
        if self._generation is not None:
            return
        begin = len(self._chat.turns)
        self._chat.add_user(text)
        await self._answer(begin)

    async def _edit(self, index: int, text: str) -> None:
        if text.strip():
            self._cut(index)
            await self._send(text)

    async def _regenerate(self, index: int) -> None:
        self._cut(index)
        await self._answer(index)

    async def _answer_calls(self, results: dict[str, str]) -> None:
        begin = len(self._chat.turns)
        self._chat.turns += [
            Turn(role="tool", tool_call_id=call.id, content=results.get(call.id, ""))
            for call in self._chat.open_calls()
        ]
        if len(self._chat.turns) > begin:
            await self._answer(begin)

    def _cut(self, index: int) -> None:
        """Drops the turns from `index` on, and an answer that is being generated."""
        self._drop()
        del self._chat.turns[index:]

    def _drop(self) -> None:
        if self._generation is not None:
            self._generation.drop()
            self._end_of(self._generation)

    # --- answers ----------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        if self._generation is not None:
            self._generation.stop()

    async def _answer(self, begin: int) -> None:
        """Has the model answer the last turn. `begin`: of the turns that are new; the one before may look otherwise."""
        self._show_turns(max(begin - 1, 0))
        try:
            request = self._chat.request()
        except ValueError as error:
            ui.notify(str(error), type="negative")
            return
        with self._thread:
            view = AnswerView(len(self._chat.turns), self._turn_actions)
        generation = self._generation = Generation(self._viewer, request, view, self._client)
        self._composer.show_busy(True)
        self._client.run_javascript("llmbackendChat.toEnd()")
        await self._save()
        await self._show_list()
        background_tasks.create(self._run(generation, self._chat, view), name="answer")

    async def _run(self, generation: Generation, chat: Chat, view: AnswerView) -> None:
        saving = asyncio.create_task(self._save_regularly(generation, chat))
        turn = await generation.run()
        saving.cancel()
        if not generation.is_dropped:
            chat.turns.append(turn)
            await self._store.save(chat)
        if generation.is_dropped or self._client.is_deleted:
            return
        with self._client:
            self._end_of(generation)
            if self._chat is chat:
                view.finish(turn, waits_for_results=True)
                self._said.set_text(f"Answer complete. {turn.error}")
            if generation.needs_key:
                self._viewer.ask_for_key(turn.error)

    async def _save_regularly(self, generation: Generation, chat: Chat) -> None:
        while True:
            await asyncio.sleep(_SAVE_EVERY_S)
            await self._store.save(msgspec.structs.replace(chat, turns=[*chat.turns, generation.so_far()]))

    def _end_of(self, generation: Generation) -> None:
        if self._generation is generation:
            self._generation = None
            self._composer.show_busy(False)
