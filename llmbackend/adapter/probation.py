"""Which request may have killed an engine, and how that is found out without failing an innocent one.

For: TaskMap, under whose lock every call is made. Does not know: why an engine died (somebody may have killed it).
Ideas: a request for which an engine has given TRIAL_TOKENS tokens since it took it (a prefill and a decode step) is not
what killed it. The others are suspects, and a suspect is tried alone: it is handed to an engine that has nothing else
untried, and nothing else is handed to that engine until the trial is over. An engine that dies during a trial is a
strike against the one request it can have been; the second strike convicts it.
Invariant: only a request that was the sole untried one at STRIKES deaths, and passed no trial in between, is convicted.
"""

from __future__ import annotations

from .infer_task import InferTask

STRIKES = 2
TRIAL_TOKENS = 2


class Probation:
    """The requests that one engine took and has given fewer than TRIAL_TOKENS tokens for."""

    def __init__(self) -> None:
        self._untried: dict[str, InferTask] = {}
        self._outputs_left: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._untried)

    def admits(self, task: InferTask) -> bool:
        """Whether the engine may take `task` now, or has to finish a trial first."""
        first = next(iter(self._untried.values()), None)
        return first is None or not (task.is_suspect or first.is_suspect)

    def take(self, task: InferTask) -> None:
        self._untried[task.request_id] = task
        self._outputs_left[task.request_id] = TRIAL_TOKENS

    def output_came(self, request_id: str) -> None:
        """The engine gave a token for the request; enough of them acquit it of earlier deaths."""
        left = self._outputs_left.get(request_id, 0) - 1
        if left > 0:
            self._outputs_left[request_id] = left
        elif task := self.leave(request_id):
            task.is_suspect = False
            task.strikes = 0

    def leave(self, request_id: str) -> InferTask | None:
        """The request is over, or tried."""
        self._outputs_left.pop(request_id, None)
        return self._untried.pop(request_id, None)

    def engine_died(self) -> InferTask | None:
        """What was untried is suspect from now on. The request that is convicted, if one is."""
        suspects = list(self._untried.values())
        self._untried, self._outputs_left = {}, {}
        for task in suspects:
            task.is_suspect = True
        if len(suspects) != 1:
            return None
        suspects[0].strikes += 1
        return suspects[0] if suspects[0].strikes >= STRIKES else None
