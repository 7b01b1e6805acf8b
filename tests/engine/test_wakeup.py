"""The flag that wakes an engine's loop: no call of it is lost, however threads take turns."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from llmbackend.engine.process.supervisor import Wakeup
from llmbackend.fork_server.client import wait_readable


class _Interrupted:
    """A socket during whose first send, before it or behind it, other threads have their turn."""

    def __init__(self, inner: socket.socket, others: Callable[[], None], first: bool) -> None:
        self._inner = inner
        self._others: Callable[[], None] | None = others
        self._first = first

    def send(self, data: bytes) -> int:
        others, self._others = self._others, None
        if others is not None and self._first:
            others()
        count = self._inner.send(data)
        if others is not None and not self._first:
            others()
        return count

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("first", [True, False], ids=["before the byte", "behind the byte"])
@pytest.mark.parametrize("others", [("set", "clear"), ("clear",), ("clear", "set"), ("clear", "set", "clear")])
def test_a_wake_up_is_never_lost(others: tuple[str, ...], first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wakeup = Wakeup()

    def take_turns() -> None:
        for name in others:
            getattr(wakeup, name)()

    monkeypatch.setattr(wakeup, "_writer", _Interrupted(wakeup._writer, take_turns, first))
    try:
        wakeup.set()
        wakeup.set()
        assert wait_readable(wakeup.fileno(), 0.0), "nobody wakes the loop for the second call"
        wakeup.clear()
        wakeup.clear()
        assert not wait_readable(wakeup.fileno(), 0.0), "the loop would never sleep"
    finally:
        wakeup.close()
