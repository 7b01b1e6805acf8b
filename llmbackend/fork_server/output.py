"""Passes on what a process prints, line by line, and keeps the last lines, which say why it died."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable

END_TIMEOUT_S = 1.0
NUM_LINES_KEPT = 20
MAX_LINE_BYTES = 1 << 16


class OutputReader:
    """Reads the pipe `output_fd`, which it owns, on a thread of its own."""

    def __init__(self, output_fd: int, write: Callable[[str], object], thread_name: str) -> None:
        """`write` is called on the thread with each line, its end of line included. Raises RuntimeError when there can
        be no more threads; `output_fd` is closed then."""
        self._output = os.fdopen(output_fd, "rb")
        self._write = write
        self._last_lines: collections.deque[str] = collections.deque(maxlen=NUM_LINES_KEPT)
        self._thread = threading.Thread(target=self._read, name=thread_name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._output.close()
            raise

    @property
    def last_lines(self) -> str:
        return "\n".join(self._last_lines)

    def wait(self) -> None:
        """Until all that an ended process has printed is passed on; not for another process that holds its pipe."""
        self._thread.join(END_TIMEOUT_S)

    def _read(self) -> None:
        with self._output:
            while line := self._output.readline(MAX_LINE_BYTES):
                text = line.decode(errors="replace")
                self._last_lines.append(text.rstrip())
                self._write(text)
