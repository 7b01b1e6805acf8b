"""Wake-ups that wait until a thread has sent all the responses that it has.

For: backends that send responses to many requests at once, and receivers of responses on other threads. Does not know:
requests, event loops. Invariants: a wake-up is called by the thread that asked for it, at once or at the end of its
outermost `responses_together`, once however often it was asked for; it is called also when that ends by an exception.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class _Waiting(threading.local):
    wakeups: dict[Callable[[], None], None] | None = None


_waiting = _Waiting()


class responses_together:  # noqa: N801  as context managers of the standard library
    """Within it, the calling thread wakes the receivers of its responses once, at the end. A receiver that runs earlier
    would only take the interpreter's lock from the thread that has more for it. The thread must not block: responses
    of other threads to the same receiver wait, too."""

    __slots__ = ("_is_outermost",)

    def __enter__(self) -> None:
        self._is_outermost = _waiting.wakeups is None
        if self._is_outermost:
            _waiting.wakeups = {}

    def __exit__(self, *error: object) -> None:
        if self._is_outermost:
            wakeups, _waiting.wakeups = _waiting.wakeups, None
            for wake in wakeups or ():
                wake()


def wake_receiver(wake: Callable[[], None]) -> None:
    """Calls `wake`, which must not raise, now or at the end of `responses_together`."""
    if _waiting.wakeups is None:
        wake()
    else:
        _waiting.wakeups[wake] = None
