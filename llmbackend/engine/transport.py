"""Where an engine core runs: on a thread of this process (`inline`) or in a process of its own (`process`).

For: the supervisor, which makes a new one for each life of an engine. Does not know: requests' owners, restarts.
Invariants: both kinds speak the same messages over a ZeroMQ pair and hold one end of a lifeline, a socket pair that
reads end of file when the other side is gone, in either direction and for whatever reason; no thread, process, file or
descriptor outlives `close()`; nothing that an engine does or fails to do can block the caller for longer than it asked.

One thread at a time uses a transport.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import IO, Literal, TypeVar

import msgspec
import zmq

from . import load_progress
from .config import EngineConfig
from .infer_request import EngineInput, EngineStarted, ModelInfo, StepResult
from .load_progress import LoadProgress
from .process.engine_loop import load, run
from .process.nursery import EngineProcess, Nursery
from .process.shortage import is_shortage, require_descriptors

logger = logging.getLogger(__name__)

DESCRIPTORS_OF_AN_ENGINE = 20
"""What starting one opens here: libzmq's, the lifeline, its output, the nursery's socket and pipe."""
CLOSE_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_BEFORE_LOADED_S = 1.0
STDERR_LINES_KEPT = 20

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_decode_started = msgspec.msgpack.Decoder(EngineStarted).decode
_decode_result = msgspec.msgpack.Decoder(StepResult).decode


DeathKind = Literal["exit", "signal", "killed", "hang", "message", "load", "thread", "loop", "shortage"]
"""How an engine was lost; a label of the restart metric. killed: SIGKILL; signal: any other; shortage: there was none,
for the machine lacked descriptors, memory or processes to start it."""


class EngineDeadError(RuntimeError):
    """The engine is of no more use. The message is fit for clients; `details` is for the log."""

    def __init__(self, message: str, kind: DeathKind, details: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.details = details


class Transport(ABC):
    """The host's end. `wake_fd` is a descriptor that ends a wait early when it becomes readable."""

    def __init__(self, config: EngineConfig, wake_fd: int) -> None:
        """Raises OSError or ZMQError when there are too few descriptors; then none is left open."""
        self._config = config
        self._loaded = False
        self._broken = ""
        require_descriptors(DESCRIPTORS_OF_AN_ENGINE)
        with contextlib.ExitStack() as on_failure:
            self._context = zmq.Context()
            on_failure.callback(self._context.term)
            self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
            on_failure.callback(self._socket.close)
            self._socket.set_hwm(0)
            self._socket.linger = 0
            self._lifeline, self._engine_lifeline = socket.socketpair()
            on_failure.pop_all()
        self._poller = zmq.Poller()
        for item in (self._socket, self._lifeline.fileno(), wake_fd):
            self._poller.register(item, zmq.POLLIN)

    @abstractmethod
    def launch(self) -> None:
        """Starts the engine, which then loads its model; returns at once."""

    def receive_started(self, timeout_s: float | None) -> ModelInfo | None:
        """Blocks until the model is loaded, and then gives its facts; None after a wake-up, news of the load's progress
        or `timeout_s`.

        Raises EngineDeadError when it cannot be loaded, with the engine's reason.
        """
        started = None
        for message in self._receive(timeout_s, _decode_started):
            if message.progress is None:
                started = message
            else:
                self._show(message.progress)
        if started is None:
            return None
        self._show(None)
        if started.info is None:
            raise EngineDeadError(started.error, "shortage" if started.is_shortage else "load")
        self._loaded = True
        return started.info

    def _show(self, progress: LoadProgress | None) -> None:
        parts = [part for part in self._config.model.split("/") if part]
        is_version = len(parts) > 1 and parts[-1].isdecimal()  # of a repository: the model's name is before it
        load_progress.show(id(self), parts[-2 if is_version else -1], progress)

    def send(self, message: EngineInput) -> None:
        """Never blocks. Raises EngineDeadError when nobody is at the other end."""
        try:
            self._socket.send(_encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise self._cause_of_death() from None

    def receive(self, timeout_s: float | None = None) -> list[StepResult]:
        """Blocks until there is a result, a wake-up, or `timeout_s` is over; all results that are there, oldest first.

        Raises EngineDeadError when the engine is gone, or sent what is no result, and all before it was received.
        """
        return self._receive(timeout_s, _decode_result)

    def close(self, *, force: bool = False) -> None:
        """Ends the engine, gently first unless `force`, and frees everything. Never raises for a dead engine."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send(_encode(EngineInput(shutdown=True)), zmq.NOBLOCK)
        self._show(None)
        timeout_s = CLOSE_TIMEOUT_S if self._loaded else CLOSE_TIMEOUT_BEFORE_LOADED_S
        ended = self._reap(0.0 if force else timeout_s)
        self._lifeline.close()
        self._engine_lifeline.close()
        self._socket.close()
        if ended:
            self._context.term()

    def _receive(self, timeout_s: float | None, decode: Callable[[bytes], T]) -> list[T]:
        if self._broken:
            raise EngineDeadError(self._broken, "message")
        timeout_ms = None if timeout_s is None else math.ceil(max(timeout_s, 0.0) * 1e3)
        ready = dict(self._poller.poll(timeout_ms))
        self._look(ready)
        messages: list[T] = []
        try:
            while True:
                messages.append(decode(self._socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            is_dead = self._lifeline.fileno() in ready
        except msgspec.DecodeError as error:
            self._broken = f"the engine sent a message that cannot be read: {error}"
            return messages or self._receive(0.0, decode)
        if not messages and is_dead:
            raise self._cause_of_death()
        return messages

    @abstractmethod
    def _look(self, ready: Mapping[object, int]) -> None:
        """Takes what else is `ready` among what was polled."""

    @abstractmethod
    def _reap(self, timeout_s: float) -> bool:
        """Waits for the engine's end, forcing it if that is possible. Whether it has ended. May be called twice."""

    @abstractmethod
    def _cause_of_death(self) -> EngineDeadError: ...


class InlineTransport(Transport):
    """The core on a daemon thread of this process: for tests and embedding. A step that hangs cannot be ended."""

    _ENDPOINT = "inproc://engine"
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    def launch(self) -> None:
        self._socket.bind(self._ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="llm-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._engine_lifeline, self._context.socket(zmq.PAIR) as link:
            link.set_hwm(0)
            link.connect(self._ENDPOINT)
            try:
                core = load(self._config, link)
                if core is not None:
                    run(core, link, self._config.fault_directory)
            except Exception as error:
                logger.exception("the engine thread failed")
                self._error = error

    def _look(self, ready: Mapping[object, int]) -> None:
        """There is nothing else."""

    def _reap(self, timeout_s: float) -> bool:
        """It cannot be forced: an engine that has failed gets the time to return."""
        if self._thread is not None:
            self._thread.join(max(timeout_s, CLOSE_TIMEOUT_BEFORE_LOADED_S))
        return self._thread is None or not self._thread.is_alive()

    def _cause_of_death(self) -> EngineDeadError:
        cause = f"{type(self._error).__name__}: {self._error}" if self._error else "it returned"
        return EngineDeadError(f"the engine thread ended ({cause})", "thread")


class ProcessTransport(Transport):
    """The core in a process of its own: isolates crashes and the interpreter lock. Its output joins our stderr."""

    _process: EngineProcess | None = None
    _directory = ""
    _output: IO[bytes] | None = None
    _reader: threading.Thread | None = None

    def __init__(self, nursery: Nursery, wake_fd: int) -> None:
        super().__init__(nursery.config, wake_fd)
        self._nursery = nursery
        self._last_lines: collections.deque[str] = collections.deque(maxlen=STDERR_LINES_KEPT)

    def receive_started(self, timeout_s: float | None) -> ModelInfo | None:
        info = super().receive_started(timeout_s)
        if info is not None:
            shutil.rmtree(self._directory)  # the one connection there will be is made: a killed host leaves no file
        return info

    def launch(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="llmbackend-")
        endpoint = f"ipc://{self._directory}/engine"
        self._socket.bind(endpoint)
        reader_fd, output_fd = os.pipe()
        self._output = open(reader_fd, "rb")  # noqa: SIM115 (closed when the engine is reaped)
        self._reader = threading.Thread(target=self._pass_on, name="llm-engine-stderr", daemon=True)
        try:
            self._reader.start()
            self._process = self._nursery.fork(endpoint, self._engine_lifeline.fileno(), output_fd)
            self._show(LoadProgress("starting the engine"))
        except OSError as error:
            kind: DeathKind = "shortage" if is_shortage(error) else "exit"
            raise EngineDeadError(f"the engine process could not be started: {error}", kind) from error
        finally:
            os.close(output_fd)
            self._engine_lifeline.close()
        self._poller.register(self._process.fileno(), zmq.POLLIN)

    def _look(self, ready: Mapping[object, int]) -> None:
        """A nursery that ends is replaced at once: the next engine need not wait for its imports."""
        process = self._process
        if process is None or process.fileno() not in ready:
            return
        descriptor = process.fileno()
        process.take_message()
        if process.has_lost_nursery:
            self._poller.unregister(descriptor)
            self._nursery.replace()

    def _pass_on(self) -> None:
        assert self._output is not None
        for line in self._output:
            text = line.decode(errors="replace")
            self._last_lines.append(text.rstrip())
            sys.stderr.write(text)

    def _reap(self, timeout_s: float) -> bool:
        if self._process is None:
            self._clean_up()
            return True
        try:
            self._process.wait(timeout_s)
        except TimeoutError:
            logger.warning("killing an engine process that does not end")
            self._process.kill()
            self._process.wait(None)
        self._clean_up()
        return True

    def _clean_up(self) -> None:
        """After the engine's end, or a launch that failed: all of its output has been read, unless a child of its own
        still holds the pipe."""
        if self._reader is not None and self._reader.ident is not None:
            self._reader.join(1.0)
        if self._output is not None and (self._reader is None or not self._reader.is_alive()):
            self._output.close()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _cause_of_death(self) -> EngineDeadError:
        assert self._process is not None
        self._reap(CLOSE_TIMEOUT_S)
        code = self._process.wait(0.0)
        details = "\n".join(self._last_lines)
        if self._process.fork_errno:
            reason = os.strerror(self._process.fork_errno)
            return EngineDeadError(f"the engine process could not be started: {reason}", "shortage", details)
        if code >= 0:
            return EngineDeadError(f"the engine process ended with exit code {code}", "exit", details)
        kind: DeathKind = "killed" if code == -signal.SIGKILL else "signal"
        return EngineDeadError(f"the engine process ended by signal {signal.Signals(-code).name}", kind, details)


def make_transport(nursery: Nursery, wake_fd: int) -> Transport:
    """For the engines of this nursery's config; an inline engine leaves the nursery empty."""
    if nursery.config.transport == "inline":
        return InlineTransport(nursery.config, wake_fd)
    return ProcessTransport(nursery, wake_fd)
