"""The flag that wakes a loop: no call of it is lost, however threads take turns."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from llmbackend.fork_server.client import wait_readable
from llmbackend.waiting.wakeup import Wakeup


class _Interrupted:
    """os.eventfd_write, during whose first call, before it or behind it, other threads have their turn."""

    def __init__(self, others: Callable[[], None], first: bool) -> None:
        self._write = os.eventfd_write
        self._others: Callable[[], None] | None = others
        self._first = first

    def __call__(self, fd: int, value: int) -> None:
        others, self._others = self._others, None
        if others is not None and self._first:
            others()
        self._write(fd, value)
        if others is not None and not self._first:
            others()


@pytest.mark.parametrize("first", [True, False], ids=["before the write", "behind the write"])
@pytest.mark.parametrize("others", [("set", "clear"), ("clear",), ("clear", "set"), ("clear", "set", "clear")])
def test_a_wake_up_is_never_lost(others: tuple[str, ...], first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wakeup = Wakeup()

    def take_turns() -> None:
        for name in others:
            getattr(wakeup, name)()

    monkeypatch.setattr(os, "eventfd_write", _Interrupted(take_turns, first))
    try:
        wakeup.set()
        wakeup.set()
        assert wait_readable(wakeup.fileno(), 0.0), "nobody wakes the loop for the second call"
        wakeup.clear()
        wakeup.clear()
        assert not wait_readable(wakeup.fileno(), 0.0), "the loop would never sleep"
    finally:
        wakeup.close()
