"""Highlighter: code as coloured HTML, made by a process that is killed when a text takes its patterns too long.

For: markdown_view.py. Does not know: Markdown, pages. Invariants: no pattern runs on the event loop; a caller waits at
most `_WAIT_S`, after which its code stays plain; a language whose code ended the process is not tried again for a
while. To be used on the event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import OrderedDict
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, Final, NamedTuple

from pygments.formatters import HtmlFormatter

from .highlighter_process import CLASS_PREFIX

log = logging.getLogger(__name__)

MAX_CHARACTERS: Final = 24 << 10
"""Longer code has no colours."""
_MODULE: Final = "llmbackend.pages.chat.highlighter_process"
_WAIT_S: Final = 5.0
"""For the process, including code of others that it colours first."""
_LEFT_ALONE_S: Final = 60.0
_MAX_KEPT: Final = 64
"""Pieces of code whose HTML is kept, for a page that shows them again."""


class Code(NamedTuple):
    language: str
    text: str


class Highlighter:
    def __init__(self) -> None:
        self._process: Popen[bytes] | None = None
        self._is_asked = asyncio.Lock()
        self._left_alone_until_s: dict[str, float] = {}
        """By language."""
        self._kept: OrderedDict[Code, str | None] = OrderedDict()

    def known(self, code: Code) -> str | None:
        """The HTML of code that was coloured before."""
        return self._kept.get(code)

    def takes(self, code: Code) -> bool:
        """Whether `coloured` would ask the process."""
        if code in self._kept or not code.language or len(code.text) > MAX_CHARACTERS:
            return False
        return self._left_alone_until_s.get(code.language, 0.0) <= asyncio.get_running_loop().time()

    async def coloured(self, code: Code) -> str | None:
        """The HTML; None where there is none: too long, too slow, or of a language that is not known."""
        if self.takes(code):
            try:
                async with asyncio.timeout(_WAIT_S), self._is_asked:
                    if self.takes(code):  # another caller may have asked meanwhile
                        self._keep(code, await self._ask(code))
            except TimeoutError:
                self._keep(code, None)
        return self.known(code)

    async def close(self) -> None:
        """Ends the process; the next question starts another one."""
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(_end, process)

    async def _ask(self, code: Code) -> str | None:
        process = self._process = self._process or _start()
        try:
            return await asyncio.to_thread(_answer, process, code)
        except (OSError, ValueError):
            self._process = None
            self._leave_alone(code.language)
            return None
        except BaseException:  # cancelled: the next caller would read this answer
            self._process = None
            process.kill()
            raise

    def _leave_alone(self, language: str) -> None:
        log.info("code in %.32r took too long to colour", language)
        self._left_alone_until_s[language] = asyncio.get_running_loop().time() + _LEFT_ALONE_S

    def _keep(self, code: Code, html: str | None) -> None:
        self._kept[code] = html
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)


def _start() -> Popen[bytes]:
    return Popen([sys.executable, "-m", _MODULE], stdin=PIPE, stdout=PIPE, stderr=DEVNULL)


def _answer(process: Popen[bytes], code: Code) -> str | None:
    """Raises OSError or ValueError when the process ends instead; then nothing is left of it."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(code).encode() + b"\n")
        process.stdin.flush()
        answer: str | None = json.loads(process.stdout.readline())
    except (OSError, ValueError):
        _end(process)
        raise
    return answer


def _end(process: Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError), process:  # waits for it and closes its pipes
        pass


def highlight_css() -> str:
    """The colours of code in both themes."""
    light: Any = HtmlFormatter(style="default", classprefix=CLASS_PREFIX)
    dark: Any = HtmlFormatter(style="github-dark", classprefix=CLASS_PREFIX)
    return "\n".join(
        line
        for formatter, place in ((light, "body--light"), (dark, "body--dark"))
        for line in formatter.get_style_defs(f".{place} .code").splitlines()
        if f".{CLASS_PREFIX}" in line
    )
