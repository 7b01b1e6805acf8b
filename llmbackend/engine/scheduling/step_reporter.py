"""Reports of steps and blocks for watchers of an engine, and events of traced requests.

The engine core has a reporter only while it is watched. Invariants: reporter and tracer read the scheduler's state and
change nothing, so a watched engine computes the same tokens; while no live request is traced, a step costs one check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..memory.kv_cache import KVCacheManager
from ..messages import EventName, RequestEvent, StepOutput
from ..reports import BlockMap, BlockRun, BlockState, EngineReport, StepReport, Watch
from ..step import RowTable, StepPlan
from .scheduler import Scheduler
from .sequence import Rows, Sequence
from .steps_in_flight import CompletedStep

BLOCK_MAP_INTERVAL_S: Final = 0.25
MAX_BLOCK_RUNS: Final = 4096
_BLOCK_STATES: Final[tuple[BlockState, ...]] = ("free", "cached", "used")


@dataclass(frozen=True, slots=True)
class _BegunStep:
    """A step being computed.

    request_ids, kinds, num_tokens, preempted: as in StepReport
    begun_s  when its computation began, by the core's clock
    """

    request_ids: tuple[str, ...]
    kinds: bytes
    num_tokens: tuple[int, ...]
    preempted: tuple[str, ...]
    begun_s: float


class StepReporter:
    """One thread calls it."""

    def __init__(self, rows: Rows, scheduler: Scheduler, kv_cache: KVCacheManager, now_s: Callable[[], float]) -> None:
        """now_s: the core's clock"""
        self._watch = Watch()
        self._rows = rows
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._now_s = now_s
        self._begun: dict[float, _BegunStep] = {}
        """By planned_s: steps whose results have not been read yet."""
        self._last_map_s = -BLOCK_MAP_INTERVAL_S
        self._is_map_due = False

    def watch(self, watch: Watch) -> None:
        """Sets what is reported from now on; reports the blocks at once."""
        self._is_map_due = watch.blocks
        self._watch = watch

    @property
    def has_work(self) -> bool:
        """Whether there is something to report even if nothing is computed."""
        return self._is_map_due

    def begin(self, plan: StepPlan, planned_s: float) -> None:
        """The plan is about to be computed; the table does not count its tokens yet."""
        if not self._watch.steps:
            return
        table, rows = self._rows.table, plan.rows
        computed = table.num_computed_tokens[rows]
        is_prefill = computed < table.num_prompt_tokens[rows]
        kinds = np.where(computed < self._rows.recompute_until[rows], 2, is_prefill).astype(np.uint8)
        self._begun[planned_s] = _BegunStep(
            tuple(self._rows.request_ids(rows)),
            kinds.tobytes(),
            tuple(plan.num_scheduled_tokens.tolist()),
            tuple(sequence.request.request_id for sequence in self._scheduler.preempted),
            self._now_s(),
        )

    def report(
        self,
        step_id: int,
        step: CompletedStep | None,
        outputs: Items[StepOutput],
        compiling: Iterable[str],
        duration_s: float,
        read_s: float,
    ) -> EngineReport | None:
        """After an iteration of the core: `step` is committed, None if nothing was computed.

        compiling: requests whose grammars are being compiled. read_s: when the step's results arrived, by the core's
        clock.
        """
        begun = None if step is None else self._take_begun(step.planned_s)
        report = None if begun is None else self._step(step_id, begun, outputs, compiling, duration_s, read_s)
        blocks = None
        if self._is_map_due or (step is not None and self._is_map_wanted_again()):
            self._last_map_s, self._is_map_due = self._now_s(), False
            blocks = block_map(self._kv_cache, self._rows)
        return None if report is None and blocks is None else EngineReport(report, blocks)

    def _take_begun(self, planned_s: float) -> _BegunStep | None:
        """None for a step begun before anyone watched. A step that failed to start leaves its entry behind."""
        begun = self._begun.pop(planned_s, None)
        for older_s in [other_s for other_s in self._begun if other_s < planned_s]:
            del self._begun[older_s]
        return begun

    def _step(
        self,
        step_id: int,
        begun: _BegunStep,
        outputs: Items[StepOutput],
        compiling: Iterable[str],
        duration_s: float,
        read_s: float,
    ) -> StepReport:
        now_s = self._now_s()
        scheduler, kv_cache = self._scheduler, self._kv_cache
        num_cached = kv_cache.num_cached_blocks
        got = {output.request_id: len(output.token_ids) for output in outputs}
        waiting = [(one.request.request_id, scheduler.wait_reason) for one in scheduler.waiting()]
        return StepReport(
            step_id=step_id,
            time_s=time.time() - duration_s,
            duration_s=duration_s,
            schedule_s=max(begun.begun_s - (now_s - duration_s), 0.0),
            commit_s=now_s - read_s,
            request_ids=begun.request_ids,
            kinds=begun.kinds,
            num_tokens=begun.num_tokens,
            num_output_tokens=tuple([got.get(request_id, 0) for request_id in begun.request_ids]),
            preempted=begun.preempted,
            waiting=(*waiting, *((request_id, "grammar") for request_id in compiling)),
            num_running=scheduler.num_running,
            num_blocks=kv_cache.num_blocks,
            num_free_blocks=kv_cache.num_free_blocks - num_cached,
            num_cached_blocks=num_cached,
        )

    def _is_map_wanted_again(self) -> bool:
        """At intervals, and when work ends, since no step would follow."""
        if not self._watch.blocks:
            return False
        is_idle = not (self._scheduler.num_running or self._scheduler.num_waiting)
        return is_idle or self._now_s() - self._last_map_s >= BLOCK_MAP_INTERVAL_S


