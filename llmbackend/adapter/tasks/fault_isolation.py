"""Finds the request that kills engines, so that no other one fails: the only unproven request in two or more deaths."""

from __future__ import annotations

from typing import Final

from llmbackend.engine.errors import DeathKind

from .infer_task import InferTask

CLEARING_TOKENS = 2
"""A request that has got this many tokens from an engine (a prefill and a decode step) is proven harmless."""
BLAME_THRESHOLD = 2.0
KILLED_WEIGHT = 0.4
"""Weight of a death whose cause may be external: SIGKILL by a person or by a kernel that is out of memory (possibly
because of a request), or an unreachable remote engine. All other deaths have weight 1."""
_FROM_OUTSIDE: Final[tuple[DeathKind, ...]] = ("killed", "memory", "disconnect")


class FaultIsolation:
    """For one engine.

    A request is unproven until the engine has produced CLEARING_TOKENS tokens for it. When an engine dies, its unproven
    requests become suspects. A suspect runs in isolation: it goes to an engine that has no other unproven request, and
    that engine gets no other request until the suspect is proven. A death in isolation counts against the suspect; at
    BLAME_THRESHOLD it is blamed and ended.
    Owner: TaskMap, which holds its lock during every call.
    """

    def __init__(self) -> None:
        self._unproven: dict[str, InferTask] = {}
        self._outputs_left: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._unproven)

    @property
    def is_isolating(self) -> bool:
        """Whether the engine is running a suspect and takes no other requests."""
        first = next(iter(self._unproven.values()), None)
        return first is not None and first.is_suspect

    def admits(self, task: InferTask) -> bool:
        """Whether the engine may take `task` now."""
        first = next(iter(self._unproven.values()), None)
        return first is None or not (task.is_suspect or first.is_suspect)

    def add(self, task: InferTask) -> None:
        self._unproven[task.request_id] = task
        self._outputs_left[task.request_id] = CLEARING_TOKENS

    def record_output(self, request_id: str) -> None:
        """Called when the engine has produced a token for the request; enough of them clear it of earlier deaths."""
        left = self._outputs_left.get(request_id, 0) - 1
        if left > 0:
            self._outputs_left[request_id] = left
        elif task := self.discard(request_id):
            task.is_suspect = False
            task.isolated_deaths.clear()

    def discard(self, request_id: str) -> InferTask | None:
        """Forgets a request that has ended or is proven. Returns its task if it was unproven."""
        self._outputs_left.pop(request_id, None)
        return self._unproven.pop(request_id, None)

    def engine_died(self, kind: DeathKind) -> InferTask | None:
        """Makes all unproven requests suspects. Returns the blamed one, if any."""
        suspects = list(self._unproven.values())
        self._unproven, self._outputs_left = {}, {}
        for task in suspects:
            task.is_suspect = True
        if len(suspects) != 1:
            return None
        deaths = suspects[0].isolated_deaths
        deaths.append(kind)
        weight = sum(KILLED_WEIGHT if death in _FROM_OUTSIDE else 1.0 for death in deaths)
        return suspects[0] if weight >= BLAME_THRESHOLD else None
