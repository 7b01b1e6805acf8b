"""A runner that computes with others: what it is asked, it tells them, and then does itself.

For: the engine core of a model over several devices, on rank 0. Does not know: how a step is computed, which part of it
a rank computes. Invariants: all ranks' runners get the same calls in the same order and sample the same tokens; a step
that fails on one rank, wherever, ends the engine, because the others have done half of it or wait for the rest.
"""

from __future__ import annotations

from typing import NoReturn

from ...infer_request import InferRequest, ModelInfo
from ...step import OverlappingRunner, RowTable, SampledTokens, StepPlan
from . import collectives
from .followers import Followers
from .messages import Collect, RowAdded, RowRemoved
from .table_mirror import TableSender

_EXECUTED = -1
"""The id of a step that is launched and read at once."""


class ParallelRunner:
    def __init__(self, runner: OverlappingRunner, followers: Followers, max_num_seqs: int) -> None:
        """runner: this rank's part."""
        self._runner = runner
        self._followers = followers
        self._sender = TableSender(max_num_seqs)

    @property
    def info(self) -> ModelInfo:
        return self._runner.info

    @property
    def max_steps_in_flight(self) -> int:
        return self._runner.max_steps_in_flight

    def add_row(self, row: int, request: InferRequest) -> None:
        """Refused here, it is not told to the others, who would refuse it too."""
        self._runner.add_row(row, request)
        self._sender.forget(row)
        self._followers.tell(RowAdded(row, request))

    def remove_row(self, row: int) -> None:
        self._runner.remove_row(row)
        self._followers.tell(RowRemoved(row))

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        self.launch(_EXECUTED, plan, table)
        return self.collect()[1]

    def launch(self, step_id: int, plan: StepPlan, table: RowTable) -> None:
        step = self._sender.step(step_id, plan, table)
        try:
            self._followers.tell(step)
            self._runner.launch(step_id, plan, table)
        except Exception as error:
            self._abandon(error)

    def collect(self) -> tuple[int, SampledTokens]:
        try:
            self._followers.tell(Collect())
            return self._runner.collect()
        except Exception as error:
            self._abandon(error)

    def close(self) -> None:
        self._followers.stop()
        self._runner.close()
        collectives.leave()
        self._followers.reap()

    def _abandon(self, error: Exception) -> NoReturn:
        self._followers.abandon(f"rank 0 failed in a step of all ranks ({type(error).__name__}: {error})")
