"""What a process prints, in the host's log.

For: stubs and their templates. Does not know: processes. Invariant: a line is logged as soon as it is complete, or very
long; the last ones are kept, because they say why a process died.
"""

from __future__ import annotations

import collections
import logging
import threading
from typing import IO

log = logging.getLogger("llmbackend.backends.python.output")

END_TIMEOUT_S = 1.0
LINES_KEPT = 20
LONGEST_LINE_BYTES = 1 << 16


class OutputLog:
    """Reads on a thread of its own. `name` stands before each line."""

    def __init__(self, name: str, output: IO[bytes]) -> None:
        self.name = name
        self._output = output
        self._last_lines: collections.deque[str] = collections.deque(maxlen=LINES_KEPT)
        self._thread = threading.Thread(target=self._read, name=f"python-{name}-output", daemon=True)
        self._thread.start()

    @property
    def last_lines(self) -> str:
        return "\n".join(self._last_lines)

    def wait(self) -> None:
        """Until all that a process which is gone has printed is logged; not for what else may hold its pipe."""
        self._thread.join(END_TIMEOUT_S)

    def _read(self) -> None:
        with self._output:
            while line := self._output.readline(LONGEST_LINE_BYTES):
                text = line.decode(errors="replace").rstrip()
                self._last_lines.append(text)
                log.info("%s: %s", self.name, text)
