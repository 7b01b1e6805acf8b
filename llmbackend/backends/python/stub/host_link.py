"""The stub's side of its events socket: messages to the host at any time, and the host's answers.

Processes forked by the model reach the host through the model's process. Invariants: `post` preserves the order of each
thread's messages; each question is answered once, or the process ends because the host has ended; no model code runs on
the reading thread. A forked process never touches its parent's sockets or locks, which other threads may have held
during the fork; its open questions are cancelled when it ends; the host detects the end of the model's process even
while forked ones are alive.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from .errors import PackedError, TritonModelException
from .packets import Message, PacketReader, encode

AnswerCallback = Callable[[Any, Sequence[Any], bool], None]
"""(value, parts, whether it is the last one). Called on the reading thread: it must only enqueue."""


class Cancellations:
    """Which requests are cancelled. Thread-safe; `begin` is called by one thread with increasing ids.

    A cancellation that overtakes its request, which arrives through another socket, is remembered; one that arrives
    after the request's end is dropped. No locks: each step is one operation on a set, and `request` checks again after
    adding, so that a concurrent end leaves no entry behind.
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
    """A forked process used an object of its parent process."""


class HostLink:
    """Thread-safe."""

    def __init__(self, events: socket.socket) -> None:
        self.cancellations = Cancellations()
        self.phase = "load"
        """The current call: load, auto_complete, initialize, execute (also between calls), finalize."""
        self.not_ready_reason: Callable[[], str] = str
        """Why the model is not ready, "" = it is ready; called on its own thread."""
        self._socket = events
        self._sending = threading.RLock()  # reentrant: the garbage collector may run code that posts
        self._is_foreign = False
        self.posted = 0
        """Messages sent to the host."""
        self._numbers = itertools.count()
        self._waiting: dict[int, AnswerCallback] = {}
        threading.Thread(target=self._read, name="host-link", daemon=True).start()

    def post(self, message: tuple[Any, ...], parts: Sequence[Any] = ()) -> None:
        """Blocks while the socket is full. Raises OSError if the host has ended, or another process has the link."""
        if self._is_foreign:
            raise ForkedProcessError("a response must be sent by the model instance's process, not by its child")
        packet = encode(message, parts)
        try:
            with self._sending:
                packet.send(self._socket)
                self.posted += 1
        finally:
            packet.close()

    def disown(self) -> None:
        """Must be called in a forked process: its parent owns the link, whose locks may be held."""
        self._is_foreign = True
        self._socket.close()

    def start(self, message: tuple[Any, ...], parts: Sequence[Any], on_answer: AnswerCallback) -> int:
        """Posts `message` with a new id after its first item. Returns the id, which the answers carry."""
        number = next(self._numbers)
        self._waiting[number] = on_answer
        self.post((message[0], number, *message[1:]), parts)
        return number

    def ask(self, verb: str, *arguments: Any) -> Any:
        """The host's answer. Raises TritonModelException with the text of a refusal."""
        error, value = self.answer_to(verb, *arguments)
        if error is not None:
            raise TritonModelException(error[1])
        return value

    def answer_to(self, verb: str, *arguments: Any) -> tuple[PackedError | None, Any]:
        """The host's refusal, or its answer."""
        future: Future[tuple[PackedError | None, Any]] = Future()
        self.start((verb, *arguments), (), lambda value, _parts, _last: future.set_result(value))
        return future.result()

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
            del message  # free its memory before the next one

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
    """To be called once, before any code of the model runs."""
    global _link
    _link = link


def replace_link(connect: Callable[[], HostLink]) -> None:
    """To be called first in a forked process: drops the parent's link; `connect` creates a new one on first use."""
    global _link, _connect, _connecting
    if _link is not None:
        _link.disown()
    _link, _connect, _connecting = None, connect, threading.Lock()


def host(asked_by: str) -> HostLink:
    """This process's link. Raises RuntimeError outside stub processes and their forks."""
    return _link or _connected(asked_by)


def _connected(asked_by: str) -> HostLink:
    global _link
    if _connect is None:
        raise RuntimeError(f"pb_utils.{asked_by} works only in the process of a model instance")
    with _connecting:
        _link = _link or _connect()
        return _link


