"""Which request may have killed an engine, and how that is found out without failing an innocent one.

For: ModelState, under whose lock every call is made. Does not know: why an engine died (somebody may have killed it).
Ideas: a request that an engine has already given a token for, since it took it, is not what killed it at once. The
others are suspects, and a suspect is tried alone: it is handed to an engine that has nothing else untried, and nothing
else is handed to that engine until it gave a token for it. An engine that dies during such a trial is a strike against
the one request it can have been; the second strike convicts it.
Invariant: only a request that was the sole untried one at STRIKES deaths, with no token for it in between, is
convicted.
"""

from __future__ import annotations

from .infer_task import InferTask

STRIKES = 2


class Probation:
    """The requests that one engine took and has given no token for yet."""

    def __init__(self) -> None:
        self._untried: dict[str, InferTask] = {}

    def __len__(self) -> int:
        return len(self._untried)

    def admits(self, task: InferTask) -> bool:
        """Whether the engine may take `task` now, or has to finish a trial first."""
        first = next(iter(self._untried.values()), None)
        return first is None or not (task.is_suspect or first.is_suspect)

    def take(self, task: InferTask) -> None:
        self._untried[task.request_id] = task

    def leave(self, request_id: str) -> None:
        """The engine gave a token for the request, which acquits it of earlier deaths, or the request is over."""
        task = self._untried.pop(request_id, None)
        if task is not None:
            task.is_suspect = False
            task.strikes = 0

    def engine_died(self) -> InferTask | None:
        """What was untried is suspect from now on. The request that is convicted, if one is."""
        suspects, self._untried = list(self._untried.values()), {}
        for task in suspects:
            task.is_suspect = True
        if len(suspects) != 1:
            return None
        suspects[0].strikes += 1
        return suspects[0] if suspects[0].strikes >= STRIKES else None
