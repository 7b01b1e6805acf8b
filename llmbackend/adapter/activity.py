"""Translates the engine's activity reports into the host's messages, for clients that watch the server.

Used by ModelInstanceState and ModelState. Independent of who watches and how events are sent. Invariant: no message is
created unless a client is watching, except for the description of an instance.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal

from llmbackend.core.activity.messages import (
    MAX_ID_CHARACTERS,
    BlockCounts,
    BlocksActivity,
    EngineActivity,
    InstanceActivity,
    InstanceDescription,
    InstanceLimits,
    LoadActivity,
    RequestActivity,
    RequestsReceived,
    StepActivity,
    StepParts,
)
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.load_progress import LoadProgress
from llmbackend.engine.messages import ModelInfo
from llmbackend.engine.reports import ROW_KINDS, BlockMap, EngineReport, EngineState, StepReport

from .tasks.infer_task import InferTask
from .tasks.task_map import TaskMap

NO_ENGINE = "engine"
"""Why requests wait while their engine starts or recovers."""
NO_ROW = "max_num_seqs"
"""Why requests wait in the model's queue for a slot of a ready engine."""


class InstanceReports:
    """Owner: ModelInstanceState. `describe` may be called from any thread, the rest only from the engine's loop."""

    def __init__(self, activity: InstanceActivity, tasks: TaskMap) -> None:
        self._activity = activity
        self._tasks = tasks
        self._waiting: dict[int, str] = {}
        """Requests waiting in the engine, and why, as of the latest report."""

    def engine_report(self, report: EngineReport) -> None:
        if report.step is not None:
            self._report_step(report.step)
        if report.blocks is not None:
            self._activity.report(_blocks(report.blocks))

    def engine_state(self, state: EngineState) -> None:
        if state.name != "ready":
            self._waiting = {}
        self._activity.report(
            EngineActivity(
                time=state.time_s,
                state=state.name,
                reason=state.reason,
                pid=state.pid,
                num_restarts=state.num_restarts,
                recovery_ms=None if state.recovery_s is None else round(state.recovery_s * 1e3, 1),
            )
        )

    def load_progress(self, progress: LoadProgress) -> None:
        self._activity.report(
            LoadActivity(time=time.time(), stage=progress.stage, done=progress.done, total=progress.total)
        )

    def taken(self, tasks: Sequence[InferTask]) -> None:
        """Called when the engine has taken tasks, possibly ones that another instance received."""
        moved = [task for task in tasks if task.sender.activity is not self._activity]
        for task in moved:
            task.sender.activity = self._activity
        if moved and self._activity.kinds:
            self.put_back(moved, NO_ROW)

    def put_back(self, tasks: Iterable[InferTask], reason: str) -> None:
        """Called when the tasks wait again."""
        if self._activity.kinds:
            self._activity.report(RequestsReceived(_requests((task, reason) for task in tasks)))

    def describe(self, state: EngineState, config: EngineConfig, info: ModelInfo) -> InstanceDescription:
        """Takes time proportional to the number of the model's requests."""
        queued = NO_ROW if state.name == "ready" else NO_ENGINE
        reasons = [
            (task, self._waiting.get(task.sender.number, "") if has_engine else queued)
            for task, has_engine in self._tasks.all()
            if task.sender.activity is self._activity
        ]
        return InstanceDescription(
            state=state.name,
            pid=state.pid,
            num_restarts=state.num_restarts,
            limits=InstanceLimits(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=info.max_model_len,
                num_blocks=info.num_blocks,
                block_size=info.block_size,
            ),
            path=info.path,
            path_reason=info.path_reason,
            requests=_requests(reasons),
        )

    def _report_step(self, step: StepReport) -> None:
        preempted = tuple(map(request_number, step.preempted))
        for request_id in step.preempted:
            if (task := self._tasks.get(request_id)) is not None:
                task.num_preemptions += 1
        waiting = tuple((request_number(request_id), reason) for request_id, reason in step.waiting)
        self._waiting = dict(waiting)
        self._activity.report(_step(step, preempted, waiting, self._tasks.num_queued))


def request_number(request_id: str) -> int:
    """The number of the host's request to which an engine's request belongs."""
    return int(request_id.partition(".")[0])


def _request_numbers(request_ids: Sequence[str]) -> list[int]:
    try:
        return list(map(int, request_ids))  # most requests consist of one
    except ValueError:
        return list(map(request_number, request_ids))


def received(tasks: Sequence[InferTask], reason: str) -> RequestsReceived:
    """Reports a new request with all its tasks. reason: "" = it will not wait long."""
    return RequestsReceived((_request(tasks, reason, "waiting"),))


def _requests(reasons: Iterable[tuple[InferTask, str]]) -> tuple[RequestActivity, ...]:
    """One per request. A request with several tasks is running if any of them is."""
    by_request = groupby(sorted(reasons, key=lambda one: one[0].sender.number), key=lambda one: one[0].sender.number)
    found = []
    for _, group in by_request:
        tasks, why = zip(*group, strict=True)
        found.append(_request(tasks, min(why), "waiting" if min(why) else "running"))
    return tuple(found)


def _request(tasks: Sequence[InferTask], reason: str, state: Literal["waiting", "running"]) -> RequestActivity:
    sender = tasks[0].sender
    age_s = (time.monotonic_ns() - tasks[0].times.exec_start_ns) * 1e-9
    return RequestActivity(
        request=sender.number,
        id=sender.client_id[:MAX_ID_CHARACTERS],
        key=sender.tenant.key_name,
        received=time.time() - age_s,
        prompt_tokens=sum(task.num_own_prompt_tokens for task in tasks),
        max_tokens=sum(task.infer_request.sampling.max_tokens for task in tasks),
        state=state,
        reason=reason,
        output_tokens=sum(task.num_new_tokens for task in tasks),
    )


def _step(
    step: StepReport, preempted: tuple[int, ...], waiting: tuple[tuple[int, str], ...], num_queued: int
) -> StepActivity:
    num_used = step.num_blocks - step.num_cached_blocks - step.num_free_blocks
    run_s = max(step.duration_s - step.schedule_s - step.commit_s, 0.0)
    return StepActivity(
        step=step.step_id,
        time=round(step.time_s, 6),
        duration_ms=_ms(step.duration_s),
        parts_ms=StepParts(_ms(step.schedule_s), _ms(run_s), _ms(step.commit_s)),
        rows=tuple(
            zip(
                _request_numbers(step.request_ids),
                map(ROW_KINDS.__getitem__, step.kinds),
                step.num_tokens,
                step.num_accepted_drafts,
                step.num_output_tokens,
                strict=True,
            )
        ),
        preempted=preempted,
        waiting=waiting,
        num_running=step.num_running,
        num_waiting=len(waiting) + num_queued,
        blocks=BlockCounts(num_used, step.num_cached_blocks, step.num_free_blocks),
    )


def _blocks(blocks: BlockMap) -> BlocksActivity:
    return BlocksActivity(
        time=blocks.time_s,
        num_blocks=blocks.num_blocks,
        runs=tuple(
            (first, count, state, None if request_id is None else request_number(request_id), references)
            for first, count, state, request_id, references in blocks.runs
        ),
        truncated=blocks.is_truncated,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
