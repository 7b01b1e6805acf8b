"""The background loop of one engine: pulls requests, submits and aborts them, and delivers the outputs of every step.

Used by the owner of a request queue (the adapter's ModelState) through callbacks, like MindIE's LlmManager. Independent
of text, Triton and clients. Invariants: the loop blocks in one poll and never sleeps. Every pulled request ends with
exactly one output that has a finish_reason, or is returned to its owner because its engine has ended; an engine is also
discarded if get_requests or send_responses fails. At most max_num_seqs requests are live (fewer if other hosts share
the engine); the rest stay in the owner's queue.

All callbacks run on the loop's thread. Between start() and shutdown(), `_live` and `_supervisor` belong to that thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from typing import ParamSpec, TypeVar

from llmbackend.fork_server.host_policy import NO_POLICY, HostPolicy
from llmbackend.waiting.wakeup import Wakeup

from .config import EngineConfig
from .errors import EngineDeadError
from .load_progress import LoadProgress
from .messages import (
    AdapterLoad,
    AdapterResult,
    BlockChanges,
    EngineInput,
    EngineStats,
    InferRequest,
    ModelInfo,
    RequestEvent,
    StepOutput,
    StepResult,
    Vocabulary,
)
from .process.served.locating import remote_engines
from .process.supervisor import EngineSource, ForkedEngines, Supervisor
from .reports import NOT_WATCHED, EngineHistory, EngineReport, EngineState, Watch


class Operation(IntEnum):
    STOP = 1
    """Ends a request and frees its KV blocks."""


@dataclass(frozen=True, kw_only=True)
class ManagerCallbacks:
    """get_requests(n)                     drains at most n requests, the engine's free capacity, from the shared queue
    send_responses(outputs)             receives all outputs of a step at once
    control_signal()                    drains the requests to stop; one that is not live has ended meanwhile
    stats(stats)                        after each batch of steps
    status_response(id, error)          for each pulled request that is refused
    engine_lost(request_ids, cause)     the engine has ended, and with it these requests, in the order in which they
                                        were pulled; get_requests may hand them out again, to the next engine. After an
                                        exception in get_requests the owner may have handed out more; after one in
                                        send_responses some of them may have ended.
    vocabulary()                        the bytes of the model's tokens, for requests with a grammar; once per engine;
                                        None = such requests cannot be served
    adapters()                          the LoRA adapters that the engine should have, name → folder; None = those of
                                        the config. A changed mapping is a new object.
    adapter_loaded(result)              for each adapter in adapters() that was loaded, again in each new engine
    request_events(events)              of traced requests, before the outputs of the same step
    reported(report)                    before the outputs of the same step; only after `watch`
    state_changed(state)                when the engine is ready, was lost, or has stopped
    progress(progress)                  while an engine loads
    blocks_changed(changes)             in its prefix cache, before the outputs of the same step; only after
                                        `follow_prefixes`
    needs_engine()                      whether an engine that was stopped because it was idle must start again"""

    get_requests: Callable[[int], Sequence[InferRequest]]
    send_responses: Callable[[Sequence[StepOutput]], None]
    control_signal: Callable[[], Sequence[tuple[str, Operation]]]
    stats: Callable[[EngineStats], None]
    status_response: Callable[[str, str], None]
    engine_lost: Callable[[Sequence[str], EngineDeadError], None]
    vocabulary: Callable[[], Vocabulary | None] = lambda: None
    adapters: Callable[[], Mapping[str, str]] | None = None
    adapter_loaded: Callable[[AdapterResult], None] = lambda result: None
    request_events: Callable[[Sequence[RequestEvent]], None] = lambda events: None
    reported: Callable[[EngineReport], None] = lambda report: None
    state_changed: Callable[[EngineState], None] = lambda state: None
    progress: Callable[[LoadProgress], None] = lambda progress: None
    blocks_changed: Callable[[BlockChanges], None] = lambda changes: None
    needs_engine: Callable[[], bool] = lambda: False


logger = logging.getLogger(__name__)

RUNNERS = "llmbackend.engine.make_runner"
"""By name, so the host does not import the code that computes."""
STALL_TIMEOUT_S = 60.0
"""An engine with requests that completes no step for this long is not ready."""

P = ParamSpec("P")
T = TypeVar("T")


def _source(config: EngineConfig, index: int, wakeup: Wakeup, policy: HostPolicy) -> EngineSource:
    """Child processes, unless a cluster places the engines; then the engines' machines decide."""
    engines = remote_engines()
    if engines is None or config.transport != "process":
        return ForkedEngines(config, RUNNERS, policy)
    from .process.served.remote import RemoteEngineSource

    return RemoteEngineSource(engines, config, index, wakeup.set)


