"""Keeps one engine alive: loads it, watches it, and starts another when it dies, hangs or sends malformed messages.

Owned by the LLM manager's loop. Independent of requests: their owner catches EngineDeadError and gives them to the next
engine. Invariants: at most one engine exists at a time, and a dead one is reaped before the next is launched; calls
block only until there is something to do. Each consecutive engine that finished no step is followed by a longer pause;
after `max_engine_failures` of them, requests should no longer wait for this engine, which is still retried at
intervals. A start that fails because the machine lacks descriptors, memory or processes is retried at growing intervals
and does not count as a failure; neither does an engine's end when memory runs out. A process that prepares the model
for the next one ends without a failure; both together have the time limit of one load.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec

from llmbackend.fork_server.client import restart_pause_s, wait_readable
from llmbackend.fork_server.host_policy import NO_POLICY, HostPolicy
from llmbackend.gguf.files import stamp
from llmbackend.waiting.wakeup import Wakeup

from ..config import EngineConfig
from ..errors import EngineDeadError, is_shortage
from ..load_progress import LoadProgress
from ..messages import EngineInput, ModelInfo, ModelPrepared, StepResult
from .engine_link import Transport
from .transport import EngineForkServer, make_transport

logger = logging.getLogger(__name__)

MAX_SHORTAGE_PAUSE_S = 10.0
MAX_DISCONNECT_PAUSE_S = 1.0
"""A remote engine is retried soon: that is cheap, and its machine may be back."""
MAX_PREPARATIONS = 2
"""In a row, before an engine that finds nothing prepared loads the model itself."""


class Supervisor:
    """Consecutive engines of one config. Any thread may call `check_ready` and `kill`; the rest is for the owner's."""

    def __init__(
        self,
        config: EngineConfig,
        source: EngineSource,
        wakeup: Wakeup,
        progress: Callable[[LoadProgress], None] = lambda progress: None,
    ) -> None:
        """source: of engines of this config; closed by the supervisor. progress: called while an engine loads."""
        self._progress = progress
        self._config = config
        self._wakeup = wakeup
        self._source = source
        self._transport: Transport | None = None
        self._info: ModelInfo | None = None
        self._num_failures = 0
        """Engines lost since a step was finished."""
        self._num_unreached = 0
        """Lost connections to a remote engine, and failed attempts to connect, since one was reached."""
        self._num_shortages = 0
        self._num_preparations = 0
        self._prepared = ModelPrepared()
        """What earlier processes did to prepare the model."""
        self._can_reset_failures = True
        self._launch_at_s = 0.0
        self._load_began_s = 0.0
        self._is_load_due = False
        """Whether a load has begun and its engine is still to be launched."""
        self._progress_at_s = time.monotonic()
        self._used_at_s = time.monotonic()
        self._cause = ""
        self._is_asleep = False

    @property
    def is_asleep(self) -> bool:
        """Whether the engine was stopped because it was idle, and none is started until `wake_up`."""
        return self._is_asleep

    @property
    def info(self) -> ModelInfo | None:
        """The loaded model; None while the engine loads or is down."""
        return self._info

    @property
    def pid(self) -> int | None:
        """Of the engine's process; None if it runs on a thread or is down."""
        return None if self._transport is None else self._transport.pid

    @property
    def num_requests_of_others(self) -> int:
        """Requests of other hosts in the engine, by its last report."""
        return 0 if self._transport is None else self._transport.num_requests_of_others

    @property
    def knows_vocabulary(self) -> bool:
        """Whether another host has sent the engine the vocabulary."""
        return self._transport is not None and self._transport.knows_vocabulary

    @property
    def is_given_up(self) -> bool:
        """Whether it failed too often in a row for requests to wait for it."""
        return self._num_in_a_row >= self._config.max_engine_failures and self._info is None

    @property
    def _num_in_a_row(self) -> int:
        return self._num_failures + self._num_unreached

    def receive(self, is_busy: bool) -> list[StepResult]:
        """Blocks until there are results, a wake-up, or a change of the engine's state.

        is_busy: the engine has requests, so a step is due within step_timeout_s. Raises EngineDeadError once per death;
        the engine has been reaped by then, and later calls bring up the next one.
        """
        try:
            if self._is_asleep:
                wait_readable(self._wakeup.fileno(), None)
            elif self._transport is None:
                self._launch_when_due()
            elif self._info is None:
                self._wait_for_model(self._transport)
            else:
                return self._wait_for_step(self._transport, is_busy)
        except EngineDeadError as error:
            self._reap(error)
            raise
        return []

    def send(self, message: EngineInput) -> None:
        """Only while `info` is not None. Raises EngineDeadError as `receive` does."""
        assert self._transport is not None
        try:
            self._transport.send(message)
        except EngineDeadError as error:
            self._reap(error)
            raise

    def check_ready(self, num_requests: int, stall_timeout_s: float) -> None:
        """Raises RuntimeError with the reason if nothing should be sent to this engine."""
        if self._is_asleep:
            return
        if self.is_given_up:
            raise RuntimeError(f"the engine failed {self._num_in_a_row} times in a row, the last time: {self._cause}")
        stalled_s = time.monotonic() - self._progress_at_s
        if stalled_s <= stall_timeout_s:
            return
        if self._info is None:
            raise RuntimeError(f"the engine has been down for {stalled_s:.0f} s: {self._cause or 'it is loading'}")
        if num_requests:
            raise RuntimeError(f"the engine has {num_requests} requests and finished no step for {stalled_s:.0f} s")

    def kill(self) -> int:
        """Sends SIGKILL to the process of the loaded engine and returns its pid; 0 = there is none."""
        transport = self._transport
        return 0 if transport is None or self._info is None else transport.kill()

    def idle(self) -> None:
        """The engine has no requests: the time until its next step starts now."""
        if self._info is not None:
            self._progress_at_s = time.monotonic()

    def sleep_if_unused(self) -> bool:
        """Stops an engine that had no request for `idle_unload_s`. Called while it has none."""
        idle_s = self._config.idle_unload_s
        if not idle_s or self._transport is None or self._info is None:
            return False
        if time.monotonic() < self._used_at_s + idle_s:
            return False
        logger.info("the engine was idle for %g s: stopping it until the next request", idle_s)
        self._transport.close()
        self._transport = self._info = None
        self._is_asleep = True
        return True

    def wake_up(self) -> None:
        """Makes the next engine due now."""
        self._is_asleep = False
        self._progress_at_s = self._launch_at_s = time.monotonic()

    def reset_failures(self) -> None:
        """Forgets the failures so far, because a request was to blame for them. Works once until a step is finished,
        because an engine that fails with every request is broken."""
        if self._can_reset_failures:
            self._can_reset_failures = False
            self._num_failures = 0
            self._launch_at_s = time.monotonic()

    def discard(self, reason: str) -> EngineDeadError:
        """Ends this engine because its owner cannot continue with it; the next one follows."""
        error = EngineDeadError(reason, "loop")
        self._reap(error)
        return error

    def close(self) -> None:
        """Ends the engine in any state."""
        if self._transport is not None:
            self._transport.close()
        self._transport = self._info = None
        self._source.close()

    def _launch_when_due(self) -> None:
        pause_s = self._launch_at_s - time.monotonic()
        if pause_s > 0:
            wait_readable(self._wakeup.fileno(), pause_s)
            return
        if not self._num_preparations and not self._is_load_due:
            self._load_began_s = time.monotonic()
        self._is_load_due = True
        try:
            self._transport = self._source.make_transport(self._wakeup.fileno(), self._progress)
            if self._transport is None:
                wait_readable(self._wakeup.fileno(), self._load_time_left_s())
                return
            self._is_load_due = False
            self._transport.launch()
        except EngineDeadError:
            raise
        except Exception as error:
            if not is_shortage(error):
                raise
            raise EngineDeadError(f"the engine could not be started: {error}", "shortage") from error

    def _wait_for_model(self, transport: Transport) -> None:
        started = transport.receive_started(self._load_time_left_s())
        if isinstance(started, ModelPrepared):
            self._relaunch(transport, started)
        elif started is not None:
            self._info = self._with_whole_start(started)
            self._num_preparations = self._num_unreached = 0
            self._used_at_s = time.monotonic()
        self.idle()

    def _load_time_left_s(self) -> float:
        """Raises EngineDeadError if none is left."""
        left_s = self._load_began_s + self._config.load_timeout_s - time.monotonic()
        if left_s <= 0:
            raise EngineDeadError(f"the model did not load within {self._config.load_timeout_s:g} s", "hang")
        return left_s

    def _with_whole_start(self, info: ModelInfo) -> ModelInfo:
        before, self._prepared = self._prepared, ModelPrepared()
        whole = msgspec.structs.replace(
            info,
            paths=before.paths + info.paths,
            parts=before.parts + info.parts,
            load_s=time.monotonic() - self._load_began_s,
        )
        if self._cause:
            logger.info("the engine is back: %s", whole.summary)
        return whole

    def _relaunch(self, transport: Transport, prepared: ModelPrepared) -> None:
        """The process has prepared the model and exits; the next one is due at once."""
        before = self._prepared
        self._prepared = ModelPrepared(before.paths + prepared.paths, before.parts + prepared.parts)
        transport.close()
        self._transport = None
        self._num_preparations += 1
        if self._num_preparations >= MAX_PREPARATIONS and self._source.load_whole():
            logger.warning("prepared models keep disappearing: engines load the model themselves")
        self._launch_at_s = time.monotonic()

    def _wait_for_step(self, transport: Transport, is_busy: bool) -> list[StepResult]:
        limit_s = self._config.step_timeout_s
        due_s = self._progress_at_s + limit_s if is_busy else None
        if not is_busy and self._config.idle_unload_s:
            due_s = self._used_at_s + self._config.idle_unload_s
        results = transport.receive(None if due_s is None else max(due_s - time.monotonic(), 0.0))
        if results:
            self._progress_at_s = self._used_at_s = time.monotonic()
            if any(result.stats.last_step_s > 0 for result in results):  # 0 = nothing was computed
                self._num_failures = self._num_shortages = 0
                self._can_reset_failures = True
        elif is_busy and time.monotonic() >= self._progress_at_s + limit_s:
            raise EngineDeadError(f"the engine finished no step within {limit_s:g} s", "hang")
        return results

    def _reap(self, error: EngineDeadError) -> None:
        """Reaps the engine and decides when the next one starts: at once, unless this one finished no step."""
        if self._transport is not None:
            self._transport.close(force=True)
        self._transport = self._info = None
        self._num_preparations = 0
        self._is_load_due = False
        self._prepared = ModelPrepared()
        self._cause = str(error)
        if error.kind in ("shortage", "memory"):
            self._num_shortages += 1
            pause_s = min(restart_pause_s(self._num_shortages), MAX_SHORTAGE_PAUSE_S)
            count = f"the machine lacks resources, {self._num_shortages} times in a row"
        else:
            is_remote = error.kind == "disconnect"  # whether the engine or its host ended is for its keeper to count
            self._num_unreached += is_remote
            self._num_failures += not is_remote
            most_s = MAX_DISCONNECT_PAUSE_S if is_remote else math.inf
            pause_s = min(restart_pause_s(self._num_in_a_row - 1), most_s)
            count = f"failure {self._num_in_a_row} in a row"
        self._launch_at_s = time.monotonic() + pause_s
        output = f"; its last output:\n{error.details}" if error.details else ""
        logger.error("%s; %s, the next start is in %.1f s%s", error, count, pause_s, output)


