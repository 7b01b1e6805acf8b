"""Where engine processes come from: forked from a process that has imported all that they need, and does nothing else.

For: the transport. Does not know: messages, models. Why: importing torch and transformers takes seconds, which every
client would wait for when an engine dies; a fork takes milliseconds and shares the imported memory. Invariants: at most
one engine at a time lives in a nursery; the nursery's own process is started when it is first needed, and again as
soon as its end is seen (its engine goes on); it ends when the host does, however it ends; it holds no weights and runs
no thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from typing import NamedTuple

import msgspec

from llmbackend.engine.config import EngineConfig

from .interpreter import command, environment
from .wakeup import wait_readable

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
_FORKS_WELL = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Neither BLAS threads nor an initialised CUDA driver would survive a fork: the import must make neither."""


class Started(NamedTuple):
    """A nursery's process, and our end of its control socket."""

    process: subprocess.Popen[bytes]
    control: socket.socket

    def end(self) -> None:
        """After its engine has ended."""
        self.control.close()
        try:
            self.process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it still imports
            self.process.kill()
            self.process.wait()


def _start(config: EngineConfig) -> Started:
    """Raises OSError."""
    program = command(config.engine_python, "llmbackend.engine.process.engine_process")
    config_json = msgspec.json.encode(config).decode()
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, contextlib.ExitStack() as on_failure:
        on_failure.callback(control.close)
        process = subprocess.Popen(
            [*program, str(theirs.fileno()), config_json],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=environment(config.engine_python) | _FORKS_WELL,
        )
        on_failure.pop_all()
    return Started(process, control)


class Nursery:
    """Engines of one config. One thread at a time uses it."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._started: Started | None = None

    def fork(self, endpoint: str, lifeline_fd: int, output_fd: int) -> EngineProcess:
        """Begins to start an engine that connects to `endpoint`, with its end of its lifeline and where its output
        goes; returns at once. The caller closes its copies of the descriptors. Raises OSError."""
        self.replace()
        if self._started is None:
            self._started = _start(self.config)
        socket.send_fds(self._started.control, [endpoint.encode()], [lifeline_fd, output_fd])
        return EngineProcess(*self._started)

    def replace(self) -> None:
        """Starts another process where ours has ended. One that can not be started is tried again by `fork`."""
        if self._started is None or self._started.process.poll() is None:
            return
        process = self._started.process
        logger.warning(
            "the process that engines are forked from (process id %d) ended with %d: another one is started",
            process.pid,
            process.returncode,
        )
        self.close()
        try:
            self._started = _start(self.config)
        except OSError as error:
            logger.warning("the process that engines are forked from can not be started yet: %s", error)

    def close(self) -> None:
        """Ends the nursery's process, after its engine has ended."""
        if self._started is not None:
            self._started.end()
            self._started = None


class EngineProcess:
    """An engine that a nursery forked, with the methods of a subprocess."""

    def __init__(self, nursery: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._nursery = nursery
        self._control = control
        self._pid: int | None = None
        self._orphan_fd: int | None = None
        """A pidfd of the engine when its nursery is gone, which would have told its end."""
        self.has_lost_nursery = False
        self.returncode: int | None = None
        self.fork_errno = 0
        """Why there is no engine, when it could not be forked."""

    def fileno(self) -> int:
        """Readable when there is something for `take_message`, and for ever once the nursery is lost."""
        return self._control.fileno()

    def take_message(self) -> None:
        """Takes a message that `fileno` announced."""
        self._read(0.0)

    @property
    def pid(self) -> int:
        """Blocks until the engine was forked."""
        if self._pid is None:
            self._read(None)
        assert self._pid is not None, "the nursery died before it forked the engine"
        return self._pid

    def wait(self, timeout_s: float | None) -> int:
        """The engine's exit code, or minus the signal that ended it. Raises TimeoutError."""
        while self.returncode is None:
            if not self._read(timeout_s):
                raise TimeoutError
        return self.returncode

    def kill(self) -> None:
        """Ends the engine, or the whole nursery when it has not forked yet."""
        if self._pid is None and not self._read(0.0):
            self._nursery.kill()
        elif self._orphan_fd is not None:
            signal.pidfd_send_signal(self._orphan_fd, signal.SIGKILL)
        elif self._pid is not None and self.returncode is None:
            os.kill(self._pid, signal.SIGKILL)

    def _read(self, timeout_s: float | None) -> bool:
        """Takes one message of the nursery: the engine's process id, later its exit status. False when there is none
        in time."""
        if self._orphan_fd is not None:
            return self._orphan_has_ended(self._orphan_fd, timeout_s)
        if not wait_readable(self._control.fileno(), timeout_s):
            return False
        try:
            message = self._control.recv(64)
        except ConnectionResetError:  # it died with a message unread
            message = b""
        if not message:
            self._lose_nursery()
        elif self._pid is None and message.startswith(b"-"):
            self.fork_errno = -int(message)
            self.returncode = 1
        elif self._pid is None:
            self._pid = int(message)
        else:
            self.returncode = int(message)
        return True

    def _lose_nursery(self) -> None:
        """An engine that was forked goes on; that it ended is then seen by its pidfd, but not how."""
        self.has_lost_nursery = True
        nursery_code = self._nursery.wait()
        if self.returncode is not None:
            return
        if self._pid is None:
            self.returncode = nursery_code
            return
        try:
            self._orphan_fd = os.pidfd_open(self._pid)
        except OSError:  # it has ended, too
            self.returncode = -signal.SIGKILL

    def _orphan_has_ended(self, descriptor: int, timeout_s: float | None) -> bool:
        if not wait_readable(descriptor, timeout_s):
            return False
        os.close(descriptor)
        self._orphan_fd = None
        self.returncode = -signal.SIGKILL
        return True


def _has_descriptor(stream: object) -> bool:
    """Whether a stream that may have been replaced (by a test runner, say) still stands for a descriptor."""
    try:
        return stream.fileno() >= 0  # type: ignore[attr-defined, no-any-return]
    except (AttributeError, OSError, ValueError):
        return False
