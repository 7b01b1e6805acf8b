"""Which process listens on a TCP port, for the error of a server that cannot bind it.

For: ports.py. Does not know: why it is asked. Invariant: "" where it is unknown: another user's process, or no /proc.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_LISTENS: Final = "0A"
_MAX_COMMAND_CHARACTERS: Final = 120


def holder_of(port: int) -> str:
    """`process 12 (its command)` of each process that listens on the port, on any address; "" = unknown."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    found = [_described(process) for process in Path("/proc").glob("[0-9]*") if sockets and _has(process, sockets)]
    return " and ".join(sorted(found))


def _inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for _, local, _, state, *rest in map(str.split, rows):
            if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                yield rest[5]


def _has(process: Path, sockets: set[str]) -> bool:
    try:
        return any(os.readlink(descriptor) in sockets for descriptor in (process / "fd").iterdir())
    except OSError:  # it has ended, or belongs to another user
        return False


def _described(process: Path) -> str:
    try:
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = ""
    return f"process {process.name} ({command[:_MAX_COMMAND_CHARACTERS]})" if command else f"process {process.name}"
