"""What a served engine leaves on its machine for those who look for it later: a file, kept by its command.

For: the command, and who starts such commands or finds one that somebody before has started. Does not know: who that
is. Invariants: the file names the engine's latest process, whoever hears of it; the record of a command that has ended
is none.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from llmbackend.fork_server.process_start import started_ticks

from .served_order import ServedEngineNews


class EngineRecord(msgspec.Struct, frozen=True):
    """pid    of the command that keeps the engine
    start  of that process, as the system counts it: process ids are used again
    news   the last that it said
    """

    pid: int
    start: int
    news: ServedEngineNews


def write_record(file: Path, news: ServedEngineNews) -> None:
    """Of this process. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = file.with_suffix(".new")
    written.write_bytes(msgspec.json.encode(EngineRecord(os.getpid(), started_ticks(os.getpid()), news)))
    written.replace(file)


def read_record(file: Path) -> EngineRecord | None:
    """Of an engine that still runs."""
    try:
        record = msgspec.json.decode(file.read_bytes(), type=EngineRecord)
    except (OSError, msgspec.DecodeError):
        return None
    return record if started_ticks(record.pid) == record.start else None
