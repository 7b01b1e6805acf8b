"""The host's end of fork servers: a ForkServer for each kind of child, and a ForkedProcess for each child.

Used for engines and for stubs of python models. Independent of what children do. Without fork servers, the clients of a
child that died would wait seconds for its successor's imports; a fork takes milliseconds and shares the imported
memory. Invariants: the server process is started on first use, and again after it has ended; the thread that started it
waits for it, because the kernel kills it together with that thread; `close` leaves no process, thread or descriptor.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import llmbackend

from . import boot
from .host_policy import NO_POLICY, HostPolicy
from .server import ENDS_WITH_SERVER, MAX_ORDER_BYTES, NUMBER

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 5.0
SERVER_END_TIMEOUT_S: Final = 2.0
"""How long the server may take to end after end-of-file on a child's status socket."""
PID_POLL_S: Final = 0.05
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 60.0
_SERVER_PACKAGE = ("llmbackend_fork_server", str(Path(__file__).parent))
HOST_PACKAGE = ("llmbackend", str(Path(llmbackend.__file__).parent))
"""Name and directory of this package."""
_NOT_FOR_OTHERS = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV")


def is_this(interpreter: str) -> bool:
    """Whether that is the Python of this process, for which "" stands too."""
    return interpreter in ("", sys.executable)


def command(interpreter: str, module: str, package: tuple[str, str] = HOST_PACKAGE) -> list[str]:
    """A command that calls `main` of a module of `package`; the caller appends its arguments."""
    return [interpreter or sys.executable, "-u", boot.__file__, *package, module]


def environment(interpreter: str) -> dict[str, str]:
    """The environment variables for a process of that interpreter."""
    if is_this(interpreter):
        return dict(os.environ)
    return {name: value for name, value in os.environ.items() if name not in _NOT_FOR_OTHERS}


def restart_pause_s(num_failures: int) -> float:
    """How long to pause before the next start; doubles with each consecutive failure; 0 without failures."""
    return min(FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 100), MAX_PAUSE_S) if num_failures > 0 else 0.0


