"""The infer-task map: every live request of a model, its engine, and the requests waiting for an engine.

Used by ModelState and ModelInstanceState, on Triton's threads and the engines' loops. Independent of responses, metrics
and managers. Invariants: a task in the map is about to be queued, queued, or assigned to exactly one engine; a popped
task is nowhere else.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from llmbackend.core.backend_api import Tenant, TritonError
from llmbackend.engine.errors import DeathKind
from llmbackend.engine.messages import StepOutput
from llmbackend.waiting.level_queue import LevelQueue
from llmbackend.waiting.queue_policy import QueuePolicies

from .fault_isolation import FaultIsolation
from .infer_task import InferTask
from .placement import FreeSlots, Placement, PlacementState, ReadyEngines

WINDOW: Final = 128
"""With several engines, the number of queued requests beyond its free slots that are considered for an engine."""


@dataclass(eq=False, slots=True)
class EngineAssignment:
    """The tasks of one engine. The map's lock guards all fields but the first three."""

    wake: Callable[[], None]
    """Makes the engine's loop check for requests and controls."""
    free_slots: Callable[[], int]
    """How many requests it would take now."""
    bit: int
    """A different power of two for each engine, by which PrefixIndex identifies it."""
    isolation: FaultIsolation = field(default_factory=FaultIsolation)
    pending_stops: list[tuple[str, TritonError | None]] = field(default_factory=list)
    """Requests to end with this error (cancelled or timed out), or None (stopped by their client). Their tasks are
    still in the map."""
    stopped_ids: list[str] = field(default_factory=list)
    """Requests ended by a stop string before the engine ended them; their tasks are no longer in the map."""
    look_again_ns: int = 0
    """When it may take a request that now waits for another engine; 0 = no such request."""

    def available_slots(self) -> int:
        """An engine in which a request is isolated takes no other."""
        return 0 if self.isolation.is_isolating else self.free_slots()


@dataclass(frozen=True, slots=True)
class Controls:
    """Stopped requests, for an engine's loop."""

    ended: list[tuple[InferTask, TritonError | None]]
    """Tasks to be answered; no longer in the map."""
    stop: list[str]
    """Ids of the requests that the engine must drop."""
    elsewhere: list[EngineAssignment]
    """Engines that now have controls of their own and must be woken."""


NO_CONTROLS: Final = Controls([], [], [])


@dataclass(frozen=True, slots=True)
class LostTasks:
    """The tasks of a dead engine."""

    requeued: list[InferTask]
    """Back in the queue."""
    blamed: InferTask | None
    """No longer in the map, because it killed engines."""


