"""The life of a stub process: takes the host's calls one after the other until it is told to finalize, or the host is
gone.

For: boot.py. Does not know: models (the runner does). Invariants: a stub never outlives its host, however that ends:
the kernel kills it with the host's process, and a thread ends it at the end of file of its socket; signals that are
meant for the host (SIGINT, SIGTERM to the group) are ignored here: the host decides, as in Triton.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket

from .error_text import exception_text
from .host_link import HostLink, set_link
from .packets import PacketReader, encode
from .pb_utils import make_importable
from .runner import Runner

_PR_SET_PDEATHSIG = 1
_HOST_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_DONE, _RAISED = "done", "raised"


def main(calls_fd: int, events_fd: int, host_pid: int) -> None:
    _end_with(host_pid)
    _ignore_signals()
    faulthandler.enable()
    calls, events = (_socket_of(fd) for fd in (calls_fd, events_fd))
    link = HostLink(events)
    set_link(link)
    make_importable()
    runner = Runner(link)
    reader = PacketReader(calls)
    while _serve_call(runner, link, reader, calls):
        pass


def _serve_call(runner: Runner, link: HostLink, reader: PacketReader, calls: socket.socket) -> bool:
    """Answers one call; False after the last one. What it was given is let go of before the next one."""
    received = reader.receive()
    if received is None:
        return False
    (verb, argument), parts = received
    answer_parts: list[object] = []
    try:
        outcome, value = _DONE, runner.call(verb, argument, parts, answer_parts)
    except BaseException as error:  # also sys.exit() of a model
        outcome, value = _RAISED, exception_text(error)
    # The host answers nobody before it has read what was posted until now.
    encode((outcome, value, link.posted), answer_parts).send(calls)
    return bool(verb != "finalize")


def _end_with(host_pid: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not on this system: then the end of file must do
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != host_pid:
        os._exit(1)  # it was gone before


def _ignore_signals() -> None:
    """By handlers, which a program that the model starts does not inherit; its forks get the defaults back."""
    for number in _HOST_SIGNALS:
        signal.signal(number, lambda *_: None)

    def restore() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=restore)


def _socket_of(fd: int) -> socket.socket:
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)
