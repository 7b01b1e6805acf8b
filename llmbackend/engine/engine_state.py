"""What has become of an engine, for those who watch it: it starts, is ready, was lost and comes back, or stops.

For: the LLM manager, whose loop owns an EngineHistory; any thread may read `current`. Does not know: why an engine
ended beyond its text. Invariant: a state is a frozen message; each change replaces it.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec

StateName = Literal["starting", "ready", "recovering", "failed", "stopped"]


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine since its last change.

    name          "failed": it ended too often in a row for requests to wait for it; it is still tried again
    time_s        of the change, Unix time
    reason        why the last engine ended; "" = none has
    pid           of its process; None = it has none now, or runs on a thread
    num_restarts  engines that have ended and were followed by another one
    recovery_s    of a "ready" that follows a lost engine: how long there was none
    """

    name: StateName = "starting"
    time_s: float
    reason: str = ""
    pid: int | None = None
    num_restarts: int = 0
    recovery_s: float | None = None


class EngineHistory:
    """One thread changes it."""

    def __init__(self) -> None:
        self.current = EngineState(time_s=time.time())
        self._lost_s: float | None = None
        """Since when there is no engine, by the monotonic clock; None = there is one, or was none yet."""

    def ready(self, pid: int | None) -> EngineState:
        recovery_s = None if self._lost_s is None else time.monotonic() - self._lost_s
        self._lost_s = None
        return self._change("ready", pid=pid, recovery_s=recovery_s)

    def lost(self, reason: str, is_given_up: bool) -> EngineState:
        if self._lost_s is None:
            self._lost_s = time.monotonic()
        num_restarts = self.current.num_restarts + 1
        return self._change("failed" if is_given_up else "recovering", reason=reason, num_restarts=num_restarts)

    def stopped(self) -> EngineState:
        return self._change("stopped", reason="")

    def _change(
        self,
        name: StateName,
        *,
        reason: str | None = None,
        pid: int | None = None,
        num_restarts: int | None = None,
        recovery_s: float | None = None,
    ) -> EngineState:
        before = self.current
        self.current = EngineState(
            name=name,
            time_s=time.time(),
            reason=before.reason if reason is None else reason,
            pid=pid,
            num_restarts=before.num_restarts if num_restarts is None else num_restarts,
            recovery_s=recovery_s,
        )
        return self.current
