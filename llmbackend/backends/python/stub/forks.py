"""pb_utils in processes that a model forks, such as workers of `multiprocessing`: they reach the host through the
model's own process.

For: main.py. Does not know: what is asked. Invariants: a forked process never touches its parent's sockets or locks,
which other threads may have held at the fork; its open questions are cancelled when it ends; the host sees the end of
the model's own process even while forked ones live.
Source: ours; in Triton a forked process reaches the shared memory of its parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from .host_link import AnswerCallback, HostLink, replace_link
from .packets import Message, PacketReader, encode

_Answer = tuple[tuple[Any, ...], Sequence[Any]]
_DEFAULT_HANDLERS: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


def prepare_forks(link: HostLink, calls: socket.socket) -> None:
    """Processes that the model forks get default signal handlers and a link of their own, and close the sockets whose
    end of file tells the host that the model's process has ended."""
    relay = _ForkRelay(link)

    def begin() -> None:
        for number, handler in _DEFAULT_HANDLERS.items():
            signal.signal(number, handler)
        calls.close()
        replace_link(relay.connect_fork())

    os.register_at_fork(before=relay.open, after_in_child=begin)


class _ForkRelay:
    """Accepts connections of forked processes in the model's own process, and passes their messages to the host."""

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._accepting: socket.socket | None = None
        self._connector: socket.socket | None = None  # forked processes send their connections through it

    def open(self) -> None:
        """Before each fork."""
        if self._connector is not None:  # also in a forked process that forks, where the lock may be held forever
            return
        with self._lock:
            if self._connector is None:
                self._accepting, self._connector = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                threading.Thread(target=self._accept, args=(self._accepting,), name="fork-relay", daemon=True).start()

    def connect_fork(self) -> Callable[[], HostLink]:
        """In a forked process: makes its link when it is called."""
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
            with self._lock:  # the answer may come before `start` returns
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
