"""One life of a stub process: launched, spoken to, reaped.

For: whoever starts one (ModelState), and the instance that uses it. Does not know: models, requests. Owner of the
process, its sockets and the two threads that read from it. Invariants: whatever happens to the process, `on_end` is
called once, after its last message was handled, and then no process (nor one that it started), socket or thread is
left; a call to a process that dies raises instead of waiting. The thread that launches the process lives for as long
as it does, because the kernel ends a stub with the thread that made it.
Source: the stub of Triton's python backend; that a death is seen at once is ours.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

from llmbackend.core.backend_api import internal

from .outbox import Outbox
from .stub import boot
from .stub.packets import Message, PacketReader, encode

log = logging.getLogger(__name__)
output_log = logging.getLogger("llmbackend.backends.python.output")

EXIT_GRACE_S = 5.0
"""How long a process that closed its sockets may take to end by itself."""
LINES_KEPT = 20
LONGEST_LINE_BYTES = 1 << 16
_PROGRAM = str(Path(boot.__file__))


class StubRaisedError(Exception):
    """The model's code raised; the text is the exception's, with the model's frames."""


class StubDeadError(Exception):
    """The process ended before it answered; the text says how."""


class StubProcess:
    """`call` is for one thread at a time; the rest for any."""

    def __init__(
        self, name: str, interpreter: str, environment: Mapping[str, str], on_message: Callable[[Message], None]
    ) -> None:
        """Returns when the process was launched. Raises TritonError INTERNAL when it can not be."""
        self.name = name
        self.cause = ""
        self.on_end: Callable[[], None] | None = None
        self._on_message = on_message
        self._calls, self._stub_calls = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._events, self._stub_events = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.outbox = Outbox(self._events)
        self._answers = PacketReader(self._calls)
        self._calling = threading.Lock()
        self._is_over = threading.Event()
        self._progress = threading.Condition()
        self._handled = 0
        self._awaited = 0
        self._last_lines: collections.deque[str] = collections.deque(maxlen=LINES_KEPT)
        self._process: subprocess.Popen[bytes] | None = None
        launched: Future[None] = Future()
        threading.Thread(
            target=self._live, args=(interpreter, environment, launched), name=f"python-{name}", daemon=True
        ).start()
        launched.result()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    @property
    def last_lines(self) -> str:
        return "\n".join(self._last_lines)

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
        assert self._process is not None
        if not self._is_over.is_set():
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)

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

    def _live(self, interpreter: str, environment: Mapping[str, str], launched: Future[None]) -> None:
        try:
            process = self._process = self._launch(interpreter, environment)
        except (OSError, ValueError) as error:
            self._close_sockets()
            launched.set_exception(internal(f"Stub process '{self.name}' can not be started: {error}"))
            return
        assert process.stdout is not None
        output = threading.Thread(target=self._log_output, args=(process.stdout,), name=f"python-{self.name}-output")
        output.daemon = True
        output.start()
        launched.set_result(None)
        self._handle_messages()
        self._reap(process)
        output.join(1.0)  # unless something that left the process group holds the pipe
        if not output.is_alive():
            process.stdout.close()
        self._finish()

    def _launch(self, interpreter: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        theirs = (self._stub_calls.fileno(), self._stub_events.fileno())
        try:
            return subprocess.Popen(
                [interpreter, "-u", _PROGRAM, *map(str, theirs), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=theirs,
                env=environment,
                start_new_session=True,
            )
        finally:
            self._stub_calls.close()
            self._stub_events.close()

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

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        if not _ends_within(process, EXIT_GRACE_S):
            process.kill()
        with contextlib.suppress(OSError):  # before the wait, while its group's number can not be another's
            os.killpg(process.pid, signal.SIGKILL)
        self.cause = _how_it_ended(process.wait())

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
        for each in (self._calls, self._events, self._stub_calls, self._stub_events):
            each.close()

    def _log_output(self, output: IO[bytes]) -> None:
        while line := output.readline(LONGEST_LINE_BYTES):
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text)
            output_log.info("%s: %s", self.name, text)


def _ends_within(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Whether it ended; it is not reaped. False, too, where the system can not tell."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        waiting = select.poll()
        waiting.register(pidfd, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1000))
    finally:
        os.close(pidfd)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"It ended with exit code {status}."
    try:
        return f"It ended by signal {signal.Signals(-status).name}."
    except ValueError:
        return f"It ended by signal {-status}."
