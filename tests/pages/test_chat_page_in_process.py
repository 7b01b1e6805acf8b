"""The chat page without a browser: its elements in this process, and a dictionary as the browser's storage."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("nicegui")

from nicegui import Client, core, ui

from llmbackend.pages.api import ServerEvent
from llmbackend.pages.chat.conversation import Chat, ChatSettings, ToolCall, Turn
from llmbackend.pages.chat.page import ChatPage
from llmbackend.pages.chat.turn_views import AnswerView
from llmbackend.pages.shell import Viewer

NODE = shutil.which("node")


class Browser:
    """What llmbackendChat (static/chat.js) does for a page, without a limit until `is_full`."""

    def __init__(self, *chats: Chat) -> None:
        self.chats = {chat.id: chat.to_json() for chat in chats}
        self.answers: dict[str, str] = {}
        self.is_full = False
        self.changed_elsewhere: set[str] = set()

    def run_javascript(self, code: str, *, timeout: float = 1.0) -> Awaitable[Any]:
        found = re.fullmatch(r"return llmbackendChat\.(\w+)\((.*)\)", code, re.DOTALL)
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        result.set_result(self._call(found[1], *json.loads(f"[{found[2]}]")) if found else None)
        return result

    def _call(self, name: str, chat_id: str = "", *more: str) -> Any:
        if name == "list":
            return [{"id": each, "title": each} for each in self.chats]
        if name == "load":
            return self.chats.get(chat_id)
        if name == "save":
            return self._save(chat_id, more[1])
        if name == "saveAnswer":
            self.answers[chat_id] = more[0]
        if name == "forgetAnswer":
            self.answers.pop(chat_id, None)
        return None

    def _save(self, chat_id: str, text: str) -> str:
        if chat_id in self.changed_elsewhere:
            return "changed"
        if not self.is_full:
            self.chats[chat_id] = text
        return "full" if self.is_full else "saved"


class Server:
    """The API: answers each chat with one word."""

    def __init__(self, *models: str) -> None:
        self.models = models
        self.asked: list[Mapping[str, Any]] = []

    async def get(self, path: str) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": name, "root": name} for name in self.models]}
        return {"name": path.rpartition("/")[2]}

    async def stream(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[ServerEvent, None]:
        self.asked.append(body)
        chunk = {"choices": [{"delta": {"content": "word"}, "finish_reason": "stop"}]}
        yield ServerEvent("message", json.dumps(chunk), "s:1")
        yield ServerEvent("message", "[DONE]", "s:2")


def run(browser: Browser, server: Server, use: Callable[[ChatPage], Awaitable[None]]) -> None:
    """Opens the page, passes it to `use`, and closes it."""

    async def opened() -> None:
        core.loop = asyncio.get_running_loop()
        client = Client(ui.page("/chat"), request=None)
        client.run_javascript = browser.run_javascript  # type: ignore[method-assign, assignment]
        try:
            with client:
                viewer = SimpleNamespace(
                    api=server, key="", header_start=ui.element(), header_end=ui.element(), need_key=lambda: None
                )
                page = ChatPage(cast("Viewer", viewer))
                await page.begin()
                await use(page)
        finally:
            client.delete()

    asyncio.run(opened())


async def answered(page: ChatPage) -> None:
    while page._generation is not None:
        await asyncio.sleep(0.001)


def notices(page: ChatPage) -> list[str]:
    return [str(data.get("message")) for _, kind, data in page._client.outbox.messages if kind == "notify"]


def chat(name: str, model: str) -> Chat:
    turns = [Turn(role="user", content="q"), Turn(role="assistant", content="a", finish_reason="stop")]
    return Chat(id=name, title=name, settings=ChatSettings(model=model), turns=turns)


def test_a_chat_whose_model_is_gone_uses_the_selected_one() -> None:
    server = Server("here", "other")

    async def use(page: ChatPage) -> None:
        for name in ("gone", "others", "gone"):
            await page._open(name)
            await page._send("question")
            await answered(page)

    run(Browser(chat("first", "here"), chat("gone", "unloaded"), chat("others", "other")), server, use)
    assert [body["model"] for body in server.asked] == ["here", "other", "here"]


def test_the_end_of_each_answer_is_spoken() -> None:
    """A screen reader speaks a text that changes."""
    spoken: list[str] = []

    async def use(page: ChatPage) -> None:
        page._said.set_text = spoken.append  # type: ignore[method-assign, assignment]
        for _ in range(2):
            await page._send("question")
            await answered(page)

    run(Browser(), Server("here"), use)
    assert spoken == ["", "Answer complete."] * 2


def test_a_long_answer_is_rendered() -> None:
    long = chat("first", "here")
    long.turns.append(Turn(role="assistant", content="A **bold** word.\n\n" * 5_000, finish_reason="stop"))
    shown: list[str] = []

    async def use(page: ChatPage) -> None:
        shown.extend(each.content for each in page._client.elements.values() if isinstance(each, ui.html))

    run(Browser(long), Server("here"), use)
    assert "".join(shown).count("<strong>") == 5_000


def test_a_call_that_the_viewer_opened_stays_open_while_it_grows() -> None:
    async def use(page: ChatPage) -> None:
        with page._thread:
            view = AnswerView(0, page._turn_actions)
        view.grow("", "", (ToolCall("a", "f", "{"),))
        [shown] = view._calls
        view.grow("", "", (ToolCall("a", "f", '{"x": 1}'), ToolCall("b", "g", "")))
        same, _ = view._calls
        assert same is shown
        texts = [each.text for each in same.descendants() if isinstance(each, ui.label)]
        assert texts == ["Calls the tool", "f", '{"x": 1}']

    run(Browser(), Server("here"), use)


def test_a_chat_that_another_page_has_changed_continues_as_a_copy() -> None:
    browser = Browser(chat("first", "here"))
    before = browser.chats["first"]

    async def use(page: ChatPage) -> None:
        browser.changed_elsewhere.add("first")
        await page._send("question")
        await answered(page)

    run(browser, Server("here"), use)
    assert browser.chats.pop("first") == before
    [(copied_id, text)] = browser.chats.items()
    assert Chat.of_json(text).id == copied_id
    assert [turn.content for turn in Chat.of_json(text).turns] == ["q", "a", "question", "word"]


def test_a_chat_that_could_not_be_loaded_again_is_not_saved() -> None:
    browser = Browser()
    told: list[str] = []

    async def use(page: ChatPage) -> None:
        await page._send('"' * (2 << 20))  # each quote takes three more bytes in a message
        await answered(page)
        told.extend(notices(page))

    run(browser, Server("here"), use)
    assert browser.chats == {} and any("too large" in text for text in told)


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_browsers_storage_in_node() -> None:
    assert NODE is not None
    tests = Path(__file__).parent / "chat_storage" / "chat_storage.test.mjs"
    done = subprocess.run([NODE, "--test", str(tests)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout


def test_an_answer_that_the_storage_has_no_room_for_is_not_forgotten() -> None:
    browser = Browser(chat("first", "here"))
    told: list[str] = []

    async def use(page: ChatPage) -> None:
        browser.is_full = True
        await page._send("question")
        await answered(page)
        told.extend(notices(page))

    run(browser, Server("here"), use)
    assert "first" in browser.answers
    assert any("storage is full" in text for text in told)
