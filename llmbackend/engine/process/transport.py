"""Links to engines on this machine: on a thread of this process (`inline`) or in a separate process (`process`).

Used by supervisors. Independent of the owners of requests, and of restarts. Invariants: both kinds send the same
messages over a ZeroMQ pair and hold one end of a lifeline, a socket pair that reads end of file when the other side has
ended for any reason; no thread, process, file or descriptor outlives `close()`; whatever an engine does or fails to do,
each call returns within the time allowed by the caller.

One thread at a time uses a transport; `kill` may be called from any.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import signal
import socket
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, TypeVar

import msgspec
import zmq

from llmbackend.fork_server.client import ForkedProcess, ForkServer, OutputReader, Program, environment, how_it_ended
from llmbackend.fork_server.host_policy import NO_POLICY, HostPolicy
from llmbackend.fork_server.process_resources import OwnedFolder, num_ended_for_memory

from ..config import EngineConfig
from ..errors import LOST_RANK_EXIT_CODE, DeathKind, EngineDeadError, is_shortage
from ..load_progress import LoadProgress
from ..messages import EngineInput, EngineStarted, ModelInfo, ModelPrepared, StepResult
from ..rank_order import RankMeeting
from .engine_link import EngineOrder, Transport

logger = logging.getLogger(__name__)

DESCRIPTORS_OF_AN_ENGINE = 25
"""Descriptors that starting an engine opens here: libzmq's, the lifeline, its output, its folder, the fork server's
sockets and pipes."""
CLOSE_TIMEOUT_S = 5.0
KILLED_TIMEOUT_S = 5.0
"""How long a process may take to end after SIGKILL; only one in an uninterruptible system call takes longer."""
CLOSE_TIMEOUT_BEFORE_LOADED_S = 1.0
LAST_MESSAGE_TIMEOUT_MS = 1000
_MEMORY_RAN_OUT: Final = "memory ran out; give the server more, or the model a smaller 'num_kv_blocks'"
_FORKS_WELL = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Neither BLAS threads nor an initialised CUDA driver survive a fork, so the server's imports must create neither."""

_PROGRAM: Final = f"{__package__}.engine_process"
"""Imported only where an engine runs, which makes hosts start faster."""

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_decode_started = msgspec.msgpack.Decoder(EngineStarted).decode
_decode_result = msgspec.msgpack.Decoder(StepResult).decode


class EngineForkServer(ForkServer):
    """Forks the engines of one config. Its server process is started by the first engine that runs in a separate
    process.

    Any thread may set `is_whole`, permanently: engines then load the checkpoint themselves and share only imports.
    """

    program = _PROGRAM

    def __init__(self, config: EngineConfig, runners: str, meeting: RankMeeting | None = None) -> None:
        """runners: name of a module like make_runner.py. meeting: where the other ranks of a split model connect, if
        they are started elsewhere."""
        self._meeting = meeting
        self.config = config
        self.runners = runners
        self.is_whole = False
        program = Program(
            "engines",
            self.program,
            (runners, msgspec.json.encode(config).decode()),
            config.engine_python,
            environment(config.engine_python) | _FORKS_WELL,
        )
        super().__init__(program, _to_stderr)

    def fork_engine(self, endpoint: str, output_fd: int, lifeline_fd: int, policy: HostPolicy) -> ForkedProcess:
        """As `fork`; the engine connects to `endpoint`."""
        order = msgspec.json.encode(EngineOrder(endpoint, self.is_whole, self._meeting)).decode()
        return self.fork(order, output_fd, lifeline_fd, policy=policy)


