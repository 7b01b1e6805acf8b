"""A host's link to an engine shared with other hosts: ZeroMQ over TCP with CURVE.

Used by supervisors if a locator of engines is installed. Independent of who started the engine, and of requests.
Invariants: a link belongs to one process and never reconnects; the end of its connection, silence for longer than the
heartbeat timeout, or a refusal count as the loss of the engine; leaving an engine does not end it.

One thread uses it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import zmq

from llmbackend.links.sockets import ConnectionEvent, HandshakeFailure, Monitor, new_socket

from ...config import EngineConfig
from ...errors import EngineDeadError
from ...load_progress import LoadProgress
from ...messages import EngineInput, EngineStarted, ModelInfo, ModelPrepared, StepResult
from ..engine_link import Transport
from ..transport import DESCRIPTORS_OF_AN_ENGINE, require_descriptors
from .locating import EngineAddress, RemoteEngines
from .remote_messages import STARTED, WELCOME, Head, SharedCounters, Welcome, boot_id, hello

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_MS: Final = 8_000
"""From connecting to the engine's first message: its process may have to be started."""
NEVER_MS: Final = 24 * 3600 * 1000
"""Disables reconnection: with -1, libzmq 4.3.5 hangs when a context is terminated after a failed handshake."""
GOODBYE_LINGER_MS: Final = 500

_encode = msgspec.msgpack.Encoder().encode
_decode_started = msgspec.msgpack.Decoder(EngineStarted).decode
_decode_welcome = msgspec.msgpack.Decoder(Welcome).decode
_decode_result = msgspec.msgpack.Decoder(StepResult).decode


