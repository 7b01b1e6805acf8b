"""The infer-task map: every live request of a model, which engine has it, and which requests wait for one.

For: ModelState, and through it Triton's threads and the engines' loops. Does not know: responses, metrics, managers.
It is the recovery log: a task holds its prompt, the tokens so far and its sampling state, so that what a dead engine
had goes back into the queue and on to the next engine.
Invariants: a task in the map is either on its way into the queue, in it, or owned by exactly one engine; a task that is
popped is nowhere else. Every method is atomic (`_lock`), and calls nobody.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llmbackend.core.backend_api import Tenant, TritonError
from llmbackend.engine.infer_request import StepOutput
from llmbackend.engine.transport import DeathKind
from llmbackend.waiting.queue_policy import QueuePolicies

from .infer_task import InferTask
from .probation import Probation
from .task_queue import TaskQueue


@dataclass(eq=False, slots=True)
class Holder:
    """What one engine has. `wake` has its loop look for requests and controls. Owner of the other fields: the map's
    lock."""

    wake: Callable[[], None]
    probation: Probation = field(default_factory=Probation)
    given_up: list[tuple[str, TritonError | None]] = field(default_factory=list)
    """Requests to end with this error: cancelled, or too late; or without one: stopped by their client. Their tasks
    are still in the map."""
    stopped_ids: list[str] = field(default_factory=list)
    """Requests that a stop string ended before the engine did; their tasks are gone."""


@dataclass(frozen=True, slots=True)
class Controls:
    """ended: tasks that are out of the map, to be answered. stop: ids that the engine must drop. elsewhere: holders
    that must look at their own controls."""

    ended: list[tuple[InferTask, TritonError | None]]
    stop: list[str]
    elsewhere: list[Holder]


@dataclass(frozen=True, slots=True)
class Loss:
    """What a dead engine had. go_on: back in the queue. convicted: out of the map, because it killed engines."""

    go_on: list[InferTask]
    convicted: InferTask | None


class TaskMap:
    def __init__(self, policies: QueuePolicies, max_queue_size: int) -> None:
        self._policies = policies
        self._max_queue_size = max_queue_size
        self._lock = threading.Lock()
        self._tasks: dict[str, InferTask] = {}
        self._holder_of: dict[str, Holder] = {}
        self._queue = TaskQueue()
        self._reserved: Counter[int] = Counter()
        """Places by priority level, for requests that are being converted."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tasks

    def get(self, request_id: str) -> InferTask | None:
        return self._tasks.get(request_id)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_waiting(self) -> int:
        """Those in the queue, and those that have a place in it and are being converted."""
        with self._lock:
            return len(self._queue) + self._reserved.total()

    def ids_of(self, client_id: str, by: Tenant) -> list[str]:
        """The requests to which their client gave this id, and which `by` may end."""
        with self._lock:
            return [
                request_id
                for request_id, task in self._tasks.items()
                if task.client_id == client_id and by.may_end(task.tenant)
            ]

    def admit(self, task: InferTask) -> str:
        """Takes a new task into the map, but not yet into the queue; or says why the queue is too full for it."""
        with self._lock:
            refusal = self._why_full(task.infer_request.priority)
            if not refusal:
                self._tasks[task.request_id] = task
        return refusal

    def reserve(self, level: int) -> str:
        """A place in the queue for a request that is not a task yet; or says why the queue is too full for it."""
        with self._lock:
            refusal = self._why_full(level)
            if not refusal:
                self._reserved[level] += 1
        return refusal

    def release(self, level: int) -> None:
        """Gives a reserved place back."""
        with self._lock:
            self._reserved[level] -= 1

    def _why_full(self, level: int) -> str:
        most = self._policies.policy(level).max_queue_size
        in_level = self._queue.num_in_level(level) + self._reserved[level]
        if most and in_level >= most:
            return f"its queue holds {in_level} requests of this priority"
        if len(self._queue) + self._reserved.total() >= self._max_queue_size:
            return f"its queue holds {self._max_queue_size} requests"
        return ""

    def enqueue(self, task: InferTask) -> None:
        """Queues an admitted task, unless it has ended already."""
        with self._lock:
            if task.request_id in self._tasks:
                self._queue.append(task)

    def take(self, holder: Holder, room: int, num_engines: int) -> list[InferTask]:
        """At most `room` tasks in the queue's order for the engine of `holder`, and no more than its share among
        `num_engines`."""
        with self._lock:
            share = -(-len(self._queue) // num_engines)
            taken: list[InferTask] = []
            while len(taken) < min(room, share):
                task = self._queue.head()
                if task is None or not holder.probation.admits(task):
                    break
                self._queue.remove(task)
                self._holder_of[task.request_id] = holder
                holder.probation.take(task)
                taken.append(task)
            return taken

    def outputs_came(self, holder: Holder, outputs: Sequence[StepOutput]) -> None:
        """The engine did something for these requests."""
        if not holder.probation:
            return
        with self._lock:
            for output in outputs:
                holder.probation.output_came(output.request_id)

    def pop(self, request_id: str) -> InferTask | None:
        """Forgets a request, wherever it is; whoever gets the task answers it."""
        with self._lock:
            return self._pop(request_id)

    def pop_stopped(self, request_id: str, holder: Holder) -> None:
        """Forgets a request that ended before its engine knows."""
        with self._lock:
            self._pop(request_id)
            holder.stopped_ids.append(request_id)

    def pop_all(self) -> list[InferTask]:
        """Forgets everything."""
        with self._lock:
            return [task for task in map(self._pop, list(self._tasks)) if task is not None]

    def give_up(self, request_id: str, error: TritonError | None, anybody: Holder) -> Holder | None:
        """Marks a request to be ended with `error` by the loop of its engine, or by that of `anybody` while it has
        none. The holder whose loop must be woken; None when the request has ended."""
        with self._lock:
            if request_id not in self._tasks:
                return None
            holder = self._holder_of.get(request_id, anybody)
            holder.given_up.append((request_id, error))
            return holder

    def controls(self, holder: Holder) -> Controls:
        """Drains what was marked for this engine."""
        controls = Controls([], [], [])
        if not holder.given_up and not holder.stopped_ids:
            return controls
        with self._lock:
            controls.stop.extend(holder.stopped_ids)
            given_up, holder.given_up, holder.stopped_ids = holder.given_up, [], []
            for request_id, error in given_up:
                self._end(holder, request_id, error, controls)
        return controls

    def expired_in_queue(self, request_id: str) -> bool:
        """A request's time in the queue is over: whether it must end. False also when its level's action is DELAY: then
        it goes behind all others of its level."""
        with self._lock:
            task = self._tasks.get(request_id)
            if task is None or task not in self._queue:
                return False
            if self._policies.policy(task.infer_request.priority).reject:
                return True
            self._queue.delay(task)
            return False

    def engine_died(self, holder: Holder, request_ids: Sequence[str], kind: DeathKind, now_ns: int) -> Loss:
        """Puts what the engine had before all that wait, in this order but who is under trial first; pops a convicted
        one."""
        with self._lock:
            holder.stopped_ids.clear()
            convicted = holder.probation.engine_died(kind)
            if convicted is not None:
                self._pop(convicted.request_id)
            lost = [self._tasks[one] for one in request_ids if self._holder_of.get(one) is holder]
            # Waiting behind other trials, an innocent could collect another death.
            lost.sort(key=lambda task: -len(task.trial_deaths))
            for task in lost:
                del self._holder_of[task.request_id]
                task.lost_ns = task.lost_ns or now_ns
            self._queue.put_back(lost)
            return Loss(lost, convicted)

    def hand_over(self, holder: Holder, heir: Holder) -> None:
        """Puts what an engine that has ended had before all that wait; what was marked for it, another one does."""
        with self._lock:
            left = [task for one, task in self._tasks.items() if self._holder_of.get(one) is holder]
            for task in left:
                del self._holder_of[task.request_id]
                holder.probation.leave(task.request_id)
            self._queue.put_back(left)
            heir.given_up.extend(holder.given_up)
            holder.given_up.clear()
            holder.stopped_ids.clear()

    def leftovers(self, holders: Sequence[Holder]) -> str:
        """The self-check: without a task nothing else may be left. A text for the log, "" when all is well."""
        with self._lock:
            on_probation = sum(len(holder.probation) for holder in holders)
            left = (len(self._queue), len(self._holder_of), on_probation)
            if self._tasks or not any(left):
                return ""
        return "without a task, {} are queued, {} owned by an engine, {} on probation".format(*left)

    def _end(self, holder: Holder, request_id: str, error: TritonError | None, controls: Controls) -> None:
        owner = self._holder_of.get(request_id)
        if owner is not None and owner is not holder:  # another engine took it since
            owner.given_up.append((request_id, error))
            controls.elsewhere.append(owner)
            return
        task = self._pop(request_id)
        if task is not None:
            controls.ended.append((task, error))
            if owner is holder:
                controls.stop.append(request_id)

    def _pop(self, request_id: str) -> InferTask | None:
        task = self._tasks.pop(request_id, None)
        holder = self._holder_of.pop(request_id, None)
        if holder is not None:
            holder.probation.leave(request_id)
        if task is not None:
            self._queue.remove(task)
        return task
