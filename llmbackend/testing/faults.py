"""Faults on demand: engines that die, hang or send malformed messages when a test asks for it.

For: tests and `make chaos`, through the engine argument `fault_directory`. Does not know: how faults are handled.
Invariant: without the argument none of this runs. Before each step a file in the directory, named after a fault, makes
the engine commit it once: the file is removed first, so the next engine is sound. A file `poison` stays: it holds a
token id, and a step that computes a request with this token in its prompt kills the process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np

from llmbackend.engine.adapter_loads import Adapters, AdaptingRunner
from llmbackend.engine.errors import DeviceLostError
from llmbackend.engine.messages import InferRequest, ModelInfo
from llmbackend.engine.step import (
    BROKEN_LOGITS,
    KVCopies,
    OffloadingRunner,
    OverlappingRunner,
    RowTable,
    Runner,
    SampledTokens,
    StepPlan,
)

POISON: Final = "poison"


class Link(Protocol):
    """The engine's end of its socket, as its loop uses it."""

    def recv(self, flags: int = 0) -> bytes: ...
    def send(self, data: bytes, flags: int = 0) -> object: ...


class Faults:
    """The faults that one directory asks for."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def take(self, name: str) -> bool:
        """Whether this fault is due; its file is removed."""
        try:
            (self._directory / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def poison(self) -> int | None:
        """The token id that kills."""
        try:
            text = (self._directory / POISON).read_text()
        except FileNotFoundError:
            return None
        return int(text) if text else None  # empty: it is being written


class FaultyRunner:
    """A runner that fails where a fault is due, and else does what `runner` does."""

    def __init__(self, runner: Runner, faults: Faults) -> None:
        self._runner = runner
        self._faults = faults
        self._requests: dict[int, InferRequest] = {}

    @property
    def info(self) -> ModelInfo:
        return self._runner.info

    @property
    def adapters(self) -> Adapters | None:
        return self._runner.adapters if isinstance(self._runner, AdaptingRunner) else None

    def add_row(self, row: int, request: InferRequest) -> None:
        self._runner.add_row(row, request)
        self._requests[row] = request

    def remove_row(self, row: int) -> None:
        self._runner.remove_row(row)
        self._requests.pop(row, None)

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        self._fail_before(plan)
        return self._with_fault(plan, self._runner.execute(plan, table))

    def copy_blocks(self, copies: KVCopies) -> None:
        assert isinstance(self._runner, OffloadingRunner)
        self._runner.copy_blocks(copies)

    def close(self) -> None:
        self._runner.close()

    def _fail_before(self, plan: StepPlan) -> None:
        self._die(plan)
        if self._faults.take("exception"):
            raise RuntimeError("injected fault: exception in a step")
        if self._faults.take("out-of-memory"):
            raise MemoryError("injected fault: out of memory")
        if self._faults.take("device-lost"):
            raise DeviceLostError("injected fault: the device is lost")
        if self._faults.take("device-error"):
            _break_device()

    def _with_fault(self, plan: StepPlan, sampled: SampledTokens) -> SampledTokens:
        rows = plan.rows[plan.sample_rows].tolist()
        if self._faults.take("escape"):
            return replace(sampled, token_ids=np.zeros(plan.num_samples + 1, np.int32))
        if rows and self._faults.take("nan-logits"):
            return self._without_logits(sampled, rows[0])
        return sampled

    def _die(self, plan: StepPlan) -> None:
        if self._faults.take("exit"):
            os._exit(3)
        if self._faults.take("segfault"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._faults.take("hang"):
            time.sleep(86400)
        poison = self._faults.poison()
        if any(poison in self._requests[row].prompt_token_ids for row in plan.rows.tolist()):
            os.kill(os.getpid(), signal.SIGSEGV)

    def _without_logits(self, sampled: SampledTokens, row: int) -> SampledTokens:
        errors: Mapping[int, str] = MappingProxyType({**sampled.errors, row: BROKEN_LOGITS})
        return replace(sampled, errors=errors)


class FaultyOverlappingRunner(FaultyRunner):
    """The same for a runner whose steps overlap: faults raise at the launch, or, when a step is `lost` on the device,
    in `collect`, which ends the runner."""

    def __init__(self, runner: OverlappingRunner, faults: Faults) -> None:
        super().__init__(runner, faults)
        self._overlapping = runner
        self._plans: deque[StepPlan] = deque()

    @property
    def max_steps_in_flight(self) -> int:
        return self._overlapping.max_steps_in_flight

    @property
    def launches_drafts(self) -> bool:
        return self._overlapping.launches_drafts

    def launch(self, step_id: int, plan: StepPlan, table: RowTable) -> None:
        self._fail_before(plan)
        self._overlapping.launch(step_id, plan, table)
        self._plans.append(plan)

    def collect(self) -> tuple[int, SampledTokens]:
        step_id, sampled = self._overlapping.collect()
        if self._faults.take("lost"):
            raise RuntimeError("injected fault: a step was lost on the device")
        return step_id, self._with_fault(self._plans.popleft(), sampled)


def _break_device() -> None:
    """An index out of bounds in a kernel: CUDA fails the calls of this process that come when it has run."""
    torch: Any = sys.modules["torch"]  # an engine on a GPU has it; one on a CPU may do without
    torch.zeros(1, device="cuda")[torch.full((1,), 1 << 30, device="cuda")]


def with_faults(runner: Runner, faults: Faults) -> Runner:
    """The runner with faults; it overlaps steps if `runner` does."""
    if isinstance(runner, OverlappingRunner):
        return FaultyOverlappingRunner(runner, faults)
    return FaultyRunner(runner, faults)


class FaultyLink:
    """A socket that sends bytes that are no message when the fault `malformed` is due."""

    def __init__(self, link: Link, faults: Faults) -> None:
        self._link = link
        self._faults = faults

    def recv(self, flags: int = 0) -> bytes:
        return self._link.recv(flags)

    def send(self, data: bytes, flags: int = 0) -> object:
        return self._link.send(b"\xc1 no message" if self._faults.take("malformed") else data, flags)
