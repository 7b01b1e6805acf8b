"""The life of a stub process: takes the host's calls one after the other until it is told to finalize, or the host is
gone.

For: the template, which forks it. Does not know: models (the runner does). Invariant: a stub never outlives its host,
however that ends: the kernel kills it with the template, and that with the host, and a thread ends it at the end of
file of its socket.
"""

from __future__ import annotations

import faulthandler
import os
import socket

from .error_text import exception_text
from .forks import prepare_forks
from .host_link import HostLink, set_link
from .lifeline import end_with, ignore_signals
from .packets import PacketReader, encode
from .pb_utils import make_importable
from .runner import Runner

_DONE, _RAISED = "done", "raised"


def main(calls_fd: int, events_fd: int, parent_pid: int) -> None:
    end_with(parent_pid)
    ignore_signals()
    faulthandler.enable()
    calls, events = (_socket_of(fd) for fd in (calls_fd, events_fd))
    link = HostLink(events)
    set_link(link)
    prepare_forks(link, calls)
    make_importable()
    runner = Runner(link)
    reader = PacketReader(calls, is_trusted=True)
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


def _socket_of(fd: int) -> socket.socket:
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)
