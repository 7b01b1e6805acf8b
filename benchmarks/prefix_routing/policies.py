"""Policies that assign requests to engines: the server's own rule, and those compared with it.

For the comparison. Independent of conversations. Invariant: `prefixes` is the adapter's own task map, placement and
index, not a copy of their rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from llmbackend.adapter.tasks.placement import Placement, PlacementState, PrefixIndex
from llmbackend.adapter.tasks.task_map import EngineAssignment, TaskMap
from llmbackend.engine.memory.prefix_cache import prefix_hashes
from llmbackend.engine.messages import InferRequest, StepResult
from llmbackend.waiting.queue_policy import QueuePolicies

from .engines import EngineSettings, VirtualEngine
from .virtual_time import VirtualTime


class QueuedTask:
    """What a TaskMap sees of an InferTask."""

    is_delayed = is_suspect = False
    lost_ns = 0

    def __init__(self, infer_request: InferRequest, hashes: Sequence[int]) -> None:
        self.infer_request = infer_request
        self.isolated_deaths: list[Any] = []
        self.placement: PlacementState | None = PlacementState(hashes)

    @property
    def request_id(self) -> str:
        return self.infer_request.request_id

    @property
    def lane(self) -> tuple[int, bool]:
        return self.infer_request.priority, False


def _nobody(engine: VirtualEngine, result: StepResult) -> None:
    """Gets what is computed before anything is asked."""


class Policy(ABC):
    def __init__(self, engines: int, settings: EngineSettings, clock: VirtualTime) -> None:
        self.clock = clock
        self.settings = settings
        self.engines = [VirtualEngine(settings, clock, self.take, self.after_step) for _ in range(engines)]
        self.deliver: Callable[[VirtualEngine, StepResult], None] = _nobody

    @abstractmethod
    def submit(self, request: InferRequest) -> None: ...

    def take(self, engine: VirtualEngine) -> Sequence[InferRequest]:
        return ()

    def after_step(self, engine: VirtualEngine, result: StepResult) -> None:
        self.deliver(engine, result)


class RoundRobin(Policy):
    _next = 0

    def submit(self, request: InferRequest) -> None:
        self.engines[self._next % len(self.engines)].add(request)
        self._next += 1


class LeastLoaded(Policy):
    def submit(self, request: InferRequest) -> None:
        min(self.engines, key=lambda engine: engine.num_live).add(request)


class Prefixes(Policy):
    def __init__(self, engines: int, settings: EngineSettings, clock: VirtualTime) -> None:
        super().__init__(engines, settings, clock)
        self.index = PrefixIndex()
        self._placement = Placement(self.index)
        self._placement.block_size = settings.block_size
        self.tasks = TaskMap(QueuePolicies(), 1 << 30, self._placement)
        self._assignments = {
            engine: EngineAssignment(engine.wake, engine.room, 1 << i) for i, engine in enumerate(self.engines)
        }
        for engine in self.engines:
            engine.core.prefixes.publish(True)
        self._taken_s: dict[str, float] = {}

    def submit(self, request: InferRequest) -> None:
        hashes = prefix_hashes(request.prefix_salt, request.prompt_token_ids, self.settings.block_size)
        task: Any = QueuedTask(request, hashes)
        self.tasks.admit(task)
        self.tasks.enqueue(task)
        for engine in self.engines:
            engine.wake()

    def take(self, engine: VirtualEngine) -> Sequence[InferRequest]:
        assignment = self._assignments[engine]
        if engine.room() <= 0 or not self.tasks.num_queued:
            return ()
        tasks = self.tasks.take(assignment, engine.room(), list(self._assignments.values()), self.clock.now_ns)
        if assignment.look_again_ns:
            self.clock.at(assignment.look_again_ns / 1e9, engine.wake)
        for task in tasks:
            self._taken_s[task.request_id] = self.clock.now_s
        return [task.infer_request for task in tasks]

    def after_step(self, engine: VirtualEngine, result: StepResult) -> None:
        assignment = self._assignments[engine]
        if result.blocks is not None:
            self.index.apply(assignment.bit, result.blocks)
        self.tasks.record_outputs(assignment, result.outputs)
        for output in result.outputs:
            self._note_prompt(output.request_id, output.num_cached_tokens)
            if output.finish_reason is not None:
                self.tasks.pop(output.request_id)
        super().after_step(engine, result)

    def _note_prompt(self, request_id: str, num_cached_tokens: int) -> None:
        taken_s = self._taken_s.pop(request_id, None)
        task = self.tasks.get(request_id)
        if taken_s is not None and task is not None:
            num_tokens = len(task.infer_request.prompt_token_ids) - num_cached_tokens
            self._placement.prompt_computed(num_tokens, self.clock.now_s - taken_s)
