"""The order in which engines take the requests of a model.

For: TaskMap. Does not know: engines, limits, deadlines. Invariant: every operation is O(1), but for looking at several
requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from .infer_task import InferTask


class TaskQueue:
    """The requests that no engine has yet, in the order in which engines take them.

    A lower priority level goes first, as in Triton. Within a level it is first come, first served; but requests of a
    dead engine go before all others, and requests that waited longer than their level's timeout (action DELAY) go last.
    Owner: TaskMap, under whose lock every call is made.
    """

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
        """Puts the tasks before all others of their level, in this order."""
        for task in reversed(tasks):
            self.append(task)
            self._lanes[task.lane].move_to_end(task.request_id, last=False)

    def first(self, count: int) -> Iterator[InferTask]:
        """The first `count` tasks in order. Those that were given may be removed meanwhile."""
        for lane in sorted(self._lanes):
            some = list(islice(self._lanes[lane].values(), count))
            yield from some
            count -= len(some)
            if not count:
                return

    def remove(self, task: InferTask) -> bool:
        """Returns whether the task was queued."""
        lane = self._lanes.get(task.lane, OrderedDict())
        if lane.pop(task.request_id, None) is None:
            return False
        if not lane:
            del self._lanes[task.lane]
        self._size -= 1
        return True

    def delay(self, task: InferTask) -> bool:
        """Moves a task behind all others of its level; returns whether it was queued."""
        if not self.remove(task):
            return False
        task.is_delayed = True
        self.append(task)
        return True