class PairTransport(Transport):
    """A link to an engine on this machine, over a ZeroMQ pair and a lifeline."""

    def __init__(
        self,
        fork_server: EngineForkServer,
        wake_fd: int,
        progress: Callable[[LoadProgress], None] = lambda progress: None,
    ) -> None:
        """Raises OSError or ZMQError if there are too few descriptors; none is left open then."""
        super().__init__(fork_server.config, progress)
        self._fork_server = fork_server
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

    def receive_started(self, timeout_s: float | None) -> ModelInfo | ModelPrepared | None:
        started = super().receive_started(timeout_s)
        self._loaded = isinstance(started, ModelInfo)
        return started

    def send(self, message: EngineInput) -> None:
        try:
            self._socket.send(_encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise self._cause_of_death() from None

    def receive(self, timeout_s: float | None = None) -> list[StepResult]:
        return self._receive(timeout_s, _decode_result)

    def close(self, *, force: bool = False) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send(_encode(EngineInput(shutdown=True)), zmq.NOBLOCK)
        self._show_progress(None)
        timeout_s = CLOSE_TIMEOUT_S if self._loaded else CLOSE_TIMEOUT_BEFORE_LOADED_S
        ended = self._reap(0.0 if force else timeout_s)
        self._lifeline.close()
        self._engine_lifeline.close()
        self._socket.close()
        if ended:
            self._context.term()

    def _receive_started(self, timeout_s: float | None) -> list[EngineStarted]:
        return self._receive(timeout_s, _decode_started)

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
            if self._has_ended_in_order() and self._socket.poll(LAST_MESSAGE_TIMEOUT_MS):
                return self._receive(0.0, decode)
            raise self._cause_of_death()
        return messages

    def _has_ended_in_order(self) -> bool:
        """Whether the ending engine has sent its reason: its last message may be seen only after its end."""
        return False

    @abstractmethod
    def _look(self, ready: Mapping[object, int]) -> None:
        """Handles other descriptors that are `ready`."""

    @abstractmethod
    def _reap(self, timeout_s: float) -> bool:
        """Waits for the engine's end, and forces it if possible. Returns whether it has ended. May be called twice."""

    @abstractmethod
    def _cause_of_death(self) -> EngineDeadError: ...


class InlineTransport(PairTransport):
    """The core on a daemon thread of this process, for tests and embedding. A step that hangs cannot be interrupted."""

    _ENDPOINT = "inproc://engine"
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    def launch(self) -> None:
        self._socket.bind(self._ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="llm-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        from .engine_process import load, run

        with self._engine_lifeline, self._context.socket(zmq.PAIR) as link:
            link.set_hwm(0)
            link.connect(self._ENDPOINT)
            try:
                runners = importlib.import_module(self._fork_server.runners)
                core = load(self._config, partial(runners.make_runner, self._config), link.send)
                if core is not None:
                    run(core, link, self._config.fault_directory)
            except Exception as error:
                logger.exception("the engine thread failed")
                self._error = error

    def _look(self, ready: Mapping[object, int]) -> None:
        """Nothing else is polled."""

    def _reap(self, timeout_s: float) -> bool:
        """A thread cannot be killed; one that has failed gets some time to return."""
        if self._thread is not None:
            self._thread.join(max(timeout_s, CLOSE_TIMEOUT_BEFORE_LOADED_S))
        return self._thread is None or not self._thread.is_alive()

    def _cause_of_death(self) -> EngineDeadError:
        cause = f"{type(self._error).__name__}: {self._error}" if self._error else "it returned"
        return EngineDeadError(f"the engine thread ended ({cause})", "thread")


class ProcessTransport(PairTransport):
    """The core in a separate process, which isolates crashes and the interpreter lock. Its output goes to our
    stderr."""

    def __init__(
        self,
        fork_server: EngineForkServer,
        wake_fd: int,
        progress: Callable[[LoadProgress], None] = lambda progress: None,
        policy: HostPolicy = NO_POLICY,
    ) -> None:
        """policy: core and memory binding of the process"""
        super().__init__(fork_server, wake_fd, progress)
        self._policy = policy
        self._process: ForkedProcess | None = None
        self._is_forked = False
        """Whether the fork server has said which process it is, or why there is none."""
        self._ended_for_memory = num_ended_for_memory()
        self._folder: OwnedFolder | None = None
        self._output: OutputReader | None = None

    @property
    def pid(self) -> int | None:
        """None also until the fork server, which may still be importing, has forked the process."""
        is_known = self._is_forked or self._loaded
        return self._process.pid or None if self._process is not None and is_known else None

    def receive_started(self, timeout_s: float | None) -> ModelInfo | ModelPrepared | None:
        started = super().receive_started(timeout_s)
        if started is not None:
            self._remove_folder()  # connected: nothing needs it from now on
        if isinstance(started, ModelInfo) and started.needs_torch:
            self._fork_server.is_whole = True
        return started

    def launch(self) -> None:
        self._folder = OwnedFolder("engine")
        endpoint = f"ipc://{self._folder.path}/engine"
        self._socket.bind(endpoint)
        reader_fd, output_fd = os.pipe()
        try:
            self._output = OutputReader(reader_fd, _to_stderr, "llm-engine-stderr")
            lifeline_fd = self._engine_lifeline.fileno()
            self._process = self._fork_server.fork_engine(endpoint, output_fd, lifeline_fd, self._policy)
            self._show_progress(LoadProgress("starting the engine"))
        except OSError as error:
            kind: DeathKind = "shortage" if is_shortage(error) else "exit"
            raise EngineDeadError(f"the engine process could not be started: {error}", kind) from error
        finally:
            os.close(output_fd)
            self._engine_lifeline.close()
        self._poller.register(self._process.fileno(), zmq.POLLIN)

    def kill(self) -> int:
        process = self._process
        if process is None or process.returncode is not None:
            return 0
        process.kill()
        return process.pid

    def _look(self, ready: Mapping[object, int]) -> None:
        """A fork server that ends is replaced at once, so the next engine need not wait for its imports."""
        process = self._process
        if process is None or process.fileno() not in ready:
            return
        descriptor = process.fileno()
        process.take_status()
        self._is_forked = True
        if process.has_lost_server or process.returncode is not None:
            self._poller.unregister(descriptor)
            self._fork_server.replace()

    def _reap(self, timeout_s: float) -> bool:
        if self._process is not None and not self._process.wait(timeout_s):
            logger.warning("killing an engine process that does not exit")
            self._process.kill()
            if not self._has_ended_after_kill(self._process):
                logger.error("engine process %d has not exited after SIGKILL; leaving it behind", self._process.pid)
                return False
        if self._output is not None:
            self._output.wait()
        self._remove_folder()
        return True

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.remove()

    def _has_ended_after_kill(self, process: ForkedProcess) -> bool:
        """Waits. The fork server reports the end of its children; if it hangs, it is killed, and `fork` starts another
        for the next engine."""
        if process.wait(KILLED_TIMEOUT_S):
            return True
        logger.warning("the fork server does not report the end of a killed engine process; killing the fork server")
        process.kill_server()
        return process.wait(KILLED_TIMEOUT_S)

    def _has_ended_in_order(self) -> bool:
        assert self._process is not None
        return self._process.wait(CLOSE_TIMEOUT_S) and self._process.returncode == 0

    def _cause_of_death(self) -> EngineDeadError:
        assert self._process is not None
        self._reap(CLOSE_TIMEOUT_S)
        code, details = self._process.returncode or 0, self._output.last_lines if self._output else ""
        if self._process.fork_errno:
            reason = os.strerror(self._process.fork_errno)
            return EngineDeadError(f"the engine process could not be started: {reason}", "shortage", details)
        if code == LOST_RANK_EXIT_CODE:
            reason = details.rpartition(" ERROR ")[2].strip()
            return EngineDeadError(f"the engine process {how_it_ended(code)}: {reason}", "exit", details)
        if code == -signal.SIGKILL and num_ended_for_memory() > self._ended_for_memory:
            return EngineDeadError(f"the engine process {how_it_ended(code)}: {_MEMORY_RAN_OUT}", "memory", details)
        kind: DeathKind = "exit" if code >= 0 else "killed" if code == -signal.SIGKILL else "signal"
        return EngineDeadError(f"the engine process {how_it_ended(code)}", kind, details)


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)


def require_descriptors(count: int) -> None:
    """Raises OSError if this process cannot open `count` more. libzmq aborts the process if some of its own calls run
    out, so they must be available before it is called."""
    opened: list[int] = []
    try:
        opened.append(os.open(os.devnull, os.O_RDONLY))
        while len(opened) < count:
            opened.append(os.dup(opened[0]))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def make_transport(
    fork_server: EngineForkServer,
    wake_fd: int,
    progress: Callable[[LoadProgress], None] = lambda progress: None,
    policy: HostPolicy = NO_POLICY,
) -> Transport:
    """For an engine of the fork server's config. An inline engine starts no server, and its thread inherits the calling
    thread's binding."""
    if fork_server.config.transport == "inline":
        return InlineTransport(fork_server, wake_fd, progress)
    return ProcessTransport(fork_server, wake_fd, progress, policy)