def block_map(kv_cache: KVCacheManager, rows: Rows) -> BlockMap:
    """Which block is free, cached or used, and by whom."""
    states, holders, holding_rows = kv_cache.contents()
    changes = np.flatnonzero((np.diff(states) != 0) | (np.diff(holders) != 0) | (np.diff(holding_rows) != 0))
    starts = np.concatenate([[0], changes + 1])
    counts = np.diff(np.append(starts, kv_cache.num_blocks))
    is_truncated = len(starts) > MAX_BLOCK_RUNS
    starts, counts = starts[:MAX_BLOCK_RUNS], counts[:MAX_BLOCK_RUNS]
    runs: tuple[BlockRun, ...] = tuple(
        (first, count, _BLOCK_STATES[state], rows[row].request.request_id if row >= 0 else None, references)
        for first, count, state, row, references in zip(
            starts.tolist(),
            counts.tolist(),
            states[starts].tolist(),
            holding_rows[starts].tolist(),
            holders[starts].tolist(),
            strict=True,
        )
    )
    return BlockMap(time.time(), kv_cache.num_blocks, runs, is_truncated)


class RequestTracer:
    """One thread calls it."""

    def __init__(self, table: RowTable, now_s: Callable[[], float]) -> None:
        self._table = table
        self._now_s = now_s
        self._live: dict[str, Sequence] = {}
        self._running: set[str] = set()
        """Of them, those that hold blocks."""
        self._events: list[RequestEvent] = []

    @property
    def is_active(self) -> bool:
        """Whether a live request is traced."""
        return bool(self._live)

    def add(self, sequence: Sequence) -> None:
        self._live[sequence.request.request_id] = sequence

    def forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self._running.discard(request_id)

    def happened(self, request_id: str, name: EventName, num_tokens: int = 0) -> None:
        if request_id in self._live:
            self._events.append(RequestEvent(request_id, name, int(self._now_s() * 1e9), num_tokens))

    def planned(self, plan: StepPlan) -> None:
        """A step was planned; called before its rows advance."""
        for request_id, sequence in self._live.items():
            if sequence.row < 0:
                continue
            num_tokens = int(plan.num_scheduled_tokens[plan.rows == sequence.row].sum())
            if num_tokens:
                self._running.add(request_id)
                self._computes(sequence, num_tokens)
            elif request_id in self._running and not self._table.num_computed_tokens[sequence.row]:
                self._running.discard(request_id)
                self.happened(request_id, "preempted")

    def take(self) -> tuple[RequestEvent, ...]:
        """The events since the last call."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return tuple(events)

    def _computes(self, sequence: Sequence, num_tokens: int) -> None:
        """A step that computes only the row's last token and drafts is not an event."""
        row, table = sequence.row, self._table
        computed, known = int(table.num_computed_tokens[row]), int(table.num_tokens[row])
        num_prompt = int(table.num_prompt_tokens[row])
        if known == num_prompt:
            self.happened(sequence.request.request_id, "prefill", num_tokens)
        elif computed < known - 1:
            self.happened(sequence.request.request_id, "recompute", num_tokens)