_READ_BY_ENGINES: Final = (
    *("*.safetensors", "*.safetensors.index.json", "*.gguf"),
    *("config.json", "generation_config.json"),
)


@dataclass
class _Shared:
    server: EngineForkServer
    num_users: int = 0


class ForkServers:
    """Shares one fork server among the engines of a config and of the same checkpoint files, so that what it holds,
    including weights, exists once. It ends with the supervisor of the last engine. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: dict[bytes, _Shared] = {}

    def acquire(self, config: EngineConfig, runners: str) -> EngineForkServer:
        """The fork server of this config; must be released."""
        key = _key(config, runners)
        with self._lock:
            shared = self._shared.get(key)
            if shared is None:
                shared = self._shared[key] = _Shared(EngineForkServer(config, runners))
            shared.num_users += 1
            return shared.server

    def release(self, server: EngineForkServer) -> None:
        with self._lock:
            key, shared = next((key, shared) for key, shared in self._shared.items() if shared.server is server)
            shared.num_users -= 1
            if shared.num_users:
                return
            del self._shared[key]
        server.close()


def _key(config: EngineConfig, runners: str) -> bytes:
    """With the state of the files that engines read, which may be replaced before a reload. A hub id has none yet."""
    files = []
    for path in sorted(path for pattern in _READ_BY_ENGINES for path in Path(config.model).glob(pattern)):
        with contextlib.suppress(OSError):
            files.append((path.name, *stamp(path)))
    return msgspec.json.encode((runners, config, files), order="sorted")


FORK_SERVERS: Final = ForkServers()


class EngineSource(Protocol):
    """Used by the supervisor's thread."""

    def make_transport(self, wake_fd: int, progress: Callable[[LoadProgress], None]) -> Transport | None:
        """Link to the next engine, not launched yet; None = there is none now, and a wake-up follows when that may have
        changed. Raises what making it raises."""

    def load_whole(self) -> bool:
        """Makes engines load the checkpoint themselves from now on. Returns whether that is a change."""

    def close(self) -> None: ...


class ForkedEngines:
    """Engines as children of this process, or as threads. Those of one config share a fork server from the first launch
    on."""

    def __init__(self, config: EngineConfig, runners: str, policy: HostPolicy = NO_POLICY) -> None:
        """policy: core and memory binding of their processes"""
        self._config = config
        self._policy = policy
        self._runners = runners
        self.fork_server: EngineForkServer | None = None

    def make_transport(self, wake_fd: int, progress: Callable[[LoadProgress], None]) -> Transport:
        self.fork_server = self.fork_server or FORK_SERVERS.acquire(self._config, self._runners)
        return make_transport(self.fork_server, wake_fd, progress, self._policy)

    def load_whole(self) -> bool:
        assert self.fork_server is not None
        was_whole, self.fork_server.is_whole = self.fork_server.is_whole, True
        return not was_whole

    def close(self) -> None:
        if self.fork_server is not None:
            FORK_SERVERS.release(self.fork_server)
            self.fork_server = None
