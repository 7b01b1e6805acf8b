"""Highlighter: highlights code in a separate process, which is killed if that takes too long.

Used by markdown_view.py. Independent of Markdown and pages. Invariants: no pattern runs on the event loop; a caller
waits at most `_WAIT_S`, then its code stays plain; a language whose code ended the process is not tried again for
`_LANGUAGE_RETRY_S`. Used only on the event loop.
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
"""Longer code stays plain."""
_MODULE: Final = "llmbackend.pages.chat.highlighter_process"
_WAIT_S: Final = 5.0
"""Maximum wait for the process, including its earlier work."""
_LANGUAGE_RETRY_S: Final = 60.0
_MAX_KEPT: Final = 64
"""How many pieces of highlighted code are cached."""


class Code(NamedTuple):
    language: str
    text: str


class Highlighter:
    def __init__(self) -> None:
        self._process: Popen[bytes] | None = None
        self._is_asked = asyncio.Lock()
        self._retry_at_s: dict[str, float] = {}
        """For each language: until when it is not tried again, in the event loop's time."""
        self._kept: OrderedDict[Code, str | None] = OrderedDict()

    def cached(self, code: Code) -> str | None:
        """The cached HTML."""
        return self._kept.get(code)

    def accepts(self, code: Code) -> bool:
        """Whether `highlighted` would ask the process."""
        if code in self._kept or not code.language or len(code.text) > MAX_CHARACTERS:
            return False
        return self._retry_at_s.get(code.language, 0.0) <= asyncio.get_running_loop().time()

    async def highlighted(self, code: Code) -> str | None:
        """The HTML; None for code that is too long or too slow, or of an unknown language."""
        if self.accepts(code):
            try:
                async with asyncio.timeout(_WAIT_S), self._is_asked:
                    if self.accepts(code):  # not if another caller asked meanwhile
                        self._keep(code, await self._ask(code))
            except TimeoutError:
                self._keep(code, None)
        return self.cached(code)

    async def close(self) -> None:
        """Ends the process; the next call starts another one."""
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(_end, process)

    async def _ask(self, code: Code) -> str | None:
        if self._process is None:
            self._process = Popen([sys.executable, "-m", _MODULE], stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        process = self._process
        try:
            return await asyncio.to_thread(_answer, process, code)
        except (OSError, ValueError):
            self._process = None
            log.info("highlighting code in %.32r took too long", code.language)
            self._retry_at_s[code.language] = asyncio.get_running_loop().time() + _LANGUAGE_RETRY_S
            return None
        except BaseException:  # cancelled: the next caller would read this answer
            self._process = None
            process.kill()
            raise

    def _keep(self, code: Code, html: str | None) -> None:
        self._kept[code] = html
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)


def _answer(process: Popen[bytes], code: Code) -> str | None:
    """Raises OSError or ValueError when the process ends instead; then it is reaped."""
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
    with contextlib.suppress(BrokenPipeError), process:  # waits for the process and closes its pipes
        pass


def highlight_css() -> str:
    """Styles of highlighted code in both themes."""
    light: Any = HtmlFormatter(style="default", classprefix=CLASS_PREFIX)
    dark: Any = HtmlFormatter(style="github-dark", classprefix=CLASS_PREFIX)
    return "\n".join(
        line
        for formatter, place in ((light, "body--light"), (dark, "body--dark"))
        for line in formatter.get_style_defs(f".{place} .code").splitlines()
        if f".{CLASS_PREFIX}" in line
    )
