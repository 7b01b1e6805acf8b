"""The background loop of one engine: pulls requests, submits and aborts them, and hands out every step's outputs.

For: the owner of a request queue (the adapter's ModelState), which it serves through five callbacks, as MindIE's
LlmManager does. Does not know: text, Triton, who waits for a token. Invariants: the loop blocks in one poll and never
sleeps; every request that was pulled ends with exactly one output that has a finish_reason, whatever happens to the
engine; at most max_num_seqs requests are live, the rest stay in their owner's queue.

All callbacks run on the loop's thread. `_live` and `_transport` belong to that thread between start() and shutdown().
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import ParamSpec, TypeVar

from .config import EngineConfig
from .infer_request import EngineInput, EngineStats, InferRequest, ModelInfo, StepOutput, StepResult
from .transport import EngineDeadError, Transport, make_transport
from .wakeup import Wakeup

logger = logging.getLogger(__name__)

STALL_TIMEOUT_S = 60.0
"""Work waiting and no step finished for this long = not ready."""

P = ParamSpec("P")
T = TypeVar("T")


class Operation(IntEnum):
    """STOP ends a request. RELEASE_KV gives back its KV too; here every end does, so both are an abort."""

    STOP = 1
    RELEASE_KV = 2


class StatusType(IntEnum):
    CONTROL_SIGNAL_STATUS = 0
    REQUEST_ENQUEUE_STATUS = 1


class LlmManager:
    def __init__(
        self,
        config: EngineConfig,
        get_requests: Callable[[int], Sequence[InferRequest]],
        send_responses: Callable[[Sequence[StepOutput]], None],
        control_signal: Callable[[], Sequence[tuple[str, Operation]]],
        stats: Callable[[EngineStats], None],
        status_response: Callable[[str, str, StatusType], None],
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        """get_requests(n) drains at most n requests from the shared queue; it is called when this engine has room for
        n more. send_responses gets all outputs of a step at once. control_signal drains the requests to stop; one that
        is not live here is answered with an error. status_response(request_id, error_text or "", type) tells how each
        pulled request and each control signal was taken. An exception out of a callback is logged; the loop goes on.
        """
        self._config = config
        self._get_requests = get_requests
        self._send_responses = send_responses
        self._control_signal = control_signal
        self._stats = stats
        self._status_response = status_response
        self._stall_timeout_s = stall_timeout_s
        self._wakeup = Wakeup()
        self._transport: Transport | None = None
        self._thread: threading.Thread | None = None
        self._live: set[str] = set()
        self._stopping = False
        self._cause_of_death = ""
        self._last_progress_s = 0.0

    def start(self) -> ModelInfo:
        """Starts the engine and the loop's thread; returns when the model is loaded.

        Raises RuntimeError when it cannot load, with a text for the operator; then nothing is left behind.
        """
        self._transport = make_transport(self._config, self._wakeup.fileno())
        try:
            info = self._transport.start()
        except BaseException:
            self.shutdown()
            raise
        self._wakeup.set()
        self._thread = threading.Thread(target=self._run, name="llm-manager", daemon=True)
        self._thread.start()
        return info

    def wake(self) -> None:
        """There may be new requests or control signals. Any thread, cheap; the loop blocks otherwise."""
        self._wakeup.set()

    def check_ready(self) -> None:
        """Raises RuntimeError saying why, when the engine is dead or makes no progress. Any thread."""
        if self._cause_of_death:
            raise RuntimeError(self._cause_of_death)
        if self._thread is None or self._stopping:
            raise RuntimeError("the engine is not running")
        stalled_s = time.monotonic() - self._last_progress_s
        if self._live and stalled_s > self._stall_timeout_s:
            raise RuntimeError(f"the engine has {len(self._live)} requests and finished no step for {stalled_s:.0f} s")

    def shutdown(self) -> None:
        """Ends loop and engine and reaps the process; outstanding requests end with finish_reason "abort".

        Not from a callback. Requests still in the owner's queue stay there. May be called again.
        """
        self._stopping = True
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join()
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        self._wakeup.close()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except EngineDeadError as error:
                logger.error("%s; its last words:\n%s", error, error.details)
                self._lose_engine(f"the engine died: {error}")
            except Exception as error:
                logger.exception("the loop of the LLM manager failed")
                self._lose_engine(f"the engine's loop failed: {type(error).__name__}: {error}")
        self._end_all(lambda request_id: StepOutput(request_id, finish_reason="abort"))

    def _turn(self) -> None:
        self._deliver(self._wait())
        self._wakeup.clear()
        if not self._stopping:
            self._feed()

    def _wait(self) -> list[StepResult]:
        """Blocks until there is something to do. A dead engine's loop lives on, to refuse what is queued for it."""
        assert self._transport is not None
        if self._cause_of_death:
            self._wakeup.wait()
            return []
        return self._transport.receive()

    def _deliver(self, results: list[StepResult]) -> None:
        for result in results:
            self._last_progress_s = time.monotonic()
            self._live.difference_update(o.request_id for o in result.outputs if o.finish_reason is not None)
            if result.outputs:
                self._call(self._send_responses, result.outputs)
        if results:
            self._call(self._stats, results[-1].stats)

    def _feed(self) -> None:
        """Pulls requests and control signals, and sends them to the engine in one message."""
        assert self._transport is not None
        add = self._pull()
        abort = self._pull_aborts()
        if self._cause_of_death:
            self._fail_all()
            if add:
                self._wakeup.set()  # there may be more than there was room for
        elif add or abort:
            self._transport.send(EngineInput(tuple(add), tuple(abort)))

    def _pull(self) -> list[InferRequest]:
        room = self._config.max_num_seqs - len(self._live)
        pulled = self._call(self._get_requests, room) if room > 0 else None
        if not self._live:
            self._last_progress_s = time.monotonic()
        accepted = []
        for request in pulled or ():
            known = request.request_id in self._live
            error = f"request_id '{request.request_id}' is already live, expected a unique id" if known else ""
            self._call(self._status_response, request.request_id, error, StatusType.REQUEST_ENQUEUE_STATUS)
            if not known:
                self._live.add(request.request_id)
                accepted.append(request)
        return accepted

    def _pull_aborts(self) -> list[str]:
        abort = []
        for request_id, operation in self._call(self._control_signal) or ():
            live = request_id in self._live
            error = "" if live else f"{operation.name}: request_id '{request_id}' is not live, it may have ended"
            if live:
                abort.append(request_id)
            self._call(self._status_response, request_id, error, StatusType.CONTROL_SIGNAL_STATUS)
        return abort

    def _lose_engine(self, cause: str) -> None:
        """The place where a restart would hand the live requests to a new engine; until then they end."""
        self._cause_of_death = cause
        self._fail_all()
        self._wakeup.set()

    def _fail_all(self) -> None:
        self._end_all(lambda request_id: StepOutput(request_id, finish_reason="error", error=self._cause_of_death))

    def _end_all(self, last_output: Callable[[str], StepOutput]) -> None:
        outputs = [last_output(request_id) for request_id in self._live]
        self._live.clear()
        if outputs:
            self._call(self._send_responses, outputs)

    def _call(self, callback: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """A callback's failure is its own: it must not end the loop that every other request lives on."""
        try:
            return callback(*args, **kwargs)
        except Exception:
            logger.exception("a callback of the LLM manager failed")
            return None
