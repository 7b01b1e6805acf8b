"""A memory limit for a whole server, as in a container, and a process that consumes the remaining memory.

Used by servers and rounds. Independent of whom the kernel kills. Invariant: leaving `eaten` returns the memory.
Requires control groups, version 1 or 2, and the permission to create one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_EATER = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
counter, file = pathlib.Path(sys.argv[2]), os.memfd_create("eaten")
first = counter.read_text()
while counter.read_text() == first:
    os.write(file, bytes(1 << 18))
print(flush=True)
sys.stdin.read()
"""
"""Fills a file in memory, which belongs to the group and to none of its processes, until the kernel has ended one of
them; and keeps it until its standard input ends."""


def can_be_limited() -> bool:
    return os.access(_V1 if _V1.is_dir() else _V2, os.W_OK)


class MemoryLimit:
    """Of the processes that are started with `setup`."""

    def __init__(self, mib: int) -> None:
        """Raises OSError where no group can be made."""
        is_v1 = _V1.is_dir()
        self._folder = (_V1 if is_v1 else _V2) / f"llmbackend-chaos-{os.getpid()}"
        self._folder.mkdir()
        self._events = self._folder / ("memory.oom_control" if is_v1 else "memory.events")
        limit = "memory.limit_in_bytes" if is_v1 else "memory.max"
        (self._folder / limit).write_text(str(mib << 20))
        self.setup = f"echo $$ > {self._folder}/cgroup.procs"

    @contextlib.asynccontextmanager
    async def eaten(self) -> AsyncIterator[None]:
        """All memory that is left; the kernel has ended a process."""
        eater = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _EATER, str(self._folder), str(self._events)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert eater.stdin is not None and eater.stdout is not None
        try:
            await eater.stdout.readline()
            yield
        finally:
            eater.stdin.close()
            await eater.wait()

    def remove(self) -> None:
        """After the processes have ended; else the empty group is left behind."""
        with contextlib.suppress(OSError):
            self._folder.rmdir()
