"""Where an engine core runs: on a thread of this process (`inline`) or in a process of its own (`process`).

For: the LLM manager. Does not know: requests' owners, callbacks, restarts. Invariants: both kinds speak the same
messages over a ZeroMQ pair and hold one end of a lifeline, a socket pair that reads end of file when the other side is
gone, in either direction and for whatever reason; no thread, process, file or descriptor outlives `close()`.

One thread at a time uses a transport: the one that starts it, then the manager's loop, then the one that closes it.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from typing import IO

import msgspec
import zmq

from .config import EngineConfig
from .engine_loop import load, run
from .infer_request import EngineInput, EngineStarted, ModelInfo, StepResult

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_BEFORE_LOADED_S = 1.0
STDERR_LINES_KEPT = 20

_encode = msgspec.msgpack.Encoder().encode
_decode_started = msgspec.msgpack.Decoder(EngineStarted).decode
_decode_result = msgspec.msgpack.Decoder(StepResult).decode


class EngineDeadError(RuntimeError):
    """The engine ended by itself. The message is fit for clients; `details` is for the log."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Transport(ABC):
    """The host's end. `wake_fd` is a descriptor that ends `receive` early when it becomes readable."""

    def __init__(self, config: EngineConfig, wake_fd: int) -> None:
        self._config = config
        self._loaded = False
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._lifeline, self._engine_lifeline = socket.socketpair()
        self._poller = zmq.Poller()
        for item in (self._socket, self._lifeline.fileno(), wake_fd):
            self._poller.register(item, zmq.POLLIN)

    def start(self) -> ModelInfo:
        """Launches the engine and waits until its model is loaded. Raises RuntimeError saying why it cannot."""
        self._launch()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._lifeline.fileno(), zmq.POLLIN)
        poller.poll()
        if not self._socket.poll(0):
            error = self._cause_of_death()
            raise RuntimeError(f"{error} while the model was loading; its last words:\n{error.details}")
        started = _decode_started(self._socket.recv())
        if started.info is None:
            raise RuntimeError(started.error)
        self._loaded = True
        return started.info

    def send(self, message: EngineInput) -> None:
        self._socket.send(_encode(message))

    def receive(self) -> list[StepResult]:
        """Blocks until there is a result or a wake-up; all results that are there, oldest first.

        Raises EngineDeadError when the engine is gone and all its results were received.
        """
        ready = dict(self._poller.poll())
        results = []
        with contextlib.suppress(zmq.Again):
            while True:
                results.append(_decode_result(self._socket.recv(zmq.NOBLOCK)))
        if not results and self._lifeline.fileno() in ready:
            raise self._cause_of_death()
        return results

    def close(self) -> None:
        """Ends the engine, gently first, and frees everything. Never raises for an engine that is dead already."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send(_encode(EngineInput(shutdown=True)), zmq.NOBLOCK)
        ended = self._reap(CLOSE_TIMEOUT_S if self._loaded else CLOSE_TIMEOUT_BEFORE_LOADED_S)
        self._lifeline.close()
        self._engine_lifeline.close()
        self._socket.close()
        if ended:
            self._context.term()

    @abstractmethod
    def _launch(self) -> None:
        """Binds the socket and starts the engine, which holds `_engine_lifeline` from then on."""

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

    def _launch(self) -> None:
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
                    run(core, link)
            except Exception as error:
                logger.exception("the engine thread failed")
                self._error = error

    def _reap(self, timeout_s: float) -> bool:
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _cause_of_death(self) -> EngineDeadError:
        cause = f"{type(self._error).__name__}: {self._error}" if self._error else "it returned"
        return EngineDeadError(f"the engine thread ended ({cause})")


class ProcessTransport(Transport):
    """The core in a process of its own: isolates crashes and the interpreter lock. Its output joins our stderr."""

    _process: subprocess.Popen[bytes] | None = None
    _directory = ""
    _reader: threading.Thread | None = None

    def start(self) -> ModelInfo:
        info = super().start()
        shutil.rmtree(self._directory)  # the one connection there will be is made: a killed host leaves no file
        return info

    def _launch(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="llmbackend-")
        endpoint = f"ipc://{self._directory}/engine"
        self._socket.bind(endpoint)
        lifeline_fd = self._engine_lifeline.fileno()
        config_json = msgspec.json.encode(self._config).decode()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "llmbackend.engine.engine_process", config_json, endpoint, str(lifeline_fd)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(lifeline_fd,),
        )
        self._engine_lifeline.close()
        self._last_lines: collections.deque[str] = collections.deque(maxlen=STDERR_LINES_KEPT)
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._pass_on, args=(self._process.stdout,), name="llm-engine-stderr", daemon=True
        )
        self._reader.start()

    def _pass_on(self, stream: IO[bytes]) -> None:
        for line in stream:
            text = line.decode(errors="replace")
            self._last_lines.append(text.rstrip())
            sys.stderr.write(text)

    def _reap(self, timeout_s: float) -> bool:
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("engine process %d does not end; killing it", self._process.pid)
            self._process.kill()
            self._process.wait()
        self._join_reader()
        shutil.rmtree(self._directory, ignore_errors=True)
        return True

    def _join_reader(self) -> None:
        """All of the engine's output has been read, unless a child of its own still holds the pipe."""
        assert self._process is not None and self._process.stdout is not None and self._reader is not None
        self._reader.join(1.0)
        if not self._reader.is_alive():
            self._process.stdout.close()

    def _cause_of_death(self) -> EngineDeadError:
        assert self._process is not None
        self._reap(CLOSE_TIMEOUT_S)
        code = self._process.returncode
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return EngineDeadError(f"the engine process ended {how}", "\n".join(self._last_lines))


def make_transport(config: EngineConfig, wake_fd: int) -> Transport:
    kind = InlineTransport if config.transport == "inline" else ProcessTransport
    return kind(config, wake_fd)
