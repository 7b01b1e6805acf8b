"""Which request may have killed an engine, and how that is found out without failing an innocent one.

For: TaskMap, under whose lock every call is made. Does not know: how an engine died, beyond a word for it.
Ideas: a request for which an engine has given TRIAL_TOKENS tokens since it took it (a prefill and a decode step) is not
what killed it. The others are suspects, and a suspect is tried alone: it is handed to an engine that has nothing else
untried, and nothing else is handed to that engine until the trial is over. A death during a trial speaks against the
one request it can have been: two that came from inside the engine convict it. A SIGKILL comes from outside, from
somebody or from a kernel short of memory (which a request may have caused), and counts for less.
Invariant: only a request that was the sole untried one at two deaths or more, and passed no trial in between, is
convicted.
"""

from __future__ import annotations

from llmbackend.engine.transport import DeathKind

from .infer_task import InferTask

TRIAL_TOKENS = 2
CONVICTION = 2.0
WEIGHT_OF_KILLED = 0.4


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
            task.trial_deaths.clear()

    def leave(self, request_id: str) -> InferTask | None:
        """The request is over, or tried."""
        self._outputs_left.pop(request_id, None)
        return self._untried.pop(request_id, None)

    def engine_died(self, kind: DeathKind) -> InferTask | None:
        """What was untried is suspect from now on. The request that is convicted, if one is."""
        suspects = list(self._untried.values())
        self._untried, self._outputs_left = {}, {}
        for task in suspects:
            task.is_suspect = True
        if len(suspects) != 1:
            return None
        deaths = suspects[0].trial_deaths
        deaths.append(kind)
        weight = sum(WEIGHT_OF_KILLED if death == "killed" else 1.0 for death in deaths)
        return suspects[0] if weight >= CONVICTION else None
