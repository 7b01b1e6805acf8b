"""One engine, kept alive: loads it, watches it, and starts another one when it dies, hangs or speaks nonsense.

For: the LLM manager's loop, whose thread owns it. Does not know: requests; whoever holds them hears of a death through
EngineDeadError and gives them to the next life. Invariants: at most one engine exists at a time, and the dead one is
reaped before the next is launched; no call blocks for longer than it takes until there is something to do; a life
that finished no step is followed by a longer pause than the one before it, and after `max_engine_failures` such lives
the engine is given up: it is still tried again now and then, but nobody should wait for it. A start for which the
machine lacks descriptors, memory or processes is tried again, at growing intervals, and is no failure of the engine.
"""

from __future__ import annotations

import logging
import time

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.infer_request import EngineInput, ModelInfo, StepResult
from llmbackend.engine.transport import EngineDeadError, Transport, make_transport

from .nursery import Nursery
from .shortage import is_shortage
from .wakeup import Wakeup

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
LONGEST_SHORTAGE_PAUSE_S = 10.0


class Supervisor:
    """The engine's lives, one after the other. `check_ready` may be called from any thread, the rest from the
    owner's."""

    def __init__(self, config: EngineConfig, wakeup: Wakeup) -> None:
        self._config = config
        self._wakeup = wakeup
        self._nursery = Nursery(config)
        self._transport: Transport | None = None
        self._info: ModelInfo | None = None
        self._num_failures = 0
        self._num_shortages = 0
        self._can_pardon = True
        self._launch_at_s = 0.0
        self._progress_at_s = time.monotonic()
        self._cause = ""

    @property
    def info(self) -> ModelInfo | None:
        """The loaded model; None while the engine loads, or is down."""
        return self._info

    @property
    def is_given_up(self) -> bool:
        return self._num_failures >= self._config.max_engine_failures and self._info is None

    def receive(self, is_busy: bool) -> list[StepResult]:
        """Blocks until there are results, a wake-up, or the engine's state changed.

        `is_busy`: the engine has requests, so that a step is due within step_timeout_s. Raises EngineDeadError once for
        each death; the engine is reaped by then, and the calls that follow bring up the next one.
        """
        try:
            if self._transport is None:
                self._launch_when_due()
            elif self._info is None:
                self._wait_for_model(self._transport)
            else:
                return self._wait_for_step(self._transport, is_busy)
        except EngineDeadError as error:
            self._bury(error)
            raise
        return []

    def send(self, message: EngineInput) -> None:
        """Only while `info` is there. Raises EngineDeadError as `receive` does."""
        assert self._transport is not None
        try:
            self._transport.send(message)
        except EngineDeadError as error:
            self._bury(error)
            raise

    def check_ready(self, num_requests: int, stall_timeout_s: float) -> None:
        """Raises RuntimeError saying why nothing should be sent to this engine."""
        if self.is_given_up:
            raise RuntimeError(f"the engine failed {self._num_failures} times in a row, the last time: {self._cause}")
        stalled_s = time.monotonic() - self._progress_at_s
        if stalled_s <= stall_timeout_s:
            return
        if self._info is None:
            raise RuntimeError(f"the engine has been down for {stalled_s:.0f} s: {self._cause or 'it is loading'}")
        if num_requests:
            raise RuntimeError(f"the engine has {num_requests} requests and finished no step for {stalled_s:.0f} s")

    def idle(self) -> None:
        """The engine has nothing to do: the time until its next step counts from now on."""
        if self._info is not None:
            self._progress_at_s = time.monotonic()

    def pardon(self) -> None:
        """The failures so far were not the engine's. Only once between two finished steps: an engine that fails with
        whatever it is given is broken."""
        if self._can_pardon:
            self._can_pardon = False
            self._num_failures = 0
            self._launch_at_s = time.monotonic()

    def discard(self, reason: str) -> EngineDeadError:
        """Ends this engine's life because its owner cannot go on with it; the next one follows."""
        error = EngineDeadError(reason, "loop")
        if self._transport is not None:
            self._bury(error)
        return error

    def close(self) -> None:
        """Ends the engine, in whatever state it is."""
        if self._transport is not None:
            self._transport.close()
        self._transport = self._info = None
        self._nursery.close()

    def _launch_when_due(self) -> None:
        pause_s = self._launch_at_s - time.monotonic()
        if pause_s > 0:
            self._wakeup.wait(pause_s)
            return
        try:
            self._transport = make_transport(self._nursery, self._wakeup.fileno())
            self._transport.launch()
        except EngineDeadError:
            raise
        except Exception as error:
            if not is_shortage(error):
                raise
            raise EngineDeadError(f"the engine could not be started: {error}", "shortage") from error
        self._launch_at_s = time.monotonic()

    def _wait_for_model(self, transport: Transport) -> None:
        left_s = self._launch_at_s + self._config.load_timeout_s - time.monotonic()
        if left_s <= 0:
            raise EngineDeadError(f"the model did not load within {self._config.load_timeout_s:g} s", "hang")
        self._info = transport.receive_started(left_s)
        if self._info is not None:
            self._num_shortages = 0
        self.idle()

    def _wait_for_step(self, transport: Transport, is_busy: bool) -> list[StepResult]:
        limit_s = self._config.step_timeout_s
        left_s = self._progress_at_s + limit_s - time.monotonic() if is_busy else None
        results = transport.receive(left_s)
        if results:
            self._progress_at_s = time.monotonic()
            self._num_failures = 0
            self._can_pardon = True
        elif is_busy and time.monotonic() >= self._progress_at_s + limit_s:
            raise EngineDeadError(f"the engine finished no step within {limit_s:g} s", "hang")
        return results

    def _bury(self, error: EngineDeadError) -> None:
        """Reaps the engine and says when the next one may start: at once, unless this one did nothing."""
        if self._transport is not None:
            self._transport.close(force=True)
        self._transport = self._info = None
        self._cause = str(error)
        if error.kind == "shortage":
            self._num_shortages += 1
            pause_s = min(_pause_s(self._num_shortages), LONGEST_SHORTAGE_PAUSE_S)
            count = f"the machine lacks what it takes, {self._num_shortages} times in a row"
        else:
            self._num_failures += 1
            pause_s = _pause_s(self._num_failures - 1)
            count = f"failure {self._num_failures} in a row"
        self._launch_at_s = time.monotonic() + pause_s
        last_words = f"; its last words:\n{error.details}" if error.details else ""
        logger.error("%s; %s, the next start is in %.1f s%s", error, count, pause_s, last_words)


def _pause_s(count: int) -> float:
    return min(FIRST_PAUSE_S * 2.0 ** (count - 1), LONGEST_PAUSE_S) if count > 0 else 0.0
