"""`python -m llmbackend.engine.gpu.parallel.rank_process`: a rank of an engine on several machines; and its RankKeeper.

The first line of standard input is a RankOrder as JSON. Invariants: a rank's process ends with rank 0, with its
standard input, or when it cannot continue; the next one loads its part and waits for the next rank 0; at most one
process exists at a time; it also ends with `close` and with the process of its RankKeeper.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time

import msgspec

from llmbackend.fork_server.client import command, environment, restart_pause_s

from ...model import lean_imports
from ...rank_order import RankOrder

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
MIN_PAUSE_S = 0.2
MAX_PAUSE_S = 10.0
_PROGRAM = "llmbackend.engine.gpu.parallel.rank_process"
_LIVED_S = 30.0
"""A process that lived this long ends the count of consecutive failures."""


class RankKeeper:
    """Keeps the process of one rank running. Any thread may use it."""

    def __init__(self, order: RankOrder) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name=f"rank-{order.rank}", daemon=True)

    def start(self) -> None:
        """Returns at once."""
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the process; None = none is running."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    def close(self) -> None:
        """Ends the process, after CLOSE_TIMEOUT_S by force."""
        self._closing.set()
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()
            self._thread.join()

    def _keep(self) -> None:
        failures = 0
        while not self._closing.is_set():
            began_s = time.monotonic()
            code = self._run()
            is_failure = code != 0 and time.monotonic() - began_s < _LIVED_S
            failures = failures + 1 if is_failure else 0
            if not self._closing.is_set():
                logger.warning("the process of rank %d exited with code %d", self._order.rank, code)
            self._closing.wait(min(max(restart_pause_s(failures), MIN_PAUSE_S), MAX_PAUSE_S))

    def _run(self) -> int:
        interpreter = self._order.config.engine_python
        with self._lock:
            if self._closing.is_set():
                return 0
            try:
                self._process = process = subprocess.Popen(
                    command(interpreter, _PROGRAM), stdin=subprocess.PIPE, env=environment(interpreter)
                )
            except OSError as error:
                logger.error("the process of rank %d cannot be started: %s", self._order.rank, error)
                return 1
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has already ended
                process.stdin.write(msgspec.json.encode(self._order) + b"\n")
                process.stdin.flush()
        code = process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
        return code


def main() -> None:
    """Exit code 0 = rank 0 ended it, or knows why it cannot take part; 1 = it cannot reach rank 0, or a step failed."""
    try:
        order = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankOrder)
    except (msgspec.DecodeError, ValueError) as error:
        sys.exit(f"the order of a rank, the first line of standard input, is invalid: {error}")
    logging.basicConfig(level=logging.INFO, format=f"rank {order.rank} %(process)d %(levelname)s %(message)s")
    threading.Thread(target=_end_with_input, name="stdin", daemon=True).start()
    lean_imports.import_for(order.config.model)
    from .follow import follow_order

    try:
        follow_order(order)
    except (OSError, ValueError) as error:
        logger.error("%s", error)
        sys.exit(1)


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
