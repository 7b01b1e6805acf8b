"""One stub process: launch, calls, messages, end.

Invariants: however the process ends, `on_end` is called once, after its last message was handled; afterwards no process
(including those that it started), socket or thread is left. A call to a process that dies raises immediately.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from llmbackend.core.backend_api import internal
from llmbackend.fork_server.client import ForkServer, OutputReader
from llmbackend.fork_server.host_policy import NO_POLICY, HostPolicy

from .stub.packets import Message, Packet, PacketReader, encode

log = logging.getLogger(__name__)
output_log = logging.getLogger("llmbackend.backends.python.output")

FORK_TIMEOUT_S = 2.0
EXIT_GRACE_S = 5.0
"""Time between the closing of a process's sockets and its being killed."""


class Outbox:
    """The host's messages to a stub: cancellations, and answers to its model's questions. Any thread may post.

    `post` never blocks, because it is called by cancellations and by other models' responses. Messages are sent in
    posting order; those that cannot be sent immediately wait for a thread, which exists only while there are any.
    Messages to a stub that has ended are dropped.
    """

    def __init__(self, to: socket.socket) -> None:
        self._socket = to
        self._lock = threading.Lock()
        self._waiting: deque[Packet] = deque()
        self._is_closed = False
        self._sender: threading.Thread | None = None

    def post(self, message: Any, parts: Sequence[Any] = ()) -> None:
        try:
            packet = encode(message, parts)
        except OSError:
            log.exception("a message to a stub process could not be encoded")
            return
        with self._lock:
            if not self._is_closed and (self._waiting or not self._send_now(packet)):
                self._waiting.append(packet)
                self._start_sender()
                return
        packet.close()

    def close(self) -> None:
        """To be called after the stub has ended."""
        with self._lock:
            self._is_closed = True
            while self._waiting:
                self._waiting.popleft().close()
            sender = self._sender
        if sender is not None:
            sender.join()

    def _send_now(self, packet: Packet) -> bool:
        """False if the socket is full. Holds the lock."""
        with contextlib.suppress(OSError):  # the stub has ended
            try:
                packet.send(self._socket, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
        return True

    def _start_sender(self) -> None:
        """Holds the lock. If no thread can be started, the next message tries again."""
        if self._sender is None:
            sender = threading.Thread(target=self._send_waiting, name="python-outbox", daemon=True)
            with contextlib.suppress(RuntimeError):
                sender.start()
                self._sender = sender

    def _send_waiting(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._sender = None
                    return
                packet = self._waiting[0]
            with contextlib.suppress(OSError):  # the stub has ended
                packet.send(self._socket)
            packet.close()
            with self._lock:
                if self._waiting and self._waiting[0] is packet:
                    self._waiting.popleft()


class StubRaisedError(Exception):
    """The model's code raised. The text is that of the exception, with the model's frames."""


class StubDeadError(Exception):
    """The process ended before it answered. The text says how."""


class StubProcess:
    """`call` may be used by one thread at a time, the rest by any thread."""

    def __init__(
        self,
        name: str,
        fork_server: ForkServer,
        on_message: Callable[[Message], None],
        policy: HostPolicy = NO_POLICY,
    ) -> None:
        """Returns immediately. Raises TritonError INTERNAL if the fork server cannot be started."""
        self.name = name
        self.cause = ""
        self.on_end: Callable[[], None] | None = None
        self._on_message = on_message
        self._calls, stub_calls = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._events, stub_events = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.outbox = Outbox(self._events)
        self._answers = PacketReader(self._calls)
        self._calling = threading.Lock()
        self._is_over = threading.Event()
        self._progress = threading.Condition()
        self._handled = 0
        self._awaited = 0
        output_fd, stub_output_fd = os.pipe()
        try:
            descriptors = (stub_output_fd, stub_calls.fileno(), stub_events.fileno())
            self._process = fork_server.fork("", *descriptors, policy=policy)
        except BaseException as error:
            os.close(output_fd)
            self._close_sockets()
            if isinstance(error, OSError | ValueError):
                raise internal(f"Stub processes cannot be started by {fork_server.interpreter}: {error}") from None
            raise
        finally:
            stub_calls.close()
            stub_events.close()
            os.close(stub_output_fd)
        self._output = OutputReader(output_fd, self._log, f"python-{name}-output")
        threading.Thread(target=self._live, name=f"python-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Blocks until the process is forked; 0 if that failed."""
        return self._process.pid

    @property
    def last_lines(self) -> str:
        return self._output.last_lines

    def call(self, verb: str, argument: Any, parts: Sequence[Any] = (), timeout_s: float | None = None) -> Message:
        """The stub's answer, after all messages that it posted before have been handled.

        Raises StubRaisedError, StubDeadError, TimeoutError (the stub must then be killed: its answer may still arrive).
        """
        with self._calling:
            answer = self._exchange(verb, argument, parts, timeout_s)
        if answer is None:
            self.kill()
            self._is_over.wait()
            raise StubDeadError(self.cause)
        (outcome, value, posted), answer_parts = answer
        self._wait_for_messages(posted)
        if outcome != "done":
            raise StubRaisedError(value)
        return value, answer_parts

    def kill(self) -> None:
        """Kills the process and those that it started; `on_end` follows."""
        self._process.kill(FORK_TIMEOUT_S)

    def close(self, timeout_s: float) -> None:
        """Waits until the process has ended and all resources are freed; kills it after `timeout_s`."""
        if not self._is_over.wait(timeout_s):
            self.kill()
            self._is_over.wait()

    def _exchange(self, verb: str, argument: Any, parts: Sequence[Any], timeout_s: float | None) -> Message | None:
        """None if the stub has ended."""
        packet = encode((verb, argument), parts)
        try:
            if self._calls.gettimeout() != timeout_s:
                self._calls.settimeout(timeout_s)
            packet.send_under_lock(self._calls)
            return self._answers.receive()
        except TimeoutError:
            raise
        except (OSError, ValueError):  # it has ended, or sent a malformed message
            return None
        finally:
            packet.close()

    def _wait_for_messages(self, count: int) -> None:
        if self._handled >= count:
            return
        with self._progress:
            self._awaited = count
            self._progress.wait_for(lambda: self._handled >= count or self._is_over.is_set())
            self._awaited = 0

    # --- the thread of this stub ------------------------------------------------------------------------------------

    def _live(self) -> None:
        self._handle_messages()
        if not self._process.wait(EXIT_GRACE_S):
            self._process.kill(FORK_TIMEOUT_S)
            self._process.wait(None)
        self.cause = self._process.cause
        self._output.wait()
        self._finish()

    def _handle_messages(self) -> None:
        reader = PacketReader(self._events)
        try:
            while (message := reader.receive()) is not None:
                self._on_message(message)
                del message  # free its memory before the next one
                self._handled += 1
                if self._awaited:
                    with self._progress:
                        self._progress.notify_all()
        except Exception:
            log.exception("stub process '%s' sent a message that cannot be handled; killing it", self.name)
            self.kill()

    def _finish(self) -> None:
        try:
            if self.on_end is not None:
                self.on_end()
        except Exception:
            log.exception("the end of stub process '%s' could not be handled", self.name)
        del self._on_message  # its receiver refers to this object
        self._is_over.set()
        with self._progress:
            self._progress.notify_all()
        self.outbox.close()
        with self._calling:
            self._close_sockets()

    def _log(self, line: str) -> None:
        output_log.info("%s: %s", self.name, line.rstrip())

    def _close_sockets(self) -> None:
        self._calls.close()
        self._events.close()