def wait_readable(descriptor: int, timeout_s: float | None) -> bool:
    """Whether `descriptor` became readable in time; None = no limit. Unlike select(), takes any descriptor."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1e3))


@dataclass(frozen=True)
class Program:
    """What a fork server runs.

    children       name of the children in the log: "engines"
    module         full name of the module with `prepare(*arguments)`; see server.py
    arguments      of `prepare`
    interpreter    path of the Python; "" = the one of this process
    environment    variables; None = those of this process
    package        name and directory of the package of `module`
    ends_children  whether children end when the server ends
    """

    children: str
    module: str
    arguments: tuple[str, ...] = ()
    interpreter: str = ""
    environment: Mapping[str, str] | None = None
    package: tuple[str, str] = HOST_PACKAGE
    ends_children: bool = False


class ForkServer:
    """Starts children of one program. Thread-safe."""

    def __init__(self, program: Program, write: Callable[[str], object]) -> None:
        """`write` receives each line that the server prints."""
        self._program = program
        self._write = write
        self._lock = threading.Lock()
        self._server: _Server | None = None

    @property
    def interpreter(self) -> str:
        return self._program.interpreter or sys.executable

    def fork(self, order: str, output_fd: int, *descriptors: int, policy: HostPolicy = NO_POLICY) -> ForkedProcess:
        """Begins to start a child with `order` and copies of the descriptors; returns immediately.

        output_fd  receives the child's output
        policy     cores and NUMA node of the child

        Raises OSError, ValueError or RuntimeError if no server can be started.
        """
        self.replace()
        with self._lock:
            if self._server is None:
                self._server = _Server(self._program, self._write)
            return self._server.fork(order, policy, output_fd, *descriptors)

    def replace(self) -> None:
        """Starts another server if the current one has ended. If that fails, `fork` tries again."""
        with self._lock:
            if self._server is None or not self._server.is_over:
                return
            children, process = self._program.children, self._server.process
            logger.warning(
                "the process that %s are forked from (process id %d) exited with %d: starting another one",
                *(children, process.pid, process.returncode),
            )
            self._server = None
            try:
                self._server = _Server(self._program, self._write)
            except (OSError, RuntimeError) as error:
                logger.warning("the process that %s are forked from cannot be started yet: %s", children, error)

    def close(self) -> None:
        """Ends the server. To be called after its children have ended."""
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None


class _Server:
    """One server process, from its start to its end."""

    process: subprocess.Popen[bytes]

    def __init__(self, program: Program, write: Callable[[str], object]) -> None:
        self.cause = ""
        """How it ended and what it printed last; "" while it runs."""
        self.ends_children = program.ends_children
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._over = threading.Event()
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._live, args=(program, write, theirs, started), name="fork-server", daemon=True
        )
        with theirs:
            try:
                self._thread.start()
                started.result()
            except BaseException:
                self._control.close()
                raise

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def fork(self, order: str, policy: HostPolicy, *descriptors: int) -> ForkedProcess:
        message = bytes([len(descriptors) + 1]) + f"{policy.encode()}\0{order}".encode()
        if len(message) > MAX_ORDER_BYTES:
            raise ValueError(f"the order for a process has {len(message)} bytes, expected at most {MAX_ORDER_BYTES}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.suppress(OSError):  # it has ended: the status socket shows it
            socket.send_fds(self._control, [message], [theirs.fileno(), *descriptors])
        return ForkedProcess(self, ours)

    def kill(self) -> None:
        if not self.is_over:
            self.process.kill()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it ends in time; all that it printed is then known."""
        return self._over.wait(timeout_s)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        if not self.wait(CLOSE_TIMEOUT_S):  # it is still importing
            self.kill()
        self._thread.join()

    def _live(
        self, program: Program, write: Callable[[str], object], theirs: socket.socket, started: Future[None]
    ) -> None:
        try:
            output_fd, server_output_fd = os.pipe()
            try:
                output = OutputReader(output_fd, write, "fork-server-output")
                self.process = _popen(program, theirs, server_output_fd)
            finally:
                os.close(server_output_fd)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        status = self.process.wait()
        output.wait()
        self._control.close()
        by = program.interpreter or sys.executable
        self.cause = f"{by}, which starts it, {how_it_ended(status)}.\n{output.last_lines}".rstrip()
        self._over.set()


def _popen(program: Program, control: socket.socket, output_fd: int) -> subprocess.Popen[bytes]:
    end = ENDS_WITH_SERVER if program.ends_children else ""
    server = command(program.interpreter, f"{_SERVER_PACKAGE[0]}.server", _SERVER_PACKAGE)
    release = llmbackend.__version__
    return subprocess.Popen(
        [
            *(*server, str(control.fileno()), str(os.getpid()), end, release),
            *(*program.package, program.module, *program.arguments),
        ],
        stdin=subprocess.DEVNULL,
        stdout=output_fd,
        stderr=output_fd,
        pass_fds=(control.fileno(),),
        env=program.environment,
        start_new_session=True,
    )


