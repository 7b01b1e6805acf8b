"""MarkdownView: an element that shows a model's Markdown; its code is highlighted later."""

from __future__ import annotations

import asyncio
from typing import Final

from nicegui import background_tasks, ui

from .highlighting import Code, Highlighter
from .markdown import Markdown

_HIGHLIGHTER: Final = Highlighter()
"""Shared by all viewers."""
_WAIT_S: Final = 1.0
"""Interval at which a text is updated with the code that is highlighted so far."""


class MarkdownView:
    def __init__(self) -> None:
        self._element = ui.html("", sanitize=True).props("dir=auto")
        self._newest = Markdown("")
        self._is_complete = False
        """Whether the newest text is shown in its final form."""
        self._is_highlighting = False

    def show(self, text: str, *, is_plain: bool = False) -> None:
        """is_plain: shows the text without rendering"""
        is_first = not self._newest.text
        self._newest = Markdown(text, is_plain=is_plain)
        self._is_complete = not any(map(_HIGHLIGHTER.accepts, self._newest.codes))
        if self._is_complete or is_first:
            self._show_newest()
        if not self._is_complete and not self._is_highlighting:
            self._is_highlighting = True
            background_tasks.create(self._highlight(), name="code highlighting")

    async def _highlight(self) -> None:
        """Shows the newest text once its code is highlighted: shown plain first, growing code would flicker."""
        try:
            while not self._is_complete and not self._element.is_deleted:
                asked = self._newest
                asking = asyncio.ensure_future(_ask(asked.codes))
                while not asking.done():
                    await asyncio.wait((asking,), timeout=_WAIT_S)
                    if not self._is_complete:
                        self._show_newest()
                self._is_complete |= asked.text == self._newest.text
        finally:
            self._is_highlighting = False

    def _show_newest(self) -> None:
        if not self._element.is_deleted:
            self._element.set_content(self._newest.html(_known(self._newest.codes)))


async def _ask(found: list[Code]) -> None:
    for code in found:
        await _HIGHLIGHTER.highlighted(code)


def _known(found: list[Code]) -> dict[Code, str]:
    return {code: html for code in found if (html := _HIGHLIGHTER.cached(code)) is not None}