class RemoteTransport(Transport):
    def __init__(
        self,
        engines: RemoteEngines,
        address: EngineAddress,
        config: EngineConfig,
        wake_fd: int,
        progress: Callable[[LoadProgress], None],
    ) -> None:
        """Raises OSError or ZMQError if there are too few descriptors; none is left open then."""
        super().__init__(config, progress)
        self._address = address
        self._host_id = engines.host_id
        self._messages: deque[tuple[bytes, bytes]] = deque()
        """Received but not yet decoded: heads and bodies."""
        self._loss: EngineDeadError | None = None
        self._is_connected = False
        self._counters = SharedCounters()
        self._clock_offset_ns = 0
        """Converts the engine's clock to this machine's."""
        require_descriptors(DESCRIPTORS_OF_AN_ENGINE)
        with contextlib.ExitStack() as on_failure:
            self._context = zmq.Context()
            on_failure.callback(self._context.term)
            self._socket = new_socket(self._context, zmq.DEALER, engines.secrets, engines.heartbeat_timeout_s)
            on_failure.callback(self._socket.close)
            timeout_ms = math.ceil(engines.heartbeat_timeout_s * 1e3)
            self._socket.reconnect_ivl = NEVER_MS
            self._socket.connect_timeout = timeout_ms
            self._socket.handshake_ivl = max(HANDSHAKE_TIMEOUT_MS, timeout_ms)
            self._monitor = Monitor(self._socket, zmq.EVENT_ALL)
            on_failure.pop_all()
        self._poller = zmq.Poller()
        for item in (self._socket, self._monitor.socket, wake_fd):
            self._poller.register(item, zmq.POLLIN)

    def launch(self) -> None:
        self._socket.connect(self._address.endpoint)
        self._socket.send(_encode(hello(self._host_id, self._config)), zmq.NOBLOCK)
        self._show_progress(LoadProgress(f"connecting to the engine at {self._address}"))

    def send(self, message: EngineInput) -> None:
        if self._loss is not None:
            raise self._loss
        try:
            self._socket.send(_encode(message), zmq.NOBLOCK)
        except zmq.Again:  # the connection has ended; the reason is still to be read
            self._wait(0.0)
            raise self._loss or self._lost("the connection to it has ended") from None

    def receive(self, timeout_s: float | None = None) -> list[StepResult]:
        self._wait(timeout_s)
        results: list[StepResult] = []
        try:
            while self._messages:
                head, body = self._messages.popleft()
                if head == STARTED:
                    self._end_with(self._lost(_decode_started(body).error or "it restarts"))
                else:
                    results.append(self._read_result(head, body))
        except (msgspec.DecodeError, struct.error) as error:
            self._end_with(self._unreadable(error))
        if results:
            results[-1] = msgspec.structs.replace(results[-1], stats=self._counters.stats(results[-1].stats))
        elif self._loss is not None:
            raise self._loss
        return results

    def close(self, *, force: bool = False) -> None:
        if not force and self._is_connected and self._loss is None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send(_encode(EngineInput(shutdown=True)), zmq.NOBLOCK)
        self._show_progress(None)
        self._monitor.close()
        self._socket.close(0 if force else GOODBYE_LINGER_MS)
        self._context.term()

    def _receive_started(self, timeout_s: float | None) -> Sequence[EngineStarted]:
        self._wait(timeout_s)
        started: list[EngineStarted] = []
        try:
            while self._messages and not (started and started[-1].progress is None):
                head, body = self._messages.popleft()
                if head == WELCOME:
                    self._enter(_decode_welcome(body))
                elif head == STARTED:
                    started.append(_decode_started(body))
        except msgspec.DecodeError as error:
            self._end_with(self._unreadable(error))
        if not started and self._loss is not None:
            raise self._loss
        return started

    def receive_started(self, timeout_s: float | None) -> ModelInfo | ModelPrepared | None:
        """Raises EngineDeadError, also if the engine refuses this host."""
        try:
            return super().receive_started(timeout_s)
        except EngineDeadError as error:
            if error is self._loss:
                raise
            raise EngineDeadError(f"the engine at {self._address}: {error}", error.kind) from error

    def _enter(self, welcome: Welcome) -> None:
        self._address = msgspec.structs.replace(self._address, incarnation=welcome.incarnation)
        self.knows_vocabulary = welcome.knows_vocabulary
        if welcome.boot_id != boot_id():
            self._clock_offset_ns = time.monotonic_ns() - welcome.monotonic_ns

    def _read_result(self, head: bytes, body: bytes) -> StepResult:
        said, result = Head.unpack(head), _decode_result(body)
        self.num_requests_of_others = said.num_requests_of_others
        self._counters.add(said, result.stats)
        if result.events and self._clock_offset_ns:
            for event in result.events:
                msgspec.structs.force_setattr(event, "time_ns", event.time_ns + self._clock_offset_ns)
        return result

    def _wait(self, timeout_s: float | None) -> None:
        """Waits for a message, an event of the connection, a wake-up, or `timeout_s`; receives everything available."""
        if self._loss is not None:
            return
        if self._messages:
            timeout_s = 0.0
        ready = dict(self._poller.poll(None if timeout_s is None else math.ceil(max(timeout_s, 0.0) * 1e3)))
        if self._monitor.socket in ready:
            for event in self._monitor.read():
                self._observe(event)
        with contextlib.suppress(zmq.Again):
            while True:
                head, body = self._socket.recv_multipart(zmq.NOBLOCK)
                self._messages.append((head, body))

    def _observe(self, event: ConnectionEvent) -> None:
        if event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_connected = True
        elif self._loss is not None:
            return
        elif event.failure == HandshakeFailure.REFUSED_KEY:
            self._loss = EngineDeadError(f"the engine at {self._address} refuses this host's CURVE key", "load")
        elif event.failure == HandshakeFailure.SILENCE:
            self._loss = self._lost("nothing answers there")
        elif event.failure is not None:
            self._loss = self._lost("it ended the handshake: it has another CURVE key, or has just exited")
        elif event.kind == zmq.EVENT_DISCONNECTED:
            self._loss = self._lost("the connection to it has ended, or was silent for too long")
        elif event.kind == zmq.EVENT_CLOSED and not self._is_connected:
            self._loss = self._lost("it cannot be reached")

    def _end_with(self, loss: EngineDeadError) -> None:
        """A message ended the link: what follows it is not read."""
        self._loss = loss
        self._messages.clear()

    def _lost(self, how: str) -> EngineDeadError:
        return EngineDeadError(f"the engine at {self._address} was lost: {how}", "disconnect")

    def _unreadable(self, error: Exception) -> EngineDeadError:
        return EngineDeadError(f"the engine at {self._address} sent a message that cannot be read: {error}", "message")


class RemoteEngineSource:
    """The consecutive engines that the locator gives one instance. See EngineSource."""

    def __init__(self, engines: RemoteEngines, config: EngineConfig, index: int, wake: Callable[[], None]) -> None:
        """index: of the instance. wake: ends the supervisor's wait."""
        self._engines = engines
        self._config = config
        self._index = index
        self._wake = wake
        engines.users.enter(index, config, wake)

    def make_transport(self, wake_fd: int, progress: Callable[[LoadProgress], None]) -> Transport | None:
        if idle_s := self._config.idle_unload_s:
            reason = f"engine argument 'idle_unload_s' is {idle_s:g}, expected 0 in a cluster: its hosts share engines"
            raise EngineDeadError(reason, "load")
        address = self._engines.locator.locate(self._index, self._config)
        if address is None:
            return None
        return RemoteTransport(self._engines, address, self._config, wake_fd, progress)

    def load_whole(self) -> bool:
        """Its keeper decides how it loads."""
        return False

    def close(self) -> None:
        self._engines.users.leave(self._index, self._config, self._wake)
