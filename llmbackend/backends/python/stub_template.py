"""The host's end of templates: a template is a process per environment, which forks the stubs of all models in it.

For: StubProcess. Does not know: what stubs do. Owner of the template's process, which is started when it is first
needed, or has died. Invariants: a template that dies takes its stubs with it, and their successors get a new one; a
thread waits for it all its life, because the kernel ends it with the thread that made it; nothing is left after
`close`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from llmbackend.core.backend_api import internal

from .output_log import OutputLog
from .stub import boot
from .stub.template import NUMBER

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
FORK_TIMEOUT_S = 2.0
_PROGRAM = str(Path(boot.__file__))


class StubTemplate:
    """Any thread may use it."""

    def __init__(self, interpreter: str, variables: Mapping[str, str]) -> None:
        self._interpreter = interpreter
        self._variables = variables
        self._lock = threading.Lock()
        self._life: _Life | None = None

    def fork(self, calls_fd: int, events_fd: int, output_fd: int) -> ForkedProcess:
        """A stub on its way, with copies of these descriptors. Raises TritonError when nothing can be started."""
        with self._lock:
            if self._life is None or self._life.is_over:
                self._life = _Life(self._interpreter, self._variables)
            return self._life.fork(calls_fd, events_fd, output_fd)

    def close(self) -> None:
        """After its stubs have ended."""
        with self._lock:
            if self._life is not None:
                self._life.close()
                self._life = None


class _Life:
    """One template process, from its start to its end."""

    def __init__(self, interpreter: str, variables: Mapping[str, str]) -> None:
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._is_over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._output: OutputLog | None = None
        self._cause = ""
        started: Future[None] = Future()
        threading.Thread(
            target=self._live, args=(interpreter, variables, started), name="python-template", daemon=True
        ).start()
        started.result()

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    def fork(self, *fds: int) -> ForkedProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.suppress(OSError):  # it has died: so does what it can not fork
            socket.send_fds(self._control, [b"f"], [*fds, theirs.fileno()])
        return ForkedProcess(self, ours)

    def kill(self) -> None:
        assert self._process is not None
        if not self._is_over.is_set():
            self._process.kill()

    def wait_for_cause(self) -> str:
        """How it ended, and what it said last."""
        self._is_over.wait()
        return self._cause

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        if not self._is_over.wait(CLOSE_TIMEOUT_S):
            self.kill()
            self._is_over.wait()

    def _live(self, interpreter: str, variables: Mapping[str, str], started: Future[None]) -> None:
        try:
            self._process = subprocess.Popen(
                [interpreter, "-u", _PROGRAM, str(self._theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(self._theirs.fileno(),),
                env=variables,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self._control.close()
            started.set_exception(internal(f"Stub processes can not be started by {interpreter}: {error}"))
            return
        finally:
            self._theirs.close()
        assert self._process.stdout is not None
        output = OutputLog("python", self._process.stdout)
        started.set_result(None)
        status = self._process.wait()
        output.wait()
        self._control.close()
        self._cause = f"{interpreter}, which starts it, {_ended(status)}.\n{output.last_lines}".rstrip()
        self._is_over.set()


class ForkedProcess:
    """A stub that is on its way, runs, or is gone; `cause` says how it went."""

    def __init__(self, template: _Life, status: socket.socket) -> None:
        self._template = template
        self._status = status
        self._lock = threading.Lock()
        self._pid = 0
        self._is_gone = False
        self.cause = ""

    @property
    def pid(self) -> int:
        """0 while it is not known."""
        return self._pid

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it, and what it started, is gone by then. For one thread."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_gone:
            if not self._is_readable(None if deadline_s is None else deadline_s - time.monotonic()):
                return False
            with self._lock:
                if not self._is_gone:
                    self._read()
        self._status.close()
        return True

    def kill(self) -> None:
        """Ends it and what it started; its template where that does not fork it. Any thread; blocks at the most for
        as long as a fork may take."""
        with self._lock:
            if not self._is_gone and self._is_readable(0.0 if self._pid else FORK_TIMEOUT_S):
                self._read()
            if self._is_gone:
                return
            if not self._pid:
                self._template.kill()
            else:
                self._kill_group()

    def _kill_group(self) -> None:
        for kill in (os.killpg, os.kill):  # by itself, too: it may not have made its group yet
            with contextlib.suppress(OSError):
                kill(self._pid, signal.SIGKILL)

    def _is_readable(self, timeout_s: float | None) -> bool:
        waiting = select.poll()
        waiting.register(self._status, select.POLLIN)
        return bool(waiting.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1000))

    def _read(self) -> None:
        """Takes what the template tells: the process id, then how it ended. Holds the lock."""
        told = self._status.recv(NUMBER.size)
        if not told:
            if self._pid:  # the kernel has killed it with the template, but not what it started
                self._kill_group()
            self.cause = self._template.wait_for_cause()
        elif not self._pid:
            (self._pid,) = NUMBER.unpack(told)
            return
        else:
            self.cause = f"It {_ended(*NUMBER.unpack(told))}."
        self._is_gone = True


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"ended by signal {signal.Signals(-status).name}"
    except ValueError:
        return f"ended by signal {-status}"
