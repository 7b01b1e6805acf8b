"""The stub's side of its events socket: what a model says to the host at any time, and what the host answers.

For: everything of this package that reaches the host while the model runs. Does not know: what is said. Invariants:
`post` keeps the order of one thread's messages; each question is answered once, or the process ends because the host is
gone; no model code runs on the reading thread, so that it is never held up.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from .errors import TritonModelException
from .packets import Message, PacketReader, encode

AnswerCallback = Callable[[Any, Sequence[Any], bool], None]
"""(value, parts, whether it is the last one). On the reading thread: it must only enqueue."""


class Cancellations:
    """Which requests are cancelled. Any thread may use it; `begin` comes from one, with growing numbers.

    A cancellation that overtakes its request, which comes through another socket, is kept for it; one that comes after
    the request's end is dropped, because numbers only grow. No locks: each step is one operation on a set, and
    `request` looks again after it has added, so that an end in between leaves no entry.
    """

    def __init__(self) -> None:
        self._live: set[int] = set()
        self._requested: set[int] = set()
        self._newest = -1

    def begin(self, number: int) -> None:
        self._live.add(number)
        self._newest = number

    def is_requested(self, number: int) -> bool:
        return number in self._requested

    def end(self, number: int) -> bool:
        """Whether the request was cancelled."""
        self._live.discard(number)
        is_requested = number in self._requested
        self._requested.discard(number)
        return is_requested

    def request(self, number: int) -> None:
        self._requested.add(number)
        if number <= self._newest and number not in self._live:
            self._requested.discard(number)


class ForkedProcessError(OSError):
    """A forked process used what belongs to the process that it was forked from."""


class HostLink:
    """Any thread may use it."""

    def __init__(self, events: socket.socket) -> None:
        self.cancellations = Cancellations()
        self.phase = "load"
        """The current call of the host: load, auto_complete, initialize, execute (from then on), finalize."""
        self.not_ready_reason: Callable[[], str] = str
        """Why the model is not ready, "" = it is; runs on its own thread."""
        self._socket = events
        self._sending = threading.RLock()  # reentrant: the garbage collector may run code that posts
        self._is_foreign = False
        self._posted = 0
        self._numbers = itertools.count()
        self._waiting: dict[int, AnswerCallback] = {}
        threading.Thread(target=self._read, name="host-link", daemon=True).start()

    @property
    def posted(self) -> int:
        """How many messages went to the host so far."""
        return self._posted

    def post(self, message: tuple[Any, ...], parts: Sequence[Any] = ()) -> None:
        """Blocks while the socket is full. Raises OSError when the host has ended, or when the link belongs to another
        process."""
        if self._is_foreign:
            raise ForkedProcessError("a response must be sent by the model instance's process, not by its child")
        packet = encode(message, parts)
        try:
            with self._sending:
                packet.send(self._socket)
                self._posted += 1
        finally:
            packet.close()

    def disown(self) -> None:
        """In a forked process, whose parent owns the link: its locks may be held and are not touched."""
        self._is_foreign = True
        self._socket.close()

    def start(self, message: tuple[Any, ...], parts: Sequence[Any], on_answer: AnswerCallback) -> int:
        """Posts `message` with a new number behind its first item; answers carry that number."""
        number = next(self._numbers)
        self._waiting[number] = on_answer
        self.post((message[0], number, *message[1:]), parts)
        return number

    def ask(self, verb: str, *arguments: Any) -> Any:
        """The host's answer. Raises TritonModelException with the host's text when it refuses."""
        future: Future[tuple[bool, Any]] = Future()
        self.start((verb, *arguments), (), lambda value, _parts, _last: future.set_result(value))
        is_granted, value = future.result()
        if not is_granted:
            raise TritonModelException(value)
        return value

    def _tell_readiness(self) -> None:
        reason = self.not_ready_reason()
        with contextlib.suppress(OSError):  # the host has ended
            self.post(("is_ready", reason))

    def _read(self) -> None:
        try:
            self._handle_messages()
        except BaseException:
            traceback.print_exc()
        os._exit(1)  # the host has ended, or sent a malformed message

    def _handle_messages(self) -> None:
        reader = PacketReader(self._socket, is_trusted=True)
        while (message := reader.receive()) is not None:
            self._handle(message)
            del message  # frees its memory before the next one

    def _handle(self, message: Message) -> None:
        (verb, *arguments), parts = message
        if verb == "cancel":
            self.cancellations.request(*arguments)
        elif verb == "is_ready":
            threading.Thread(target=self._tell_readiness, name="is-ready", daemon=True).start()
        else:
            number, value, is_last = arguments
            on_answer = self._waiting.pop(number) if is_last else self._waiting[number]
            on_answer(value, parts, is_last)


_link: HostLink | None = None
_connect: Callable[[], HostLink] | None = None
_connecting = threading.Lock()


def set_link(link: HostLink) -> None:
    """Once, before any model's code runs."""
    global _link
    _link = link


def replace_link(connect: Callable[[], HostLink]) -> None:
    """In a forked process, before anything else runs there: drops the parent's link; `connect` makes a new one when it
    is first needed."""
    global _link, _connect, _connecting
    if _link is not None:
        _link.disown()
    _link, _connect, _connecting = None, connect, threading.Lock()


def host(asked_by: str) -> HostLink:
    """This process's link. Raises RuntimeError outside of stub processes and those that they forked."""
    return _link or _connected(asked_by)


def _connected(asked_by: str) -> HostLink:
    global _link
    if _connect is None:
        raise RuntimeError(f"pb_utils.{asked_by} works only in the process of a model instance")
    with _connecting:
        _link = _link or _connect()
        return _link
