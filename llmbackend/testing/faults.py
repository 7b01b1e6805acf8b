"""Fault injection: engines that die, hang or send malformed messages on request.

Used by tests and `make chaos`, through the engine argument `fault_directory`; otherwise none of this runs. A file in
that directory, named after a fault, triggers the fault once, at the next step; the file is removed first, so that the
next engine works. The file `poison` stays: it contains a token id, and a step kills the process if a request in it has
this token in its prompt.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
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
    """The engine's end of its socket."""

    def recv(self, flags: int = 0) -> bytes: ...
    def send(self, data: bytes, flags: int = 0) -> object: ...
    def poll(self, timeout: int) -> int:
        """Waits at most `timeout` ms for a message; 0 = none has come."""


class Faults:
    """The faults requested in one directory."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def take(self, name: str) -> bool:
        """Whether this fault was requested. Removes the request."""
        try:
            (self._directory / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def poison(self) -> int | None:
        """The token id that kills the process."""
        try:
            text = (self._directory / POISON).read_text()
        except FileNotFoundError:
            return None
        return int(text) if text else None  # empty = still being written


class FaultyRunner:
    """Wraps `runner` and injects requested faults."""

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
            return replace(sampled, errors=MappingProxyType({**sampled.errors, rows[0]: BROKEN_LOGITS}))
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


class FaultyOverlappingRunner(FaultyRunner):
    """For a runner with overlapping steps: faults raise at launch; `lost` raises in `collect` and ends the runner."""

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
    """Indexes out of bounds in a kernel, after which all CUDA calls in this process fail."""
    torch: Any = sys.modules["torch"]  # already imported by every engine on a GPU
    torch.zeros(1, device="cuda")[torch.full((1,), 1 << 30, device="cuda")]


def with_faults(runner: Runner, faults: Faults) -> Runner:
    """Steps overlap if those of `runner` do."""
    if isinstance(runner, OverlappingRunner):
        return FaultyOverlappingRunner(runner, faults)
    return FaultyRunner(runner, faults)


class FaultyLink:
    """A socket that sends malformed bytes on the fault `malformed`."""

    def __init__(self, link: Link, faults: Faults) -> None:
        self._link = link
        self._faults = faults

    def recv(self, flags: int = 0) -> bytes:
        return self._link.recv(flags)

    def send(self, data: bytes, flags: int = 0) -> object:
        return self._link.send(b"\xc1 no message" if self._faults.take("malformed") else data, flags)

    def poll(self, timeout: int) -> int:
        return self._link.poll(timeout)
