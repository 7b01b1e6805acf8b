"""The server process: imports what its children need, and forks a child for each order.

Used by boot.py. Independent of what children do: a module of their package provides `prepare(*arguments)`, which
imports what they share and returns `run(order, *descriptors)`, which each child calls. If `run` has a method
`before_fork(order)`, the server calls it before it forks the child for that order; all later children share its
results.

Invariants: the server has no other thread when it forks; each child has its own session and no descriptor of another
child; the host is told each child's process id and, once the child has ended and its process group was killed, how it
ended; the server ends with the host or with the control socket, and then kills its children. Handlers ignore the
signals that stop the host (SIGINT, SIGTERM, SIGHUP); programs started by a child do not inherit them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from .boot import load_package
from .host_policy import HostPolicy

NUMBER = struct.Struct("<i")
"""A message on a child's status socket: its process id, or minus the errno of a failed fork; at its end, the exit code
or minus the signal."""
MAX_ORDER_BYTES = 128 << 10
"""The kernel's limit on a command's argument. An order may contain an engine's configuration with its chat template."""
MAX_DESCRIPTORS = 8
ENDS_WITH_SERVER = "ends-with-server"
_HOST_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_OOM_SCORE = 300
"""In thousandths of total memory: the kernel treats this process as if it used that much more."""
_MAX_OOM_SCORE = 1000


class _Child(NamedTuple):
    """status_fd: the socket on which the host is told about the child."""

    pid: int
    status_fd: int


class _Order(NamedTuple):
    """The task of a new child.

    policy       its binding
    text         order for its `run`
    descriptors  its output, then those for its `run`
    server_pid   process id of its parent
    """

    policy: HostPolicy
    text: bytes
    descriptors: list[int]
    server_pid: int


def main(
    control_fd: str, host_pid: str, end: str, release: str, package: str, directory: str, module: str, *arguments: str
) -> None:
    """end: ENDS_WITH_SERVER = the kernel kills the children when the server ends. release: the host's."""
    end_with(int(host_pid))
    end_before_host()
    for number in _HOST_SIGNALS:
        signal.signal(number, lambda *_: None)
    control = socket.socket(fileno=int(control_fd))
    control.set_inheritable(False)
    load_package(package, directory)
    check_release(package, directory, release)
    program = importlib.import_module(module)
    run = program.prepare(*arguments)
    _freeze()
    order = _serve(control, _preparation(run))
    if order is None:
        return
    if end == ENDS_WITH_SERVER:
        end_with(order.server_pid)
    output_fd, *descriptors = order.descriptors
    for standard in (1, 2):
        os.dup2(output_fd, standard)
    os.close(output_fd)
    order.policy.bind()
    run(order.text, *descriptors)


def check_release(package: str, directory: str, release: str) -> None:
    """Ends this process if the package's files were replaced while the host is running, as its messages may differ."""
    found = getattr(sys.modules[package], "__version__", release)
    if found != release:
        sys.exit(f"'{directory}' has release {found} now, this server was started with {release}: restart the server")


def end_with(parent_pid: int) -> None:
    """Makes the kernel kill this process when the thread that started it ends, even while no Python code can run."""
    with contextlib.suppress(OSError, AttributeError):  # other systems rely on end-of-file
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent has already ended
        os._exit(1)


def end_before_host() -> None:
    """If memory runs out, the kernel should kill this process or a child rather than the host: their work can be
    repeated, and the host's clients stay connected."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+") as file:
        raised = min(int(file.read()) + _OOM_SCORE, _MAX_OOM_SCORE)
        file.seek(0)
        file.write(str(raised))


def _preparation(run: Any) -> Callable[[bytes], None]:
    """`before_fork` of `run`, or a function that does nothing."""
    before_fork = getattr(run, "before_fork", None)
    if before_fork is None:
        return lambda order: None

    def prepare(order: bytes) -> None:
        before_fork(order)
        _freeze()

    return prepare


def _freeze() -> None:
    """Keeps the children's garbage collectors from touching, and thereby copying, shared memory."""
    gc.collect()
    gc.freeze()


def _serve(control: socket.socket, prepare: Callable[[bytes], None]) -> _Order | None:
    """Forks and reaps children until the host closes the control socket; then None. In each child, its order."""
    children: dict[int, _Child] = {}  # by pidfd
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in children:
                poll.unregister(ready)
                _reap(ready, children.pop(ready))
                continue
            message, descriptors, _, _ = socket.recv_fds(control, MAX_ORDER_BYTES, MAX_DESCRIPTORS)
            if not message:
                for child in children.values():
                    _kill_group(child.pid)
                return None
            prepare(_policy_and_text(message)[1])
            order = _fork(message, descriptors, control, children)
            if order is not None:
                return order
            for pidfd in children:
                poll.register(pidfd, select.POLLIN)


def _fork(message: bytes, descriptors: list[int], control: socket.socket, children: dict[int, _Child]) -> _Order | None:
    """Returns the order in the child; None in the server, after telling the host."""
    count, server_pid = message[0], os.getpid()
    has_all = len(descriptors) == count  # at the limit of open files, some do not arrive
    pid = _try_fork() if has_all else -errno.EMFILE
    if pid == 0:
        control.close()
        for pidfd, child in children.items():
            os.close(pidfd)
            os.close(child.status_fd)
        os.close(descriptors[0])
        os.setsid()
        return _Order(*_policy_and_text(message), descriptors[1:], server_pid)
    if descriptors:
        _tell(descriptors[0], pid)
    if pid > 0:
        children[os.pidfd_open(pid)] = _Child(pid, descriptors[0])
    for descriptor in descriptors[1:] if pid > 0 else descriptors:
        os.close(descriptor)
    return None


def _policy_and_text(message: bytes) -> tuple[HostPolicy, bytes]:
    """The parts of an order after its first byte, the number of descriptors."""
    policy, _, text = message[1:].partition(b"\0")
    return HostPolicy.decode(policy.decode()), text


def _try_fork() -> int:
    """Returns the process id; 0 in the child; minus an errno if the fork failed."""
    try:
        return os.fork()
    except OSError as error:
        return -(error.errno or errno.EAGAIN)


def _reap(pidfd: int, child: _Child) -> None:
    _kill_group(child.pid)  # before the wait, because its group's number may be reused afterwards
    _tell(child.status_fd, os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]))
    os.close(child.status_fd)
    os.close(pidfd)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _tell(status_fd: int, number: int) -> None:
    with contextlib.suppress(OSError):  # the host has closed it
        os.write(status_fd, NUMBER.pack(number))
