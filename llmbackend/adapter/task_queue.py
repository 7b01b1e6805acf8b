"""The requests of one model that no engine has taken yet, in the order in which engines take them.

For: TaskMap, under whose lock every call is made. Does not know: engines, responses, time. Invariants: a lower
priority level goes first, as in Triton; within a level it is first come, first served, but what a dead engine gave back
goes before what never ran, and what waited longer than its level's timeout (action DELAY) goes last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .infer_task import InferTask


class TaskQueue:
    """Every operation costs O(1) in requests."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, bool], OrderedDict[str, InferTask]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, task: InferTask) -> bool:
        return task.request_id in self._lanes.get(task.lane, ())

    def num_in_level(self, level: int) -> int:
        return sum(len(self._lanes.get((level, delayed), ())) for delayed in (False, True))

    def append(self, task: InferTask) -> None:
        self._lanes.setdefault(task.lane, OrderedDict())[task.request_id] = task
        self._size += 1

    def put_back(self, tasks: Sequence[InferTask]) -> None:
        """Before all others of their level, and in this order."""
        for task in reversed(tasks):
            self.append(task)
            self._lanes[task.lane].move_to_end(task.request_id, last=False)

    def head(self) -> InferTask | None:
        """The next one to be taken."""
        return next(iter(self._lanes[min(self._lanes)].values())) if self._lanes else None

    def remove(self, task: InferTask) -> bool:
        """Whether it was there."""
        lane = self._lanes.get(task.lane, OrderedDict())
        if lane.pop(task.request_id, None) is None:
            return False
        if not lane:
            del self._lanes[task.lane]
        self._size -= 1
        return True

    def delay(self, task: InferTask) -> bool:
        """Moves a task behind all others of its level; whether it was there."""
        if not self.remove(task):
            return False
        task.is_delayed = True
        self.append(task)
        return True
