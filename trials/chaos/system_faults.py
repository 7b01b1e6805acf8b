"""System faults under a whole server: its wall clock jumps, or a sync to disk fails or takes long.

Used by servers and rounds. Independent of streams. Invariant: nothing fails without a call of `set`. The preloaded
library is native/system_faults.c.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).parent / "native" / "system_faults.c"
NO_SYNC_FAULT, FAILS = 0, 1


class SystemFaults:
    """Of the processes that are started with `variables`. `folder` holds the library and the faults."""

    def __init__(self, folder: Path) -> None:
        library, self._faults = folder / "system_faults.so", folder / "system_faults"
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
        self._faults.write_bytes(bytes(16))
        self.variables: Mapping[str, str] = {"LD_PRELOAD": str(library), "LLMBACKEND_SYSTEM_FAULTS": str(self._faults)}

    def set(self, clock_s: int = 0, sync: int = NO_SYNC_FAULT) -> None:
        """clock_s: by which the wall clock is wrong. sync: FAILS, or microseconds that each takes."""
        with self._faults.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), struct.pack("=qq", clock_s, sync), 0)
