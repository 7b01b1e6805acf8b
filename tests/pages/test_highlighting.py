"""Colours of code: from a process of their own, which ends where a text makes its patterns explode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

pytest.importorskip("nicegui")

from llmbackend.pages.chat.highlighting import MAX_CHARACTERS, Code, Highlighter
from llmbackend.pages.chat.markdown import Markdown
from tests.pages.test_chat_page import complete, say

T = TypeVar("T")
EXPLODES = '"' + "\\" * 200
"""In fish, chapel, cddl and factor."""


def run(use: Callable[[Highlighter], Awaitable[T]]) -> T:
    async def within() -> T:
        highlighter = Highlighter()
        try:
            return await use(highlighter)
        finally:
            await highlighter.close()

    return asyncio.run(within())


def test_code_of_a_known_language_has_colours() -> None:
    html = run(lambda highlighter: highlighter.highlighted(Code("python", "x = '<b>'\n")))
    assert html is not None and '<span class="hl-n">x</span>' in html and "<b>" not in html


@pytest.mark.parametrize(
    "code", [Code("", "x"), Code("no such language", "x"), Code("python", "x" * (MAX_CHARACTERS + 1))]
)
def test_other_code_has_none(code: Code) -> None:
    assert run(lambda highlighter: highlighter.highlighted(code)) is None


@pytest.mark.parametrize("language", ["fish", "chapel", "cddl", "factor"])
def test_code_that_makes_patterns_explode_has_none_and_the_next_code_has_colours(language: str) -> None:
    async def use(highlighter: Highlighter) -> tuple[str | None, bool, str | None]:
        hostile = Code(language, EXPLODES)
        first = await highlighter.highlighted(hostile)
        return first, highlighter.accepts(hostile), await highlighter.highlighted(Code("json", "{}"))

    first, is_asked_again, other = run(use)
    assert first is None and not is_asked_again
    assert other is not None and "hl-" in other


def test_the_event_loop_goes_on_while_patterns_explode() -> None:
    async def use(highlighter: Highlighter) -> int:
        asking = asyncio.create_task(highlighter.highlighted(Code("fish", EXPLODES)))
        turns = 0
        while not asking.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns

    assert run(use) > 20


def test_code_is_found_as_it_is_shown_and_shown_with_its_colours() -> None:
    text = "text\n\n```python title\nx\u202e = 1\n```\n\n~~~\nno language\n~~~\n"
    markdown = Markdown(text)
    (code,) = markdown.codes
    assert code == Code("python", "x[U+202E] = 1\n")
    assert "<i>highlighted</i>" in markdown.html({code: "<i>highlighted</i>"})
    assert "x[U+202E] = 1" in markdown.html({})


@pytest.mark.slow
def test_an_answer_is_shown_beside_code_that_makes_patterns_explode(chat: Any) -> None:
    say(chat, f"```python\nx = 1\n```\n\n```fish\n{EXPLODES}\n```\n\n```json\n[true]\n```\n")
    answer = complete(chat, 1)
    answer.locator(".hl-n").get_by_text("x", exact=True).wait_for()
    assert answer.locator("pre").nth(1).inner_text().strip() == EXPLODES
    assert answer.locator("pre").nth(1).locator("span").count() == 0
    answer.locator(".hl-kc").get_by_text("true", exact=True).wait_for()
