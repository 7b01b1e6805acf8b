"""Mock devices whose timing the test chooses, so that host and device meet in every order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.step import RowTable, SampledTokens, StepPlan
from llmbackend.testing.overlapping_mock import DeviceStep, OverlappingMockRunner


class PacedDevice(OverlappingMockRunner):
    """A device that has run a step when `launch` returns, or does not begin before the host waits for it.

    is_fast: asked at each launch which of the two it is; without it a device is fast.
    """

    is_fast: Callable[[], bool] | None = None

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._may_run = threading.Semaphore(0)
        self._num_waiting = 0
        self.num_launches = 0

    def launch(self, step_id: int, plan: StepPlan, table: RowTable) -> None:
        super().launch(step_id, plan, table)
        self.num_launches += 1
        self._num_waiting += 1
        if self.is_fast is None or self.is_fast():
            self._run(self._num_waiting)
            self._launched[-1][1].result()

    def collect(self) -> tuple[int, SampledTokens]:
        if self._num_waiting == len(self._launched):
            self._run(1)
        return super().collect()

    def close(self) -> None:
        self._run(self._num_waiting)
        super().close()

    def _run(self, count: int) -> None:
        self._num_waiting -= count
        if count:
            self._may_run.release(count)

    def _compute(self, step: DeviceStep) -> SampledTokens:
        self._may_run.acquire()
        return super()._compute(step)


class FailingDevice(PacedDevice):
    """A device that refuses and spoils steps, as FailingRunner in test_engine_machine.py; ids are those of requests.

    poisonous: no step with them starts. not_numbers: their sampled rows get an error of their own, `error`.
    failures_left: how many of the next launches raise, with any rows.
    """

    error = "its logits are not numbers"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.poisonous: set[str] = set()
        self.not_numbers: set[str] = set()
        self.failures_left = 0
        self._spoilt: list[dict[int, str]] = []

    @property
    def num_rows(self) -> int:
        return len(self._requests)

    def launch(self, step_id: int, plan: StepPlan, table: RowTable) -> None:
        if self.failures_left:
            self.failures_left -= 1
            raise MemoryError("this launch fails")
        self._raise(plan)
        super().launch(step_id, plan, table)
        self._spoilt.append(self._errors(plan))

    def collect(self) -> tuple[int, SampledTokens]:
        step_id, sampled = super().collect()
        return step_id, replace(sampled, errors=self._spoilt.pop(0))

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        sampled = super().execute(plan, table)  # the KV is written when it raises
        self._raise(plan)
        return replace(sampled, errors=self._errors(plan))

    def _raise(self, plan: StepPlan) -> None:
        if self.poisonous & {self._requests[row].request_id for row in plan.rows.tolist()}:
            raise ArithmeticError("poisonous")

    def _errors(self, plan: StepPlan) -> dict[int, str]:
        rows = plan.rows[plan.sample_rows].tolist()
        return {row: self.error for row in rows if self._requests[row].request_id in self.not_numbers}


def drawn(seed: int) -> Callable[[], bool]:
    """A device that is fast or slow as it comes."""
    draw = np.random.default_rng(seed)
    return lambda: bool(draw.integers(2))


PACES: dict[str, Callable[[], Callable[[], bool]]] = {
    "fast": lambda: lambda: True,
    "slow": lambda: lambda: False,
    "drawn": lambda: drawn(1),
}


def make_overlapping(
    runner_class: type[PacedDevice] = PacedDevice, pace: str = "slow", in_flight: int = 2, **arguments: Any
) -> EngineCore:
    config = EngineConfig(model="mock", mock_steps_in_flight=in_flight, **arguments)
    runner = runner_class(config)
    runner.is_fast = PACES[pace]()
    return EngineCore(config, runner)


def device_of(core: EngineCore) -> Any:
    return core._runner


@contextmanager
def devices_closed() -> Iterator[None]:
    """The threads of all mock devices that are made inside end with it."""
    runners: list[OverlappingMockRunner] = []
    make = OverlappingMockRunner.__init__

    def noted(runner: OverlappingMockRunner, config: EngineConfig) -> None:
        make(runner, config)
        runners.append(runner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverlappingMockRunner, "__init__", noted)
        yield
    for runner in runners:
        runner.close()
