"""ChatPage: one viewer's chat with a model.

Used by routes.py. Independent of how turns look, where chats are stored, and the format of requests. Invariants: a page
generates at most one answer at a time; a chat is saved after each change, and an answer every second while it is
generated, so that a reloaded page shows and continues it.
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
from .conversation import INTERRUPTED, STOPPED, Chat, ChatSettings, Turn, UnfinishedAnswer
from .generation import Generation
from .highlighting import highlight_css
from .settings_panel import SettingsPanel
from .turn_views import AnswerView, TurnActions, show_tool_result, show_user

_SAVE_EVERY_S: Final = 1.0
_WELCOME: Final = "What would you like to know?"
_EXAMPLES: Final = (
    "What is continuous batching?",
    "Count from 1 to 10",
    "Make a JSON object with name Ada and age 36",
    "Name three fruits",
)
_COPIED: Final = "This chat was changed on another page. It continues as a copy."


def build(viewer: Viewer) -> None:
    ui.add_head_html(
        f'<link rel="stylesheet" href="{FILES_URL}/chat.css"><script src="{FILES_URL}/chat.js"></script>'
        f'<script type="module" src="{FILES_URL}/math.js"></script>'
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
        self._roots: dict[str, str] = {}
        """The `root` of each listed model: the model itself under its first name, if this is a LoRA adapter or another
        name."""
        self._turn_actions = TurnActions(
            self._edit, self._regenerate, self._continue, self._show_version, self._answer_calls
        )
        actions = ChatActions(self._new, self._open, self._rename, self._remove, self._show_list, self._import)
        self._list = ChatList(actions)
        self._settings = SettingsPanel(self._change_settings)
        self._add_buttons()
        with ui.element("div").classes("chat"):
            self._thread = ui.element("div").classes("thread").props("role=log aria-live=off")
            with ui.element("div").classes("chat__foot"):
                self._composer = Composer(self._send, self._stop, self._choose_model, self._may_send)
        self._said = ui.label().classes("hidden-text").props("role=status aria-live=polite")
        self._client.on_delete(self._leave)
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

    # --- start --------------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Called when the browser has connected and when its key has changed."""
        if not self._has_begun:
            self._has_begun = True
            entries = await self._store.entries()
            last = await self._store.load(entries[0].id) if entries else None
            self._chat = last or Chat.new(await self._store.settings())
            self._show_chat()
            await self._show_list()
            await self._show_models()
            await self._resume()
        else:
            await self._show_models()

    async def _show_models(self) -> None:
        try:
            answer = await self._viewer.api.get("/v1/models")
        except ApiError as error:
            if error.status == 401:
                self._viewer.need_key()
            else:
                ui.notify(str(error), type="negative")
            return
        self._roots = {str(model["id"]): str(model["root"]) for model in answer["data"]}
        self._composer.show_models(list(self._roots), self._chat.settings.model)
        self._select_model()

    def _select_model(self) -> None:
        """Selects the chat's model. A chat whose model is no longer served uses the selected one."""
        settings, selector = self._chat.settings, self._composer.model
        if settings.model in selector.options:
            selector.set_value(settings.model)
        elif selector.value:
            self._chat.settings = msgspec.structs.replace(settings, model=str(selector.value))
            self._settings.show(self._chat.settings)

    async def _choose_model(self, name: str) -> None:
        if name and name != self._chat.settings.model:
            await self._change_settings(msgspec.structs.replace(self._chat.settings, model=name))

    async def _change_settings(self, settings: ChatSettings) -> None:
        self._chat.settings = settings
        self._settings.show(settings)
        await self._store.save_settings(settings)
        if self._chat.turns:
            await self._save(self._chat)

    # --- chats --------------------------------------------------------------------------------------------------------

    async def _new(self) -> None:
        self._stop()
        self._chat = Chat.new(self._chat.settings)
        self._show_chat()
        await self._show_list()
        self._client.run_javascript("llmbackendChat.focusComposer()")

    async def _open(self, chat_id: str) -> None:
        if chat_id == self._chat.id:
            return
        self._stop()
        chat = await self._store.load(chat_id)
        if chat is None:
            ui.notify("This chat cannot be read", type="negative")
            return
        self._chat = chat
        self._show_chat()
        await self._show_list()
        self._select_model()
        await self._resume()

    async def _rename(self, chat_id: str, title: str) -> None:
        chat = self._chat if chat_id == self._chat.id else await self._store.load(chat_id)
        if chat is not None:
            chat.title = title
            await self._save(chat)
        await self._show_list()

    async def _remove(self, chat_id: str) -> None:
        if chat_id == self._chat.id:
            self._drop()
        await self._store.remove(chat_id)
        if chat_id == self._chat.id:
            await self._new()
        else:
            await self._show_list()

    async def _import(self, text: str) -> None:
        """Imports an exported chat under a new id."""
        try:
            chat = Chat.of_json(text)
        except ValueError as error:
            ui.notify(f"This file is not an exported chat of at most 3 MiB: {error}", type="negative")
            return
        chat.id = Chat.new(chat.settings).id
        if await self._save(chat):
            await self._open(chat.id)

    async def _show_list(self) -> None:
        found = await self._store.search(self._list.searched)
        entries = [entry for entry in await self._store.entries() if found is None or entry.id in found]
        self._list.show(entries, self._chat.id)

    async def _save(self, chat: Chat) -> bool:
        """Returns False if the chat cannot be saved, after telling the viewer."""
        known_id = chat.id
        why_not = await self._store.save(chat)
        if (notice := why_not or (_COPIED if chat.id != known_id else "")) and not self._client.is_deleted:
            with self._client:
                ui.notify(notice, type="warning")
        return not why_not

    # --- turns --------------------------------------------------------------------------------------------------------

    def _show_chat(self) -> None:
        self._settings.show(self._chat.settings)
        self._show_turns(0)
        if not self._chat.turns:
            with self._thread, ui.element("div").classes("thread__welcome"):
                ui.label(_WELCOME).classes("thread__question")
                with ui.element("div").classes("thread__examples"):
                    for example in _EXAMPLES:
                        self._offer(example)

    def _offer(self, example: str) -> None:
        button = ui.button(example, color=None, on_click=lambda: self._send(example))
        button.props("outline no-caps").classes("thread__example")

    def _show_turns(self, begin: int) -> None:
        """Shows the turns from `begin` on again. Each turn is the element of the thread at its index."""
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
            AnswerView(index, self._turn_actions).finish(turn, is_last=is_last)

    def _may_send(self) -> bool:
        """Returns False while a setting is invalid, and shows the problem next to the button."""
        self._composer.show_problem(self._settings.problem)
        return not self._settings.problem

    async def _send(self, text: str, version: Turn | None = None) -> None:
        if self._generation is not None or not self._may_send():
            return
        begin = len(self._chat.turns)
        self._chat.add_user(text, version)
        await self._answer(begin)

    async def _edit(self, index: int, text: str) -> None:
        if text.strip() and self._may_send():
            await self._send(text, self._cut(index))

    async def _regenerate(self, index: int) -> None:
        if self._may_send():
            await self._answer(index, self._cut(index))

    async def _continue(self, index: int) -> None:
        if index == len(self._chat.turns) - 1 and self._generation is None and self._may_send():
            begun = self._chat.turns.pop()
            await self._answer(index, msgspec.structs.replace(begun, finish_reason="", error=""))

    async def _show_version(self, index: int, place: int) -> None:
        if self._generation is None:
            self._chat.show_version(index, place)
            self._show_turns(max(index - 1, 0))
            await self._save(self._chat)

    async def _answer_calls(self, results: dict[str, str]) -> None:
        begin = len(self._chat.turns)
        self._chat.turns += [
            Turn(role="tool", tool_call_id=call.id, content=results.get(call.id, ""))
            for call in self._chat.open_calls()
        ]
        if len(self._chat.turns) > begin:
            await self._answer(begin)

    def _cut(self, index: int) -> Turn:
        """Removes the turns from `index` on and any answer that is being generated; they become another version."""
        if self._generation is not None:
            self._chat.turns.append(self._generation.turn())
            self._drop()
        return self._chat.cut(index)

    def _drop(self) -> None:
        if self._generation is not None:
            self._generation.drop()
            self._end_of(self._generation)

    # --- answers ------------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        if self._generation is not None:
            self._generation.stop()

    def _leave(self) -> None:
        if self._generation is not None:
            self._generation.leave()

    async def _answer(self, begin: int, base: Turn | None = None) -> None:
        """Answers the last turn, or continues `base`. begin: index of the first new turn; the one before is shown
        again, too"""
        self._show_turns(max(begin - 1, 0))
        self._generate(UnfinishedAnswer.new(len(self._chat.turns), base or Turn(role="assistant")))
        self._client.run_javascript("llmbackendChat.toEnd()")
        await self._save(self._chat)
        await self._show_list()

    async def _resume(self) -> None:
        """Continues the answer that was being generated when the page was left."""
        unfinished = await self._store.unfinished(self._chat)
        if unfinished is not None:
            self._generate(unfinished)
        elif self._chat.turns and self._chat.turns[-1].role != "assistant":
            self._offer_answer()

    def _offer_answer(self) -> None:
        """Shows an empty answer that can be regenerated, if the page was left before its request was sent."""
        index = len(self._chat.turns)
        turn = Turn(role="assistant", finish_reason=INTERRUPTED)
        self._chat.turns.append(turn)
        with self._thread:
            self._show_turn(turn, index)

    def _generate(self, unfinished: UnfinishedAnswer) -> None:
        try:
            request = self._chat.request(unfinished.base)
        except ValueError as error:  # settings changed outside of the page
            ui.notify(str(error), type="negative")
            return
        with self._thread:
            view = AnswerView(unfinished.index, self._turn_actions)
        root = self._roots.get(self._chat.settings.model, self._chat.settings.model)
        generation = Generation(self._viewer, request, unfinished, view, self._client, root)
        self._generation = generation
        self._said.set_text("")  # the same text twice would be spoken once
        self._composer.show_busy(True)
        background_tasks.create(self._run(generation, self._chat, view), name="answer")

    async def _run(self, generation: Generation, chat: Chat, view: AnswerView) -> None:
        saving = asyncio.create_task(self._save_regularly(generation, chat))
        turn = await generation.run()
        saving.cancel()
        if not generation.is_dropped:
            chat.turns.append(turn)
            if await self._save(chat):
                await self._store.forget_answer(chat.id)
        if generation.is_dropped or self._client.is_deleted:
            return
        with self._client:
            self._end_of(generation)
            if self._chat is chat:
                view.finish(turn, is_last=True)
                self._said.set_text(_spoken(turn))
            if generation.needs_key:
                self._viewer.need_key()

    async def _save_regularly(self, generation: Generation, chat: Chat) -> None:
        while True:
            await self._store.save_answer(chat.id, generation.so_far())
            await asyncio.sleep(_SAVE_EVERY_S)

    def _end_of(self, generation: Generation) -> None:
        if self._generation is generation:
            self._generation = None
            self._composer.show_busy(False)


def _spoken(turn: Turn) -> str:
    """Text for screen readers at the end of an answer."""
    if turn.error:
        return f"The answer failed. {turn.error}"
    if turn.finish_reason in (STOPPED, INTERRUPTED):
        return f"Answer {turn.finish_reason}."
    return "Answer complete."
