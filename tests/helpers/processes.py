"""Information from the system about a process.

Used by tests that end processes. Independent of whose they are.
"""

from __future__ import annotations

from pathlib import Path


def is_alive(pid: int) -> bool:
    """A zombie does not count: it has ended, and its new parent has not reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