class ForkedProcess:
    """A child that is being started, runs, or has ended. `wait` may be called by one thread, `kill` by any."""

    def __init__(self, server: _Server, status: socket.socket) -> None:
        self._server = server
        self._status = status
        self._lock = threading.RLock()
        self._pid = 0
        self._pidfd = -1
        """Pidfd of a child that has outlived its server; -1 = none."""
        self.returncode: int | None = None
        """The exit code, or minus the signal that ended it; -SIGKILL if the server ended first."""
        self.cause = ""
        """How it ended, as a sentence; "" before."""
        self.fork_errno = 0
        """Errno of a failed fork; 0 = none."""

    def fileno(self) -> int:
        """Readable when there is something for `take_status`."""
        return self._status.fileno()

    @property
    def has_lost_server(self) -> bool:
        return self._server.is_over

    @property
    def pid(self) -> int:
        """Blocks until the child is forked. 0 if that failed."""
        while not self._pid and self.returncode is None:
            wait_readable(self._descriptor, PID_POLL_S)  # another caller may take the message: then none follows
            self.take_status()
        return self._pid

    def wait(self, timeout_s: float | None) -> bool:
        """Whether the child and its process group end in time."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self.returncode is None:
            if not wait_readable(self._descriptor, None if deadline_s is None else deadline_s - time.monotonic()):
                return False
            self.take_status()
        with self._lock:
            self._status.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1
        return True

    def kill(self, fork_timeout_s: float = 0.0) -> None:
        """Kills the child and its process group; kills the server if it does not fork the child within
        `fork_timeout_s`."""
        with self._lock:
            if self.returncode is None and wait_readable(self._descriptor, 0.0 if self._pid else fork_timeout_s):
                self.take_status()
            if self.returncode is not None:
                return
            if not self._pid:
                self._server.kill()
            elif self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                self._kill_group()

    def kill_server(self) -> None:
        """For a hung fork server. Its children continue, unless the program `ends_children`."""
        self._server.kill()

    def take_status(self) -> None:
        """Reads one message from the server, if there is one: first the process id, then the returncode."""
        with self._lock:
            if self.returncode is not None or not wait_readable(self._descriptor, 0.0):
                return
            if self._pidfd >= 0:
                self._end(-signal.SIGKILL)
                return
            try:
                message = self._status.recv(NUMBER.size)
            except ConnectionResetError:  # it ended with a message unread
                message = b""
            if not message:
                self._lose_server()
                return
            (number,) = NUMBER.unpack(message)
            if self._pid:
                self._end(number)
            elif number > 0:
                self._pid = number
            else:
                self._fail(-number)

    @property
    def _descriptor(self) -> int:
        return self._status.fileno() if self._pidfd < 0 else self._pidfd

    def _end(self, returncode: int) -> None:
        self.cause = self.cause or f"It {how_it_ended(returncode)}."
        self.returncode = returncode

    def _fail(self, fork_errno: int) -> None:
        self.fork_errno = fork_errno
        self.cause = f"It could not be started: {os.strerror(fork_errno)}."
        self._end(1)

    def _lose_server(self) -> None:
        """Called when the server has ended: the child's exit status will remain unknown."""
        if not self._server.wait(None if self._pid else SERVER_END_TIMEOUT_S):
            self._fail(errno.EMFILE)  # the status socket itself did not arrive
        elif not self._pid:
            self.cause = self._server.cause
            self._end(self._server.process.returncode)
        elif self._server.ends_children:
            self._kill_group()  # the kernel has killed only the child itself
            self.cause = self._server.cause
            self._end(-signal.SIGKILL)
        else:
            try:
                self._pidfd = os.pidfd_open(self._pid)
            except OSError:  # it has ended
                self._end(-signal.SIGKILL)

    def _kill_group(self) -> None:
        for kill in (os.killpg, os.kill):  # individually as well, because it may not have created its group yet
            with contextlib.suppress(OSError):
                kill(self._pid, signal.SIGKILL)


def how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        return f"ended by signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"ended by signal {-returncode}"


END_TIMEOUT_S = 1.0
NUM_LINES_KEPT = 20
MAX_LINE_BYTES = 1 << 16


class OutputReader:
    """Owns the pipe `output_fd` and reads it on its own thread."""

    def __init__(self, output_fd: int, write: Callable[[str], object], thread_name: str) -> None:
        """write: called on the thread with each line, including its end; if it raises OSError or ValueError (a full
        disk, a closed file), reading goes on. If no thread can be started, closes `output_fd` and raises RuntimeError.
        """
        self._output = os.fdopen(output_fd, "rb")
        self._write = write
        self._last_lines: collections.deque[str] = collections.deque(maxlen=NUM_LINES_KEPT)
        self._thread = threading.Thread(target=self._read, name=thread_name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._output.close()
            raise

    @property
    def last_lines(self) -> str:
        return "\n".join(self._last_lines)

    def wait(self) -> None:
        """Waits until the output of an ended process has been passed on, at most END_TIMEOUT_S because another process
        may have the pipe open."""
        self._thread.join(END_TIMEOUT_S)

    def _read(self) -> None:
        with self._output:
            while line := self._output.readline(MAX_LINE_BYTES):
                text = line.decode(errors="replace")
                self._last_lines.append(text.rstrip())
                with contextlib.suppress(OSError, ValueError):
                    self._write(text)
