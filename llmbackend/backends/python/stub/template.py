"""A process that has imported what every stub needs, and forks stubs: one starts in milliseconds instead of a third of
a second, which whoever waits for a crashed one notices.

For: boot.py. Does not know: models. Invariants: it runs no thread and no model's code; each stub gets a session of its
own and nothing of the other stubs; the host is told each stub's process id, and, once it and what it started are gone,
how it ended; it ends when the host does, or closes its control socket.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import struct
import sys

from . import main as stub
from .lifeline import end_with, ignore_signals

NUMBER = struct.Struct("<i")
"""A process id, and later an exit code or minus a signal."""
FDS_PER_STUB = 4


def main(control_fd: int, host_pid: int) -> None:
    end_with(host_pid)
    ignore_signals()
    os.set_inheritable(control_fd, False)
    gc.collect()
    gc.freeze()  # a stub's collector must not touch, and so copy, what is shared
    stub_fds = _serve(socket.socket(fileno=control_fd))
    if stub_fds is not None:
        _run_stub(*stub_fds)


def _serve(control: socket.socket) -> list[int] | None:
    """Forks and reaps. Returns in a new stub with its descriptors; None when the host has closed the control socket."""
    stubs: dict[int, tuple[int, int]] = {}  # pidfd → process id, where to tell
    waiting = select.poll()
    waiting.register(control.fileno(), select.POLLIN)
    while True:
        for ready, _ in waiting.poll():
            if ready in stubs:
                waiting.unregister(ready)
                _bury(ready, *stubs.pop(ready))
                continue
            _, fds, _, _ = socket.recv_fds(control, 1, FDS_PER_STUB)
            if len(fds) != FDS_PER_STUB:
                return None
            parent_pid, pid = os.getpid(), os.fork()
            if pid == 0:
                control.close()
                for pidfd, (_, status_fd) in stubs.items():
                    os.close(pidfd)
                    os.close(status_fd)
                return [parent_pid, *fds]
            *given, status_fd = fds
            for fd in given:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            stubs[pidfd] = (pid, status_fd)
            waiting.register(pidfd, select.POLLIN)
            _tell(status_fd, pid)


def _bury(pidfd: int, pid: int, status_fd: int) -> None:
    with contextlib.suppress(OSError):  # before the wait, while its group's number can not be another's
        os.killpg(pid, signal.SIGKILL)
    _tell(status_fd, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.close(status_fd)
    os.close(pidfd)


def _tell(status_fd: int, number: int) -> None:
    with contextlib.suppress(OSError):  # the host does not want to know any more
        os.write(status_fd, NUMBER.pack(number))


def _run_stub(parent_pid: int, calls_fd: int, events_fd: int, output_fd: int, status_fd: int) -> None:
    os.setsid()
    for standard in (1, 2):
        os.dup2(output_fd, standard)
    os.close(output_fd)
    os.close(status_fd)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # else all stubs would draw the same numbers
    stub.main(calls_fd, events_fd, parent_pid)
