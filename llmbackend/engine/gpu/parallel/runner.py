"""ParallelRunner: rank 0's runner, whose every call all ranks make.

For: rank 0's start. Does not know: processes, which part a rank computes. Invariants: all ranks' runners get the same
calls in the same order; a step that fails on one rank ends the engine, because the others have done half of it or wait
for the rest.
"""

from __future__ import annotations

import dataclasses
from typing import NoReturn

from ...infer_request import InferRequest, ModelInfo
from ...step import OverlappingRunner, RowTable, SampledTokens, StepPlan
from ...token_masks import PendingMasks, TokenMasks
from . import collectives
from .followers import Followers
from .messages import Collect, Masks, RowAdded, RowRemoved, TableSender

_EXECUTED = -1
"""The id of a step that is launched and collected at once."""


class ParallelRunner:
    """Rank 0's OverlappingRunner: passes every call on to the followers, then makes it on this rank's own runner."""

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

    @property
    def launches_drafts(self) -> bool:
        """Ranks are not told what a row's pending drafts are."""
        return False

    def add_row(self, row: int, request: InferRequest) -> None:
        """A request that is refused here is not sent to the others, which would refuse it too."""
        if request.sampling.prompt_logprobs is not None:  # the other ranks do not know what the row still needs
            raise ValueError("'prompt_logprobs' is not supported on several devices, expected null")
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
            if plan.masks is not None:
                plan = dataclasses.replace(plan, masks=_SharedMasks(plan.masks, self._followers))
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
        self._followers.abandon_step(f"rank 0 failed in a step of all ranks ({type(error).__name__}: {error})")


class _SharedMasks:
    """Rank 0's masks, which it sends to the followers when it has them itself."""

    def __init__(self, masks: PendingMasks, followers: Followers) -> None:
        self._masks, self._followers, self._is_sent = masks, followers, False

    def result(self) -> TokenMasks:
        masks = self._masks.result()
        if not self._is_sent:
            self._is_sent = True
            self._followers.tell(Masks(masks.index.tobytes(), masks.words.tobytes()))
        return masks