def _refuse_to_wait() -> None:
    """Raises EngineDeadError if this process is about to end, since a remote engine may never come."""
    engines = remote_engines()
    if engines is not None and engines.users.are_stopping:
        raise EngineDeadError("this host is stopping and no longer waits for engines", "load")


class LlmManager:
    def __init__(
        self,
        config: EngineConfig,
        callbacks: ManagerCallbacks,
        *,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        index: int = 0,
        policy: HostPolicy = NO_POLICY,
    ) -> None:
        """callbacks: called on the loop's thread
        index: of the instance; identifies its engine in a cluster
        policy: core and memory binding of the loop and the engine; not applied to an engine on another machine"""
        self._max_num_seqs = config.max_num_seqs
        self._reads_ahead = config.transport == "process"
        self._on = callbacks
        self._stall_timeout_s = stall_timeout_s
        self._wakeup = Wakeup()
        self._has_sent_vocabulary = False
        """Whether this engine has the vocabulary, from this or another host."""
        self._prepares_grammars = False
        """Whether to send the vocabulary before the first request with a grammar."""
        self._configured_adapters: Mapping[str, str] = config.lora_modules
        self._sent_adapters: Mapping[str, str] = config.lora_modules
        """Adapters that the engine has or will have."""
        self._history = EngineHistory()
        self._watch = self._sent_watch = NOT_WATCHED
        """What to report, and what the engine was last told to report."""
        self._follows_prefixes = self._sent_prefixes = False
        """The same for changes of its prefix cache."""
        self._policy = policy
        source = _source(config, index, self._wakeup, policy)
        self._supervisor = Supervisor(config, source, self._wakeup, callbacks.progress)
        self._thread = threading.Thread(target=self._run, name="llm-manager", daemon=True)
        self._is_ordered = threading.Event()
        """Set once the first engine has been ordered."""
        self._first_load: Future[ModelInfo] = Future()
        self._is_up = False
        """Whether an engine has loaded the model."""
        self._live: dict[str, None] = {}
        self._stopping = False

    @property
    def is_given_up(self) -> bool:
        """Whether the engine failed so many times in a row that requests no longer wait for it. Any thread."""
        return self._supervisor.is_given_up

    @property
    def is_up(self) -> bool:
        """Whether there is now an engine that has loaded the model. Any thread."""
        return self._is_up

    @property
    def state(self) -> EngineState:
        """Any thread."""
        return self._history.current

    @property
    def capacity(self) -> int:
        """How many more requests the engine would take now; below 1 = none. Any thread."""
        return self._max_num_seqs - len(self._live) - self._supervisor.num_requests_of_others

    def watch(self, watch: Watch) -> None:
        """Sets what this and later engines report. Any thread, cheap."""
        self._watch = watch
        self._wakeup.set()

    def follow_prefixes(self, is_wanted: bool) -> None:
        """Sets whether this and later engines report changes of their prefix cache. Any thread, cheap."""
        self._follows_prefixes = is_wanted
        self._wakeup.set()

    def start(self, meanwhile: Callable[[], object] = lambda: None) -> ModelInfo:
        """Starts the loop's thread and the engine; returns once the model is loaded.

        meanwhile: work to do while the model loads; an exception from it ends the engine and is re-raised. Raises
        RuntimeError with a message for the operator if the model cannot be loaded. After any exception, no process or
        thread is left.
        """
        try:
            self._thread.start()
        except RuntimeError:  # the machine has no more threads
            self._supervisor.close()
            self._wakeup.close()
            raise
        self._is_ordered.wait()
        try:
            meanwhile()
        except BaseException:
            self.shutdown()
            raise
        try:
            return self._first_load.result()
        except EngineDeadError as error:
            self.shutdown()
            if error.kind == "load":
                raise
            output = f"; its last output:\n{error.details}" if error.details else ""
            raise RuntimeError(f"{error} while the model was loading{output}") from error

    def wake(self) -> None:
        """Tells the blocked loop that there may be new requests or control signals. Any thread, cheap."""
        self._wakeup.set()

    def prepare_grammars(self) -> None:
        """Makes an engine in its own process read the vocabulary now, while it is idle, so that the first request with
        a grammar does not delay others. Later engines read it on demand. Any thread."""
        self._prepares_grammars = self._reads_ahead
        self._wakeup.set()

    def kill_engine(self) -> int:
        """Sends SIGKILL to the engine's process and returns its pid; 0 = no engine has loaded. Any thread."""
        return self._supervisor.kill()

    def reset_failures(self) -> None:
        """Called from engine_lost if a request, not the engine, is to blame for the failure."""
        self._supervisor.reset_failures()

    def check_ready(self) -> None:
        """Raises RuntimeError with the reason if the engine is given up or makes no progress. Any thread."""
        if self._stopping or not self._first_load.done():
            raise RuntimeError("the engine is not running")
        self._supervisor.check_ready(len(self._live), self._stall_timeout_s)

    def shutdown(self) -> None:
        """Ends loop and engine and reaps the process; outstanding requests end with finish_reason "abort".

        Must not be called from a callback. Requests still in the owner's queue stay there. May be called again.
        """
        self._stopping = True
        self._wakeup.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._wakeup.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # already reported by the instance's own thread
            self._policy.bind()
        while not self._stopping:
            try:
                self._turn()
            except EngineDeadError as error:
                self._lose_engine(error)
            except Exception as error:
                logger.exception("the loop of the LLM manager failed")
                self._lose_engine(
                    self._supervisor.discard(f"the engine's loop failed: {type(error).__name__}: {error}")
                )
        self._is_ordered.set()
        if not self._first_load.done():
            self._first_load.set_exception(EngineDeadError("the engine was stopped", "exit"))
        outputs = [StepOutput(request_id, finish_reason="abort") for request_id in self._live]
        if outputs:
            self._call(self._on.send_responses, outputs)
        self._supervisor.close()
        self._call(self._on.state_changed, self._history.stopped())
        del self._on  # the callbacks refer to their owner, which refers to this object

    def _turn(self) -> None:
        if not self._first_load.done():
            _refuse_to_wait()
        try:
            results = self._supervisor.receive(is_busy=bool(self._live))
        finally:
            self._is_ordered.set()
        self._deliver(results)
        self._wakeup.clear()
        if self._supervisor.is_asleep:
            if self._call(self._on.needs_engine):
                self._supervisor.wake_up()
            self._pull_aborts()
            return
        if not self._is_up and (info := self._supervisor.info) is not None:
            self._engine_is_up(info)
        if not self._stopping:
            self._feed()
            if not self._live and self._supervisor.sleep_if_unused():
                self._forget_engine()
                self._call(self._on.stats, EngineStats())  # the next engine's counters start at zero
                self._call(self._on.state_changed, self._history.slept())

    def _forget_engine(self) -> None:
        """Resets the state kept about an engine to that of a new one."""
        self._has_sent_vocabulary = self._prepares_grammars = False
        self._sent_adapters = self._configured_adapters
        self._is_up = False
        self._sent_watch = NOT_WATCHED
        self._sent_prefixes = False

    def _engine_is_up(self, info: ModelInfo) -> None:
        self._is_up = True
        self._has_sent_vocabulary = self._supervisor.knows_vocabulary
        self._call(self._on.state_changed, self._history.ready(self._supervisor.pid))
        if not self._first_load.done():
            self._first_load.set_result(info)

    def _deliver(self, results: list[StepResult]) -> None:
        for result in results:
            if result.events:
                self._call(self._on.request_events, result.events)
            if result.report is not None:
                self._call(self._on.reported, result.report)
            if result.blocks is not None:
                self._call(self._on.blocks_changed, result.blocks)
            if result.outputs:
                self._on.send_responses(result.outputs)
            for output in result.outputs:
                if output.finish_reason is not None:
                    self._live.pop(output.request_id, None)
            for adapter in result.adapters:
                self._call(self._on.adapter_loaded, adapter)
        if results:
            self._call(self._on.stats, results[-1].stats)

    def _feed(self) -> None:
        """Pulls requests and control signals and sends them to the engine in one message."""
        if self._supervisor.info is None:
            self._pull_aborts()
            return
        add, abort = self._pull(), self._pull_aborts()
        load, drop = self._adapter_changes()
        vocabulary = self._first_vocabulary(add)
        watch, prefixes = self._changed_watch(), self._changed_prefixes()
        if add or abort or load or drop or vocabulary is not None or watch is not None or prefixes is not None:
            self._supervisor.send(EngineInput(tuple(add), tuple(abort), False, vocabulary, load, drop, watch, prefixes))

    def _changed_watch(self) -> Watch | None:
        watch = self._watch
        if watch is self._sent_watch:
            return None
        self._sent_watch = watch
        return watch

    def _changed_prefixes(self) -> bool | None:
        is_wanted = self._follows_prefixes
        if is_wanted == self._sent_prefixes:
            return None
        self._sent_prefixes = is_wanted
        return is_wanted

    def _adapter_changes(self) -> tuple[tuple[AdapterLoad, ...], tuple[str, ...]]:
        """Adapters to load and to drop. Must be called after requests were pulled: those name only adapters that are
        wanted by then."""
        wanted, sent = None if self._on.adapters is None else self._call(self._on.adapters), self._sent_adapters
        if wanted is None or wanted is sent:
            return (), ()
        self._sent_adapters = wanted
        load = (AdapterLoad(name, path) for name, path in wanted.items() if name not in sent)
        return tuple(load), tuple(name for name in sent if name not in wanted)

    def _first_vocabulary(self, add: Sequence[InferRequest]) -> Vocabulary | None:
        """The vocabulary, once per engine: when it is to be prepared, or with the first request with a grammar."""
        if self._has_sent_vocabulary or not (self._prepares_grammars or any(request.grammar for request in add)):
            return None
        vocabulary = self._call(self._on.vocabulary)
        self._has_sent_vocabulary, self._prepares_grammars = vocabulary is not None, False
        return vocabulary

    def _pull(self) -> list[InferRequest]:
        if not self._live:
            self._supervisor.idle()
        room = self.capacity
        accepted = []
        for request in self._on.get_requests(room) if room > 0 else ():
            if request.request_id in self._live:
                error = f"request_id '{request.request_id}' is already running, expected a unique id"
                self._call(self._on.status_response, request.request_id, error)
            else:
                self._live[request.request_id] = None
                accepted.append(request)
        return accepted

    def _pull_aborts(self) -> list[str]:
        return [request_id for request_id, _ in self._call(self._on.control_signal) or () if request_id in self._live]

    def _lose_engine(self, error: EngineDeadError) -> None:
        """Returns the live requests to their owner. A failed first load is not retried."""
        self._forget_engine()
        if not self._first_load.done():
            if error.kind == "disconnect" and not self._supervisor.is_given_up:
                return  # it may come back, or the cluster may name another address
            self._stopping = True
            self._first_load.set_exception(error)
            return
        self._call(self._on.state_changed, self._history.lost(str(error), self._supervisor.is_given_up))
        lost, self._live = tuple(self._live), {}
        self._call(self._on.engine_lost, lost, error)

    def _call(self, callback: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Calls a callback whose failure loses no request: the exception is logged, and the loop continues.

        `get_requests` and `send_responses` are not called through this. After an exception it is unknown which requests
        were taken or which outputs were recorded, so the engine is discarded and its requests are returned.
        """
        try:
            return callback(*args, **kwargs)
        except Exception:
            logger.exception("a callback of the LLM manager failed")
            return None
