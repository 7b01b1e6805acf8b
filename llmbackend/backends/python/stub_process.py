"""One life of a stub process: launched, spoken to, reaped.

For: whoever starts one (ModelState), and the instance that uses it. Does not know: models, requests. Owner of the
process, its sockets and the two threads that read from it. Invariants: whatever happens to the process, `on_end` is
called once, after its last message was handled, and then no process (nor one that it started), socket or thread is
left; a call to a process that dies raises instead of waiting.
Source: the stub of Triton's python backend; that a death is seen at once is ours.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .outbox import Outbox
from .output_log import OutputLog
from .stub.packets import Message, PacketReader, encode
from .stub_template import StubTemplate

log = logging.getLogger(__name__)

EXIT_GRACE_S = 5.0
"""How long a process that closed its sockets may take to end by itself."""


class StubRaisedError(Exception):
    """The model's code raised; the text is the exception's, with the model's frames."""


class StubDeadError(Exception):
    """The process ended before it answered; the text says how."""


class StubProcess:
    """`call` is for one thread at a time; the rest for any."""

    def __init__(self, name: str, template: StubTemplate, on_message: Callable[[Message], None]) -> None:
        """Returns when the process is on its way. Raises TritonError INTERNAL when its template can not be started."""
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
            self._process = template.fork(stub_calls.fileno(), stub_events.fileno(), stub_output_fd)
        except BaseException:
            os.close(output_fd)
            self._close_sockets()
            raise
        finally:
            stub_calls.close()
            stub_events.close()
            os.close(stub_output_fd)
        self._output = OutputLog(name, os.fdopen(output_fd, "rb"))
        threading.Thread(target=self._live, name=f"python-{name}", daemon=True).start()

    @property
    def name(self) -> str:
        return self._output.name

    @name.setter
    def name(self, name: str) -> None:
        self._output.name = name

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    @property
    def last_lines(self) -> str:
        return self._output.last_lines

    def call(self, verb: str, argument: Any, parts: Sequence[Any] = (), timeout_s: float | None = None) -> Message:
        """The stub's answer, after all that it had posted before the answer was handled.

        Raises StubRaisedError, StubDeadError, and TimeoutError (then the stub is of no more use: `kill` it).
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
        """Ends the process and what it started; `on_end` follows."""
        self._process.kill()

    def close(self, timeout_s: float) -> None:
        """Waits until the process has ended by itself and everything is gone; kills it after `timeout_s`."""
        if not self._is_over.wait(timeout_s):
            self.kill()
            self._is_over.wait()

    def _exchange(self, verb: str, argument: Any, parts: Sequence[Any], timeout_s: float | None) -> Message | None:
        """None when the stub is gone."""
        packet = encode((verb, argument), parts)
        try:
            if self._calls.gettimeout() != timeout_s:
                self._calls.settimeout(timeout_s)
            packet.send(self._calls)
            return self._answers.receive()
        except TimeoutError:
            raise
        except (OSError, ValueError):  # it is gone, or speaks nonsense
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

    # --- the thread of this life ------------------------------------------------------------------------------------

    def _live(self) -> None:
        self._handle_messages()
        if not self._process.wait(EXIT_GRACE_S):
            self._process.kill()
            self._process.wait(None)
        self.cause = self._process.cause
        self._output.wait()
        self._finish()

    def _handle_messages(self) -> None:
        reader = PacketReader(self._events)
        try:
            while (message := reader.receive()) is not None:
                self._on_message(message)
                del message  # what came must not live until the next message
                self._handled += 1
                if self._awaited:
                    with self._progress:
                        self._progress.notify_all()
        except Exception:
            log.exception("stub process '%s' sent a message that can not be handled; it is killed", self.name)
            self.kill()

    def _finish(self) -> None:
        try:
            if self.on_end is not None:
                self.on_end()
        except Exception:
            log.exception("the end of stub process '%s' could not be handled", self.name)
        self._is_over.set()
        with self._progress:
            self._progress.notify_all()
        self.outbox.close()
        with self._calling:
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._calls.close()
        self._events.close()
