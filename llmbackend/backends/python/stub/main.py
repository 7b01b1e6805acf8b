"""The stub process: answers the host's calls one by one until finalize, or until the host has ended."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
from collections.abc import Callable

from .errors import exception_text
from .host_link import HostLink, prepare_forks, set_link
from .packets import PacketReader, encode, socket_of
from .pb_utils import make_importable
from .runner import Runner

_DONE, _RAISED = "done", "raised"


def prepare(libraries: str) -> Callable[[bytes, int, int], None]:
    """Called in the fork server, which has imported this module. Returns the function that a stub runs.

    libraries: first entry of LD_LIBRARY_PATH, which programs that models start must not inherit; "" = none
    """
    if libraries:
        others = os.environ.pop("LD_LIBRARY_PATH").removeprefix(libraries).removeprefix(os.pathsep)
        if others:
            os.environ["LD_LIBRARY_PATH"] = others
    return _run


def _run(_order: bytes, calls_fd: int, events_fd: int) -> None:
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # each stub draws different numbers
    faulthandler.enable()
    calls, events = (socket_of(fd) for fd in (calls_fd, events_fd))
    link = HostLink(events)
    set_link(link)
    prepare_forks(link, calls)
    make_importable()
    runner = Runner(link)
    reader = PacketReader(calls, is_trusted=True)
    while _serve_call(runner, link, reader, calls):
        pass


def _serve_call(runner: Runner, link: HostLink, reader: PacketReader, calls: socket.socket) -> bool:
    """Answers one call. Returns False after the last one. A separate function, so that a call's tensors are freed
    before the next call."""
    received = reader.receive()
    if received is None:
        return False
    (verb, argument), parts = received
    answer_parts: list[object] = []
    try:
        outcome, value = _DONE, runner.call(verb, argument, parts, answer_parts)
    except BaseException as error:  # including sys.exit() called by a model
        outcome, value = _RAISED, exception_text(error)
    # The host sends no response before it has handled the messages posted so far.
    encode((outcome, value, link.posted), answer_parts).send(calls)
    return bool(verb != "finalize")