# --- processes that a model forks, such as multiprocessing workers ----------------------------------------------------

_Answer = tuple[tuple[Any, ...], Sequence[Any]]
_DEFAULT_HANDLERS: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


def prepare_forks(link: HostLink, calls: socket.socket) -> None:
    """Gives processes that the model forks default signal handlers and their own link, and closes their copies of the
    sockets through whose closing the host detects the end of the model's process."""
    relay = _ForkRelay(link)

    def begin() -> None:
        for number, handler in _DEFAULT_HANDLERS.items():
            signal.signal(number, handler)
        calls.close()
        replace_link(relay.connect_fork())

    os.register_at_fork(before=relay.open, after_in_child=begin)


class _ForkRelay:
    """In the model's process, accepts connections from forked processes and forwards their messages to the host."""

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._accepting: socket.socket | None = None
        self._connector: socket.socket | None = None  # forked processes send their connections through it

    def open(self) -> None:
        """To be called before each fork."""
        if self._connector is not None:  # also in a forked process that forks, where the lock may remain held
            return
        with self._lock:
            if self._connector is None:
                self._accepting, self._connector = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                threading.Thread(target=self._accept, args=(self._accepting,), name="fork-relay", daemon=True).start()

    def connect_fork(self) -> Callable[[], HostLink]:
        """To be called in a forked process. Returns a function that creates its link."""
        assert self._accepting is not None and self._connector is not None
        self._accepting.close()
        return partial(_ForkedLink, self._connector)

    def _accept(self, accepting: socket.socket) -> None:
        while True:
            _, fds, _, _ = socket.recv_fds(accepting, 1, 1)
            for fd in fds:
                _Connection(self._link, socket.socket(fileno=fd))


class _Connection:
    """One forked process."""

    def __init__(self, link: HostLink, connection: socket.socket) -> None:
        self._link = link
        self._socket = connection
        self._answers: SimpleQueue[_Answer | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._asked: dict[int, int] = {}  # the forked process's id → the link's
        for target in (self._read, self._write):
            threading.Thread(target=target, name=f"fork-relay-{target.__name__}", daemon=True).start()

    def _read(self) -> None:
        reader = PacketReader(self._socket, is_trusted=True)
        try:
            while (message := reader.receive()) is not None:
                self._pass_on(message)
                del message
        except OSError:
            pass  # it has ended
        with self._lock:
            left = list(self._asked.values())
        for number in left:
            self._link.post(("cancel_infer", number))
        self._answers.put(None)

    def _pass_on(self, message: Message) -> None:
        (verb, *arguments), parts = message
        if verb == "ask":
            number, question = arguments
            with self._lock:  # the answer may arrive before `start` returns
                self._asked[number] = self._link.start(question, parts, self._answering(number))
        elif verb == "cancel_infer":
            with self._lock:
                asked = self._asked.get(arguments[0])
            if asked is not None:
                self._link.post(("cancel_infer", asked))
        else:
            self._link.post((verb, *arguments), parts)

    def _answering(self, number: int) -> AnswerCallback:
        def on_answer(value: Any, parts: Sequence[Any], is_last: bool) -> None:
            self._answers.put((("answer", number, value, is_last), parts))

        return on_answer

    def _write(self) -> None:
        while (answer := self._answers.get()) is not None:
            (_, number, _, is_last), parts = answer
            if is_last:
                with self._lock:
                    del self._asked[number]
            try:
                encode(answer[0], parts).send(self._socket)
            except OSError:
                break
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the reader


class _ForkedLink(HostLink):
    """The link of a forked process to the host, through its parent."""

    def __init__(self, connector: socket.socket) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(connector, [b"c"], [theirs.fileno()])
        super().__init__(ours)
        self.phase = "execute"

    def start(self, message: tuple[Any, ...], parts: Sequence[Any], on_answer: AnswerCallback) -> int:
        number = next(self._numbers)
        self._waiting[number] = on_answer
        self.post(("ask", number, message), parts)
        return number
