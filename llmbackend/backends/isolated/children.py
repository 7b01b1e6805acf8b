"""Watches processes that a library has started for its instance, such as the stubs of NVIDIA's python backend. When one
of them ends, the library is useless but holds on to its requests; this process therefore ends too, and the host starts
another one.

Invariant: nothing ends the process after `leave` has been called.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import resource
import threading
import time
from pathlib import Path

SIGNAL_S = 1.0
"""Time for a signal to take effect, unless this process ignores it."""
_log = logging.getLogger("llmbackend")
_SHARED_MEMORY = re.compile(r"/dev/shm/[^\s/]+$", re.MULTILINE)


class Children:
    """Watches the present children of this process."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        for pid in _running_children():
            threading.Thread(target=self._wait_for, args=(pid,), name=f"child-{pid}", daemon=True).start()

    def leave(self) -> None:
        self._is_over.set()

    def _wait_for(self, pid: int) -> None:
        """The library waits for its child as well, and may have taken its exit code."""
        end = None
        with contextlib.suppress(ChildProcessError):
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if self._is_over.is_set():
            return
        _log.error("process %d, which the instance had started, has ended", pid)
        for path in _mapped_files():
            Path(path).unlink(missing_ok=True)
        _end_like(end)


def _end_like(end: os.waitid_result | None) -> None:
    if end is not None and end.si_code != os.CLD_EXITED:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), end.si_status)
        time.sleep(SIGNAL_S)
    os._exit(1 if end is None else end.si_status or 1)


def _running_children() -> set[int]:
    return {int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


def _mapped_files() -> set[str]:
    """Named shared memory, which would outlive its last user: the library can no longer remove it."""
    return set(_SHARED_MEMORY.findall(Path("/proc/self/maps").read_text()))
