"""A command on its own terminal: what it shows, and keys for it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Self

_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[=>]|\][^\x07]*\x07)")
TIMEOUT_S = 30.0
_LINES = 40


class Terminal:
    """`llmbackend` with arguments, at the end of a pseudo terminal that it is the foreground process of."""

    def __init__(
        self,
        *arguments: str,
        columns: int = 100,
        cwd: Path | None = None,
        program: str = "llmbackend.cli",
    ) -> None:
        self._own, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, columns, 0, 0))
        environment = os.environ | {"TERM": "xterm", "COLUMNS": str(columns), "LINES": str(_LINES)}
        command = ["setsid", "--ctty", sys.executable, "-m", program, *arguments]
        self.process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment, cwd=cwd)
        os.close(end)
        self._raw = ""
        self._seen = 0

    @property
    def shown(self) -> str:
        """All that was written so far, without what terminals obey."""
        return _ESCAPE.sub("", self._raw).replace("\r", "")

    def wait_for(self, text: str) -> str:
        """Until `text` stands behind what earlier calls waited for; what was written up to its end."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while (found := self.shown.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline_s and self._read(), f"no {text!r} in {self.shown[self._seen :]!r}"
        begin, self._seen = self._seen, found + len(text)
        return self.shown[begin : self._seen]

    def send(self, keys: str) -> None:
        os.write(self._own, keys.encode())

    def answer_prompt(self, keys: str) -> None:
        """Once the chat asks."""
        self.wait_for(">>> ")
        self.send(keys)

    def press_until(self, key: str, text: str) -> None:
        """`key`, again each second until `text` stands behind what earlier calls waited for: Python's input() with
        readline loses a signal between its prompt and its wait."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while self.shown.find(text, self._seen) < 0:
            assert time.monotonic() < deadline_s, f"no {text!r} in {self.shown[self._seen :]!r}"
            self.send(key)
            while self.shown.find(text, self._seen) < 0 and self._read(1.0):
                pass
        self.wait_for(text)

    def end(self) -> int:
        """Reads to the end; the exit code."""
        while self._read():
            pass
        return self.process.wait(timeout=TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._own)

    def _read(self, timeout_s: float = TIMEOUT_S) -> bool:
        """More output, within the timeout; False: there is no more."""
        if not select.select([self._own], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._own, 65536)
        except OSError:  # the other end is closed
            return False
        self._raw += data.decode("utf-8", "replace")
        return bool(data)
