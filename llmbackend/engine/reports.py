"""What an engine reports while it is watched: its state, each step, what waits and why, which block holds what.

For: the engine core, which makes reports of steps only while someone watches; the LLM manager, whose loop owns an
EngineHistory; the host, which passes both on. Does not know: how they are made or shown. Invariants: all messages are
frozen; none holds a token or a text.
"""

from __future__ import annotations

import time
from typing import Any, Final, Literal

import msgspec

RowKind = Literal["prefill", "decode", "recompute"]
"""prefill: tokens of a prompt; decode: tokens behind it; recompute: tokens that were computed before a preemption, or
by an engine that died."""
WaitReason = Literal["max_num_seqs", "kv_blocks", "token_budget", "state_slots", "prefix", "long_prefill", "grammar"]
"""Why a request is not among the running ones: no row; no KV blocks; the step's tokens are spent; a running request is
computing the beginning that both share; another long prompt is being computed; its grammar is being compiled."""
ROW_KINDS: Final[tuple[RowKind, ...]] = ("decode", "prefill", "recompute")
"""By their place in StepReport.kinds."""
RowReport = tuple[str, RowKind, int, int, int]
"""Request id; kind; tokens computed, with drafts; drafts accepted; tokens that the request got."""
BlockState = Literal["free", "cached", "used"]
BlockRun = tuple[int, int, BlockState, str | None, int]
"""First block; number of blocks; state; id of a request that holds them; how many requests do."""


class Watch(msgspec.Struct, frozen=True, array_like=True):
    """Host → engine: what to report from now on.

    steps   each step
    blocks  which block holds what, at intervals and when work ends
    """

    steps: bool = False
    blocks: bool = False


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    """One step. Its rows are in columns, in the order of the batch: that is several times as fast as a tuple for each.

    step_id            as in StepResult
    time_s             when it began, Unix time
    duration_s         what it took; where steps overlap, since the end of the one before
    schedule_s         of that, until its computation began
    commit_s           of that, after its results were read
    request_ids        of the rows
    kinds              of the rows, a byte each: places in ROW_KINDS
    num_tokens         of the rows: computed, with drafts
    num_output_tokens  of the rows: new tokens of the request
    preempted          requests whose blocks were taken back for it
    waiting            requests and reasons, in the order of their turn
    num_running        requests after the step
    num_blocks         KV blocks of the device
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
        """Of the rows. A row gets its accepted drafts and one token behind them."""
        if max(self.num_output_tokens, default=0) <= 1:
            return [0] * len(self.num_output_tokens)
        return [max(count - 1, 0) for count in self.num_output_tokens]

    @property
    def rows(self) -> list[RowReport]:
        kinds = map(ROW_KINDS.__getitem__, self.kinds)
        columns = (self.request_ids, kinds, self.num_tokens, self.num_accepted_drafts, self.num_output_tokens)
        return list(zip(*columns, strict=True))


class BlockMap(msgspec.Struct, frozen=True, array_like=True):
    """All KV blocks of the device, as runs of neighbours that are alike.

    time_s        Unix time
    num_blocks    of the device
    runs          in the order of the blocks
    is_truncated  there were more runs than are sent
    """

    time_s: float
    num_blocks: int
    runs: tuple[BlockRun, ...]
    is_truncated: bool = False


class EngineReport(msgspec.Struct, frozen=True, array_like=True):
    """With a StepResult, while someone watches."""

    step: StepReport | None = None
    blocks: BlockMap | None = None


StateName = Literal["starting", "ready", "recovering", "failed", "asleep", "stopped"]


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine since its last change.

    name          "asleep": it has ended because nobody used it, and starts again with the next request; "failed": it
                  ended too often in a row for requests to wait for it; it is still tried again
    time_s        of the change, Unix time
    reason        why the last engine ended; "" = none has
    pid           of its process; None = it has none now, or runs on a thread
    num_restarts  engines that have ended and were followed by another one
    recovery_s    of a "ready" that follows a lost engine: how long there was none
    """

    name: StateName = "starting"
    time_s: float
    reason: str = ""
    pid: int | None = None
    num_restarts: int = 0
    recovery_s: float | None = None


class EngineHistory:
    """One thread changes it."""

    def __init__(self) -> None:
        self.current = EngineState(time_s=time.time())
        self._lost_s: float | None = None
        """Since when there is no engine, by the monotonic clock; None = there is one, or was none yet."""

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
        """Keeps reason and num_restarts unless they change, but neither pid nor recovery_s."""
        fields = {"pid": None, "recovery_s": None} | changes
        self.current = msgspec.structs.replace(self.current, name=name, time_s=time.time(), **fields)
        return self.current
