"""`python -m llmbackend.engine.process.served.served_engine`: keeps one engine for several hosts on this machine.

A cluster (or test) starts this command where the engine should run. It owns the listening socket and a fork server;
each process of the engine inherits the socket, so hosts find the next one at the same address, with packed weights
already in memory. Invariants: if a process dies, is silent, or gives no sign of life between two steps for
step_timeout_s, it starts the next one, at once unless several in a row finished no step; it ends with its standard
input or, if it outlives its parent, when no host was attached for orphan_timeout_s; its engine ends with it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import zmq

from llmbackend.fork_server.client import ForkedProcess
from llmbackend.fork_server.host_policy import HostPolicy
from llmbackend.links.secrets import ClusterSecrets
from llmbackend.links.sockets import Monitor
from llmbackend.waiting.wakeup import Wakeup

from ...errors import EngineDeadError
from ...load_progress import LoadProgress
from ...messages import EngineStarted, EngineStats, StepResult
from ..supervisor import Supervisor
from ..transport import CLOSE_TIMEOUT_S, EngineForkServer, ProcessTransport
from .served_order import KeptState, ServedEngineNews, ServedEngineOrder, ServedProcessOrder, with_paths, write_record

logger = logging.getLogger(__name__)

SILENCES: Final = 5
"""A silent process is killed after this many heartbeat_timeout_s. Hosts leave after one, and may return until then."""
BACKLOG: Final = 1024
"""Maximum number of hosts that wait for the next process."""

_decode_state = msgspec.msgpack.Decoder(KeptState).decode
_encode_json = msgspec.json.encode


class ServedForkServer(EngineForkServer):
    """Its engines serve hosts at the listening socket, which the caller closes."""

    program = f"{__package__}.host_links"

    def __init__(self, order: ServedEngineOrder, listener: socket.socket) -> None:
        super().__init__(with_paths(order.config, order.paths), order.runners, order.meeting)
        self._order = order
        self._listener = listener
        first = order.incarnation or time.time_ns() // 1_000_000
        self._incarnations = itertools.count(first)
        self.incarnation = 0
        """Of the last process."""

    def fork_engine(self, endpoint: str, output_fd: int, lifeline_fd: int, policy: HostPolicy) -> ForkedProcess:
        host, port = self._listener.getsockname()[:2]
        self.incarnation = next(self._incarnations)
        order = ServedProcessOrder(
            endpoint=endpoint,
            is_whole=self.is_whole,
            config=self._order.config,
            listen_endpoint=f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}",
            secrets_folder=os.path.abspath(self._order.secrets_folder),
            incarnation=self.incarnation,
            node=self._order.node,
            heartbeat_timeout_s=self._order.heartbeat_timeout_s,
            meeting=self._order.meeting,
        )
        text, listen_fd = _encode_json(order).decode(), self._listener.fileno()
        return self.fork(text, output_fd, lifeline_fd, listen_fd, policy=policy)


class KeptTransport(ProcessTransport):
    """A link to an engine that reports its state to its keeper, but nothing about requests. A stopped or unscheduled
    process is detected by its silence, even within a step, because ZeroMQ's own thread answers heartbeats."""

    num_hosts = 0

    def __init__(
        self, fork_server: ServedForkServer, silence_s: float, wake_fd: int, progress: Callable[[LoadProgress], None]
    ) -> None:
        """silence_s: the process is killed after this much silence."""
        super().__init__(fork_server, wake_fd, progress)
        self._silence_s = silence_s
        self._socket.heartbeat_ivl = self._socket.heartbeat_timeout = math.ceil(silence_s * 1e3 / 2)
        self._monitor = Monitor(self._socket, zmq.EVENT_DISCONNECTED)
        self._poller.register(self._monitor.socket, zmq.POLLIN)

    def close(self, *, force: bool = False) -> None:
        self._poller.unregister(self._monitor.socket)
        self._monitor.close()
        super().close(force=force)

    def _look(self, ready: Mapping[object, int]) -> None:
        super()._look(ready)
        if self._monitor.socket in ready:
            self._monitor.read()
            if self._process is not None and not self._process.wait(CLOSE_TIMEOUT_S):
                logger.error("the engine was silent for %g s, even within a step; killing it", self._silence_s)
                self._process.kill()

    def receive(self, timeout_s: float | None = None) -> list[StepResult]:
        states = self._receive(timeout_s, _decode_state)
        if states:
            self.num_hosts = states[-1].num_hosts
        # A result whose step took time is what the supervisor expects of an engine that works.
        return [StepResult(0, (), EngineStats(last_step_s=float(state.has_stepped))) for state in states]

    def _receive_started(self, timeout_s: float | None) -> list[EngineStarted]:
        """Without KeptStates, which may follow immediately: they decode to empty EngineStarted messages."""
        return [started for started in super()._receive_started(timeout_s) if started != EngineStarted()]


