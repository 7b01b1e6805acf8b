"""One worker process as the server holds it.

For: WorkerPool. Does not know: what it is asked for. Invariants: it serves one call at a time; after a call that was
lost it is of no use any more; `close` leaves no process behind.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from typing import Any, Final

from .frames import receive, to_worker

CALL_S: Final = 120
"""Without a byte from the process; 64 MiB of JSON take it ten seconds."""
_MODULE: Final = "llmbackend.frontends.workers.main"


class WorkerLostError(Exception):
    """The process ended, or did not answer, before it had answered."""


class WorkerProcess:
    def __init__(self) -> None:
        """Raises OSError when no process or socket can be made."""
        self._connection, theirs = socket.socketpair()
        timeout = struct.pack("@ll", CALL_S, 0)  # `settimeout` would make every read a partial one
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        command = [sys.executable, "-m", _MODULE, str(theirs.fileno())]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # a Ctrl-C is for the server
                )
        except BaseException:
            self._connection.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, message: Any) -> Any:
        """The answer to (function, arguments). Blocks. Raises WorkerLostError, and what the function raised."""
        try:
            to_worker(self._connection, message)
            is_good, result = receive(self._connection)
        except (OSError, EOFError) as error:
            raise WorkerLostError(str(error)) from None
        if not is_good:
            raise result
        return result

    def close(self) -> None:
        """Ends the process, whatever it does. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._connection.close()