class TaskMap:
    """Thread-safe. Engines are identified by their EngineAssignment. Methods are atomic (`_lock`) and make no
    callbacks.

    It is the recovery log: a task contains its prompt, the tokens so far and its sampling state, so that the next
    engine can continue a dead engine's tasks.
    """

    def __init__(self, policies: QueuePolicies, max_queue_size: int, placement: Placement) -> None:
        self._policies = policies
        self._placement = placement
        self._ready_engines: Sequence[EngineAssignment] = ()
        self._compared = ReadyEngines({})
        """Compares `_ready_engines`."""
        self._max_queue_size = max_queue_size
        self._lock = threading.Lock()
        self._tasks: dict[str, InferTask] = {}
        self.get = self._tasks.get
        """The task of a request, None if it has ended."""
        self._engine_of: dict[str, EngineAssignment] = {}
        self._queue: LevelQueue[InferTask] = LevelQueue()
        """Requests without an engine, those of a dead engine first."""
        self._reserved: Counter[int] = Counter()
        """By priority level: requests that are being converted."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tasks

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def num_waiting(self) -> int:
        """Queued requests, and those that are being converted."""
        with self._lock:
            return len(self._queue) + (self._reserved.total() if self._reserved else 0)

    def all(self) -> list[tuple[InferTask, bool]]:
        """All tasks, and whether an engine has them."""
        with self._lock:
            return [(task, request_id in self._engine_of) for request_id, task in self._tasks.items()]

    def lora_names(self) -> tuple[set[str], set[str]]:
        """The adapters of running requests, and of waiting requests."""
        running: set[str] = set()
        waiting: set[str] = set()
        with self._lock:
            # No task may outlive the lock here: its last reference would be dropped under a caller's lock.
            names = [(request_id in self._engine_of, task.lora_name) for request_id, task in self._tasks.items()]
        for is_running, name in names:
            if name:
                (running if is_running else waiting).add(name)
        return running, waiting

    def ids_of(self, client_id: str, by: Tenant) -> list[str]:
        """The requests with this client's id that `by` may end."""
        with self._lock:
            return [
                request_id
                for request_id, task in self._tasks.items()
                if task.sender.client_id == client_id and by.may_end(task.sender.tenant)
            ]

    # --- into the queue -----------------------------------------------------------------------------------------------

    def admit(self, *tasks: InferTask) -> str:
        """Takes the new tasks of a request into the map, but not yet into the queue; or takes none and returns why the
        queue is too full for them."""
        with self._lock:
            refusal = self._why_full(tasks[0].infer_request.priority, len(tasks))
            if not refusal:
                self._tasks.update((task.request_id, task) for task in tasks)
        return refusal

    def enqueue(self, task: InferTask) -> None:
        """Queues an admitted task, unless it has ended already."""
        with self._lock:
            if task.request_id in self._tasks:
                self._queue.append(task, *task.lane)

    def reserve(self, level: int) -> str:
        """Reserves a place in the queue for a request that is not a task yet, or returns why the queue is too full."""
        with self._lock:
            refusal = self._why_full(level)
            if not refusal:
                self._reserved[level] += 1
        return refusal

    def release(self, level: int) -> None:
        """Returns a reserved place."""
        with self._lock:
            self._reserved[level] -= 1

    def _why_full(self, level: int, count: int = 1) -> str:
        """Why `count` more requests do not fit into this level."""
        limit = self._policies.policy(level).max_queue_size
        in_level = self._queue.num_in_level(level) + self._reserved[level]
        too_many = f", and {count} would be added" if count > 1 else ""
        if limit and in_level + count > limit:
            return f"its queue holds {in_level} requests of this priority{too_many}"
        if (queued := len(self._queue) + self._reserved.total()) + count > self._max_queue_size:
            return f"its queue holds {queued} requests{too_many}"
        return ""

    def expired_in_queue(self, request_id: str) -> bool:
        """Called when a request's time in the queue is over. Returns whether it must end: not if an engine has taken it
        before, nor if its level's action is DELAY, which moves it behind all others of its level."""
        with self._lock:
            task = self._tasks.get(request_id)
            if task is None or task.times.taken_ns or task not in self._queue:
                return False
            if self._policies.policy(task.infer_request.priority).reject:
                return True
            task.is_delayed = self._queue.delay(task)
            return False

    # --- engines ------------------------------------------------------------------------------------------------------

    def take(
        self, engine: EngineAssignment, max_tasks: int, ready: Sequence[EngineAssignment], now_ns: int
    ) -> list[InferTask]:
        """Assigns up to `max_tasks` queued tasks to an engine, in queue order; with several ready engines, skips tasks
        that wait for another one. Sets `engine.look_again_ns`."""
        with self._lock:
            engine.look_again_ns = 0
            taken: list[InferTask] = []
            free_slots = self._free_slots(ready) if len(ready) > 1 else None
            for task in self._queue.first(max_tasks if free_slots is None else max_tasks + WINDOW):
                if len(taken) == max_tasks or not engine.isolation.admits(task):
                    break
                if free_slots is None or self._takes(engine, task, free_slots, now_ns):
                    self._assign(task, engine)
                    taken.append(task)
            return taken

    def _free_slots(self, engines: Sequence[EngineAssignment]) -> FreeSlots:
        if self._ready_engines != engines:
            self._ready_engines = engines
            self._compared = ReadyEngines({one.bit: one.available_slots for one in engines})
        return FreeSlots(self._compared)

    def _takes(self, engine: EngineAssignment, task: InferTask, free_slots: FreeSlots, now_ns: int) -> bool:
        """A task that has lost its engine or may kill engines goes to the first one with free slots."""
        if task.lost_ns or task.is_suspect:
            free_slots.take(engine.bit)
            return True
        state = task.placement = task.placement or PlacementState()
        takes = self._placement.takes(engine.bit, state, free_slots, now_ns)
        free_slots.take(engine.bit if takes else state.waits_for)
        if not takes:
            engine.look_again_ns = min(engine.look_again_ns or state.until_ns, state.until_ns)
        return takes

    def _assign(self, task: InferTask, engine: EngineAssignment) -> None:
        self._queue.remove(task)
        self._engine_of[task.request_id] = engine
        engine.isolation.add(task)
        if task.placement is not None and task.placement.hashes:
            self._placement.index.expect(engine.bit, task.request_id, task.placement.hashes)

    def record_outputs(self, engine: EngineAssignment, outputs: Sequence[StepOutput]) -> None:
        """Tells fault isolation which requests the engine has worked on."""
        if not engine.isolation:
            return
        with self._lock:
            for output in outputs:
                if output.token_ids:
                    engine.isolation.record_output(output.request_id)
                    self._placement.index.settle(output.request_id)

    def engine_died(
        self, engine: EngineAssignment, request_ids: Sequence[str], kind: DeathKind, now_ns: int
    ) -> LostTasks:
        """Puts all tasks of the engine at the front of the queue: those with deaths in isolation, then those in
        `request_ids`, which its manager knew, in this order, then those that its manager never got. A blamed task is
        popped."""
        with self._lock:
            engine.stopped_ids.clear()
            blamed = engine.isolation.engine_died(kind)
            if blamed is not None:
                self._pop(blamed.request_id)
            assigned = {one: self._tasks[one] for one, owner in self._engine_of.items() if owner is engine}
            known = [assigned.pop(one) for one in request_ids if one in assigned]
            lost = known + list(assigned.values())
            # First, so that they run alone: a harmless one could otherwise be blamed for a death that another causes.
            lost.sort(key=lambda task: -len(task.isolated_deaths))
            for task in lost:
                self._unassign(task)
                task.lost_ns = task.lost_ns or now_ns
            self._put_back(lost)
            return LostTasks(lost, blamed)

    def hand_over(self, engine: EngineAssignment, successor: EngineAssignment) -> None:
        """Puts the tasks of an engine that has ended at the front of the queue; `successor` does its pending stops."""
        with self._lock:
            left = [task for one, task in self._tasks.items() if self._engine_of.get(one) is engine]
            for task in left:
                self._unassign(task)
                engine.isolation.discard(task.request_id)
            self._put_back(left)
            successor.pending_stops.extend(engine.pending_stops)
            engine.pending_stops.clear()
            engine.stopped_ids.clear()

    # --- the end of a request -----------------------------------------------------------------------------------------

    def pop(self, request_id: str) -> InferTask | None:
        """Forgets a request, whether queued or assigned; the caller answers the task."""
        with self._lock:
            return self._pop(request_id)

    def pop_stopped(self, request_id: str, engine: EngineAssignment) -> None:
        """Forgets a request that ended before its engine knows."""
        with self._lock:
            self._pop(request_id)
            engine.stopped_ids.append(request_id)

    def pop_all(self) -> list[InferTask]:
        """Forgets all requests; the caller answers their tasks."""
        with self._lock:
            return [task for task in map(self._pop, list(self._tasks)) if task is not None]

    def request_stop(
        self, request_id: str, error: TritonError | None, fallback: EngineAssignment
    ) -> EngineAssignment | None:
        """Marks a request to be ended with `error` by the loop of its engine, or of `fallback` while it has none.

        Returns the engine whose loop must be woken; None if the request has ended.
        """
        with self._lock:
            if request_id not in self._tasks:
                return None
            engine = self._engine_of.get(request_id, fallback)
            engine.pending_stops.append((request_id, error))
            return engine

    def take_controls(self, engine: EngineAssignment) -> Controls:
        """Takes all pending stops of an engine, and pops the tasks that they end."""
        if not engine.pending_stops and not engine.stopped_ids:
            return NO_CONTROLS
        controls = Controls([], [], [])
        with self._lock:
            controls.stop.extend(engine.stopped_ids)
            stops, engine.pending_stops, engine.stopped_ids = engine.pending_stops, [], []
            for request_id, error in stops:
                self._stop(engine, request_id, error, controls)
        return controls

    def leaked_resources(self, engines: Sequence[EngineAssignment]) -> str:
        """A self-check: without tasks, nothing may be queued or assigned. Returns a text for the log; "" = no leak."""
        with self._lock:
            in_isolation = sum(len(engine.isolation) for engine in engines)
            left = (len(self._queue), len(self._engine_of), in_isolation)
            if self._tasks or not any(left):
                return ""
        return "without a task, {} are queued, {} owned by an engine, {} in isolation".format(*left)

    def _stop(self, engine: EngineAssignment, request_id: str, error: TritonError | None, controls: Controls) -> None:
        owner = self._engine_of.get(request_id)
        if owner is not None and owner is not engine:  # another engine has taken it since
            owner.pending_stops.append((request_id, error))
            controls.elsewhere.append(owner)
            return
        task = self._pop(request_id)
        if task is not None:
            controls.ended.append((task, error))
            if owner is engine:
                controls.stop.append(request_id)

    def _put_back(self, tasks: Sequence[InferTask]) -> None:
        """Puts tasks before all others of their lanes, in this order."""
        for task in reversed(tasks):
            self._queue.put_back(task, *task.lane)

    def _unassign(self, task: InferTask) -> None:
        """Called when the task goes back into the queue."""
        del self._engine_of[task.request_id]
        self._placement.index.settle(task.request_id)
        if task.placement is not None:
            task.placement = PlacementState(task.placement.hashes)

    def _pop(self, request_id: str) -> InferTask | None:
        task = self._tasks.pop(request_id, None)
        engine = self._engine_of.pop(request_id, None)
        if engine is not None:
            engine.isolation.discard(request_id)
            self._placement.index.settle(request_id)
        if task is not None:
            self._queue.remove(task)
        return task
