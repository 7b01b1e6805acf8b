"""What a watched engine reports: its state, each step, what waits and why, and the use of each KV block.

The engine core makes reports of steps only while someone is watching; the LLM manager's loop owns an EngineHistory; the
host forwards both. Invariants: all messages are frozen; none contains tokens or text.
"""

from __future__ import annotations

import time
from typing import Any, Final, Literal

import msgspec

RowKind = Literal["prefill", "decode", "recompute"]
"""prefill: prompt tokens; decode: tokens after the prompt; recompute: tokens computed before a preemption or by an
engine that died."""
WaitReason = Literal["max_num_seqs", "kv_blocks", "token_budget", "state_slots", "prefix", "long_prefill", "grammar"]
"""Why a request is not running: no row; no KV blocks; the step's token budget is spent; no slot for its recurrent
state; a running request is computing their common prefix; another long prompt is being computed; its grammar is being
compiled."""
ROW_KINDS: Final[tuple[RowKind, ...]] = ("decode", "prefill", "recompute")
"""Indexed by the bytes of StepReport.kinds."""
RowReport = tuple[str, RowKind, int, int, int]
"""Request id; kind; computed tokens, drafts included; accepted drafts; new tokens of the request."""
BlockState = Literal["free", "cached", "used"]
BlockRun = tuple[int, int, BlockState, str | None, int]
"""First block; number of blocks; state; id of a request that uses them; number of requests that do."""


class Watch(msgspec.Struct, frozen=True, array_like=True):
    """Host → engine: what to report from now on.

    steps   each step
    blocks  the use of each KV block, at intervals and when work ends
    """

    steps: bool = False
    blocks: bool = False


NOT_WATCHED: Final = Watch()


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    """One step. Its rows are in columns, in batch order, which is several times as fast as a tuple per row.

    step_id            as in StepResult
    time_s             when it began, Unix time
    duration_s         what it took; if steps overlap, since the end of the previous one
    schedule_s         of that, until its computation began
    commit_s           of that, after its results were read
    request_ids        of the rows
    kinds              of the rows, one byte each: indices into ROW_KINDS
    num_tokens         of the rows: computed tokens, drafts included
    num_output_tokens  of the rows: new tokens of the request
    preempted          requests preempted for it
    waiting            waiting requests and reasons, in queue order
    num_running        running requests after the step
    num_blocks         KV blocks on the device
    num_free_blocks    after the step
    num_cached_blocks  after the step
    """

    step_id: int
    time_s: float
    duration_s: float
    schedule_s: float
    commit_s: float
    request_ids: tuple[str, ...]
    kinds: bytes
    num_tokens: tuple[int, ...]
    num_output_tokens: tuple[int, ...]
    preempted: tuple[str, ...]
    waiting: tuple[tuple[str, WaitReason], ...]
    num_running: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int

    @property
    def num_accepted_drafts(self) -> list[int]:
        """Per row. A row gets its accepted drafts and one further token."""
        return [max(count - 1, 0) for count in self.num_output_tokens]

    @property
    def rows(self) -> list[RowReport]:
        kinds = map(ROW_KINDS.__getitem__, self.kinds)
        columns = (self.request_ids, kinds, self.num_tokens, self.num_accepted_drafts, self.num_output_tokens)
        return list(zip(*columns, strict=True))


class BlockMap(msgspec.Struct, frozen=True, array_like=True):
    """All KV blocks on the device, as runs of equal neighbours.

    time_s        Unix time
    num_blocks    on the device
    runs          in block order
    is_truncated  whether there were more runs than are sent
    """

    time_s: float
    num_blocks: int
    runs: tuple[BlockRun, ...]
    is_truncated: bool = False


class EngineReport(msgspec.Struct, frozen=True, array_like=True):
    """Sent with a StepResult while someone is watching."""

    step: StepReport | None = None
    blocks: BlockMap | None = None


StateName = Literal["starting", "ready", "recovering", "failed", "asleep", "stopped"]


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine since its last change.

    name          "asleep": stopped because it was idle, starts again with the next request; "failed": it failed too
                  often in a row for requests to wait for it, but is still restarted
    time_s        of the change, Unix time
    reason        why the last engine ended; "" = none has
    pid           of its process; None = it has none now, or runs on a thread
    num_restarts  engines that ended and were replaced
    recovery_s    for a "ready" that follows a lost engine: how long there was none
    """

    name: StateName = "starting"
    time_s: float
    reason: str = ""
    pid: int | None = None
    num_restarts: int = 0
    recovery_s: float | None = None


class EngineHistory:
    """Changed by one thread only."""

    def __init__(self) -> None:
        self.current = EngineState(time_s=time.time())
        self._lost_s: float | None = None
        """Since when there is no engine, by the monotonic clock; None = there is one, or there was none yet."""

    def ready(self, pid: int | None) -> EngineState:
        recovery_s = None if self._lost_s is None else time.monotonic() - self._lost_s
        self._lost_s = None
        return self._change("ready", pid=pid, recovery_s=recovery_s)

    def lost(self, reason: str, is_given_up: bool) -> EngineState:
        if self._lost_s is None:
            self._lost_s = time.monotonic()
        num_restarts = self.current.num_restarts + 1
        return self._change("failed" if is_given_up else "recovering", reason=reason, num_restarts=num_restarts)

    def slept(self) -> EngineState:
        return self._change("asleep", reason="")

    def stopped(self) -> EngineState:
        return self._change("stopped", reason="")

    def _change(self, name: StateName, **changes: Any) -> EngineState:
        """Keeps reason and num_restarts unless given, but not pid and recovery_s."""
        fields = {"pid": None, "recovery_s": None} | changes
        self.current = msgspec.structs.replace(self.current, name=name, time_s=time.time(), **fields)
        return self.current
