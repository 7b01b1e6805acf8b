"""Waits until an ended section's engines have returned their device memory.

Used by running.py. Engines run in sessions of their own and end shortly after the section that started them; an engine
started before that would size its KV blocks by what is free. Invariant: this process never uses a GPU itself: the
driver's program is asked.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

WAIT_LIMIT_S = 8.0
NEAR_BYTES = 256 << 20
"""Above the memory used at the beginning."""
_PAUSE_S = 0.1


def used_bytes() -> int:
    """Of all GPUs, by all processes. 0 where the driver does not answer."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=WAIT_LIMIT_S).stdout
        return sum(int(mebibytes) << 20 for mebibytes in found.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


@dataclass(frozen=True)
class Waited:
    seconds: float
    left_bytes: int
    """Above the memory used at the beginning."""

    @property
    def is_idle(self) -> bool:
        return self.left_bytes <= NEAR_BYTES


class DeviceMemory:
    def __init__(self, used: Callable[[], int]) -> None:
        """Called while no section runs."""
        self._used = used
        self._idle_bytes = used()

    def wait(self, limit_s: float = WAIT_LIMIT_S) -> Waited:
        """Until the memory used is near what it was at the beginning, or the limit is over."""
        start_s = time.monotonic()
        while True:
            left_bytes = self._used() - self._idle_bytes
            waited = Waited(time.monotonic() - start_s, left_bytes)
            if waited.is_idle or waited.seconds >= limit_s:
                return waited
            time.sleep(_PAUSE_S)
