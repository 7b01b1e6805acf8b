"""pb_utils in processes that a model forks, such as the workers of `multiprocessing`: what they ask of the host goes
through the model's own process.

For: main.py. Does not know: what is asked. Invariants: a forked process never touches its parent's sockets or locks,
which other threads may have held when it was forked; what it still asks when it ends is cancelled; the host sees the
end of the model's own process, whatever that has forked. Source: ours; in Triton a forked process reaches the shared
memory of its parent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from .host_link import AnswerCallback, HostLink, replace_link
from .lifeline import give_signals_back
from .packets import Message, PacketReader, encode

_Answer = tuple[tuple[Any, ...], Sequence[Any]]


def prepare_forks(link: HostLink, calls: socket.socket) -> None:
    """What a model forks gets signals back, does not hold the sockets by whose end the host sees the model's, and has a
    link of its own."""
    relay = _ForkRelay(link)

    def begin() -> None:
        give_signals_back()
        calls.close()
        replace_link(relay.connect_fork())

    os.register_at_fork(before=relay.open, after_in_child=begin)


class _ForkRelay:
    """Takes forked processes' connections in the model's own process, and speaks to the host for them."""

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._accepting: socket.socket | None = None
        self._connector: socket.socket | None = None  # what forked processes send their connections through

    def open(self) -> None:
        """Before each fork."""
        if self._connector is not None:  # also in a forked process that forks: the lock may be held there for ever
            return
        with self._lock:
            if self._connector is None:
                self._accepting, self._connector = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                threading.Thread(target=self._accept, args=(self._accepting,), name="fork-relay", daemon=True).start()

    def connect_fork(self) -> Callable[[], HostLink]:
        """In a forked process: what makes its link."""
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
        self._asked: dict[int, int] = {}  # the forked process's number → the link's
        for target in (self._read, self._write):
            threading.Thread(target=target, name=f"fork-relay-{target.__name__}", daemon=True).start()

    def _read(self) -> None:
        reader = PacketReader(self._socket, is_trusted=True)
        try:
            while (message := reader.receive()) is not None:
                self._pass_on(message)
                del message
        except OSError:
            pass  # it is gone
        with self._lock:
            left = list(self._asked.values())
        for number in left:
            self._link.post(("cancel_infer", number))
        self._answers.put(None)

    def _pass_on(self, message: Message) -> None:
        (verb, *arguments), parts = message
        if verb == "ask":
            number, question = arguments
            with self._lock:  # the answer may be faster than this thread
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
        with contextlib.suppress(OSError):  # it is gone
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the reader, where that does not know yet


class _ForkedLink(HostLink):
    """In a forked process: the link to the host, by way of its parent."""

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