class KeptEngines:
    """The processes of one served engine. See EngineSource."""

    def __init__(self, order: ServedEngineOrder, listener: socket.socket) -> None:
        self.fork_server = ServedForkServer(order, listener)
        self._silence_s = SILENCES * order.heartbeat_timeout_s
        self._transport: KeptTransport | None = None

    @property
    def num_hosts(self) -> int:
        """Hosts of the latest process, by its last report."""
        return 0 if self._transport is None else self._transport.num_hosts

    def make_transport(self, wake_fd: int, progress: Callable[[LoadProgress], None]) -> KeptTransport:
        self._transport = KeptTransport(self.fork_server, self._silence_s, wake_fd, progress)
        return self._transport

    def load_whole(self) -> bool:
        was_whole, self.fork_server.is_whole = self.fork_server.is_whole, True
        return not was_whole

    def close(self) -> None:
        self.fork_server.close()


class Keeper:
    """Owned by the main thread; `stop` and `parent_ended` may be called from any."""

    def __init__(self, order: ServedEngineOrder, listener: socket.socket, tell: Callable[[ServedEngineNews], None]):
        """tell: called for each process that was started."""
        self._order = order
        self._port = listener.getsockname()[1]
        self._tell = tell
        self._wakeup = Wakeup()
        self._engines = KeptEngines(order, listener)
        self._supervisor = Supervisor(order.config, self._engines, self._wakeup)
        self._told_pid = 0
        self._attached_at_s = 0.0
        """When a host was last seen, counted from the parent's end."""
        self._is_orphan = self._is_stopped = False

    def stop(self) -> None:
        self._is_stopped = True
        self._wakeup.set()

    def parent_ended(self) -> None:
        self._attached_at_s, self._is_orphan = time.monotonic(), True
        self._wakeup.set()

    def run(self) -> None:
        """Runs until stopped, or orphaned and unused."""
        try:
            while not (self._is_stopped or self._is_over()):
                self._wakeup.clear()
                with contextlib.suppress(EngineDeadError):  # already logged by the supervisor
                    self._supervisor.receive(is_busy=True)
                self._tell_of_process()
        finally:
            self._supervisor.close()
            self._wakeup.close()

    def _is_over(self) -> bool:
        if not self._is_orphan:
            return False
        if not self._order.outlives_parent:
            return True
        now_s = time.monotonic()
        if self._supervisor.info is not None and self._engines.num_hosts:
            self._attached_at_s = now_s
        return now_s > self._attached_at_s + self._order.orphan_timeout_s

    def _tell_of_process(self) -> None:
        pid = self._supervisor.pid or 0
        if pid and pid != self._told_pid:
            self._told_pid = pid
            incarnation = self._engines.fork_server.incarnation
            self._tell(ServedEngineNews(port=self._port, incarnation=incarnation, pid=pid))


def listen(order: ServedEngineOrder) -> socket.socket:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in order.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((order.host, order.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen at {order.host}, port {order.port}: {error.strerror}") from error
    return listener


def _tell(news: ServedEngineNews, record_file: str = "") -> None:
    """Writes the record first, so whoever reads the line finds it."""
    if record_file:
        try:
            write_record(Path(record_file), news)
        except OSError as error:
            logger.error("the engine's record cannot be written: %s", error)
    with contextlib.suppress(OSError):  # the reader is gone
        os.write(1, _encode_json(news) + b"\n")


def _wait_for_parent(keeper: Keeper) -> None:
    sys.stdin.buffer.read()
    keeper.parent_ended()


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="keeper %(process)d %(levelname)s %(message)s")
    try:
        order = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServedEngineOrder)
        ClusterSecrets.load(order.secrets_folder)
        listener = listen(order)
    except (ValueError, OSError) as error:
        _tell(ServedEngineNews(error=str(error)))
        return 2
    with listener:
        keeper = Keeper(order, listener, partial(_tell, record_file=order.record_file))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: keeper.stop())
        threading.Thread(target=_wait_for_parent, args=(keeper,), name="parent", daemon=True).start()
        keeper.run()
    if order.record_file:
        Path(order.record_file).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # the thread that reads standard input may hold its lock
