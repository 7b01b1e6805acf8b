"""A helper process that answers requests, so that its work is not attributed to another process.

Used by the attacker and the bystanders. Independent of what they do. Invariant: leaving the context ends the process.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

_END_S = 10.0


class Worker:
    """`main(connection, *arguments)` runs in the process until the connection ends."""

    def __init__(self, main: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, self._theirs = context.Pipe()
        self._process = context.Process(target=main, args=(self._theirs, *arguments), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        self._theirs.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ours.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def tell(self, message: Any) -> None:
        self._ours.send(message)

    def answer(self, timeout_s: float) -> Any:
        """Raises TimeoutError, EOFError when the process has ended."""
        if not self._ours.poll(timeout_s):
            raise TimeoutError(f"no answer in {timeout_s:g} s")
        return self._ours.recv()


def messages(parent: Connection) -> Any:
    """What the parent tells, until it has ended."""
    try:
        while True:
            yield parent.recv()
    except EOFError:
        return
