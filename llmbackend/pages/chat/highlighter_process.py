"""`python -m llmbackend.pages.chat.highlighter_process`: highlights code for highlighting.py.

A separate process, because some of Pygments' patterns take exponential time on text that a model may write. Each input
line is JSON, `[language, code]`; each output line is the HTML as JSON, or null for an unknown language. Code that
exceeds the limit of CPU time or memory ends this process, as does the end of input.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Final

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

CLASS_PREFIX: Final = "hl-"
MAX_CPU_S: Final = 0.4
"""Limit for one piece of code."""
_MAX_MEMORY_BYTES: Final = 512 << 20
_NICENESS: Final = 10
"""Gives engines on the same cores precedence."""
_FORMATTER: Final = HtmlFormatter(nowrap=True, classprefix=CLASS_PREFIX)


def main() -> None:
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    # ends the process; a Python handler would have to wait for the pattern
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin.buffer:
        language, code = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        answer = highlighted(language, code)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def highlighted(language: str, code: str) -> str | None:
    """`code` as HTML; None = unknown language."""
    try:
        lexer = get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        return None
    return str(highlight(code, lexer, _FORMATTER))


if __name__ == "__main__":
    main()
