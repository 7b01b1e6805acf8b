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

    def close(self) -> None:
        """After the process is gone."""
        self._thread.join(1.0)  # unless something that left its session holds the pipe
        if not self._thread.is_alive():
            self._output.close()

    def _read(self) -> None:
        while line := self._output.readline(LONGEST_LINE_BYTES):
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text)
            log.info("%s: %s", self.name, text)
