"""Counts and token buckets that the processes of one server share, in a memory-mapped file.

Used for limits that a host and its frontend processes share. Independent of what is counted. Invariants: a process
changes only its own counts, and `forget` removes those of a dead one; no process waits for one that hangs; `add` never
fails, so that a caller that counts under several names can always undo it. An operation takes about 5 µs.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import struct
import threading
import time
from collections import Counter
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol


class Counts(Protocol):
    def held(self, name: str) -> int: ...

    def add(self, name: str, change: int) -> int:
        """Returns the count afterwards, over all processes."""


class LocalCounts:
    """Counts of one process. Used only on its event loop."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    def held(self, name: str) -> int:
        return self._held[name]

    def add(self, name: str, change: int) -> int:
        held = self._held[name] + change
        if held:
            self._held[name] = held
        else:
            del self._held[name]
        return held


log = logging.getLogger(__name__)
_HEAD: Final = struct.Struct("<i")
"""The number of processes."""
_WINDOWS: Final = 4096
_WINDOW: Final = 64
"""How many records, starting where its digest points, may hold a name."""
_DIGEST_BYTES: Final = 16
_FREE: Final = bytes(_DIGEST_BYTES)
_DIGESTS_AT: Final = 64
_RECORDS_AT: Final = _DIGESTS_AT + _WINDOWS * _WINDOW * _DIGEST_BYTES
_BUCKET: Final = struct.Struct("<dd")
"""Units, and when they were counted (monotonic seconds, the same in all processes of a machine); 0: not used yet."""
_COUNT: Final = struct.Struct("<i")
"""The count of one process."""
_LOCK_TIMEOUT_S: Final = 0.02
"""If a process stops while it holds the lock, the others continue without it after this time. A limit may then be
exceeded by what two of them take at the same moment."""
_LOCK_POLL_S: Final = 20e-6


class SharedCounts:
    """Thread-safe. Each record has one count per process."""

    def __init__(self, path: Path, process: int) -> None:
        """path: a file made by `create`. process: the index of this process"""
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._memory = mmap.mmap(self._file, 0)
        (processes,) = _HEAD.unpack_from(self._memory)
        self._columns = struct.Struct(f"<{processes}i")
        self._record_bytes = _record_bytes(processes)
        self._process = process
        self.lock = _ProcessLock(self._file)
        """For callers that read a bucket and then change it."""

    @classmethod
    def create(cls, path: Path, processes: int) -> SharedCounts:
        """Creates the file, and maps it as process 0."""
        with path.open("xb") as file:
            file.write(_HEAD.pack(processes))
            file.truncate(_RECORDS_AT + _WINDOWS * _WINDOW * _record_bytes(processes))
        return cls(path, 0)

    def held(self, name: str) -> int:
        """The count over all processes."""
        record = self._find(name)
        return 0 if record is None else sum(self._columns.unpack_from(self._memory, self._counts_at(record)))

    def add(self, name: str, change: int) -> int:
        """If no record is free, a new name is neither counted (returns 0) nor limited; a warning is logged."""
        with self.lock:
            try:
                record = self._take(name)
            except RuntimeError as error:
                log.warning("%s", error)
                return 0
            at = self._counts_at(record) + self._process * _COUNT.size
            (count,) = _COUNT.unpack_from(self._memory, at)
            _COUNT.pack_into(self._memory, at, max(count + change, 0))  # below 0: `add` found no record
            held: int = sum(self._columns.unpack_from(self._memory, self._counts_at(record)))
            self._free_if_unused(record)
            return held

    def forget(self, process: int) -> None:
        """Removes the counts of a process that has exited."""
        with self.lock:
            for record in self._records():
                _COUNT.pack_into(self._memory, self._counts_at(record) + process * _COUNT.size, 0)
                self._free_if_unused(record)

    def bucket(self, name: str, full: float) -> SharedCell:
        """The bucket of this name, which is never freed. full: units of a new one"""
        with self.lock:
            cell = SharedCell(self._memory, self._record_at(self._take(name)))
            if not cell.is_used:
                cell.write(full, time.monotonic())
            return cell

    def close(self) -> None:
        self._memory.close()
        os.close(self._file)

    # --- records ----------------------------------------------------------------------------------------------------

    def _find(self, name: str) -> int | None:
        digest = _digest(name)
        return self._in_window(digest, digest)

    def _take(self, name: str) -> int:
        """The record of `name`, created if necessary."""
        digest = _digest(name)
        record = self._in_window(digest, digest)
        if record is None:
            record = self._in_window(digest, _FREE)
            if record is None:
                raise RuntimeError(f"no record is free to count {name}: its {_WINDOW} records have other names")
            self._set_digest(record, digest)
        return record

    def _in_window(self, digest: bytes, wanted: bytes) -> int | None:
        first = int.from_bytes(digest[:4], "little") % _WINDOWS * _WINDOW
        begin = _DIGESTS_AT + first * _DIGEST_BYTES
        window = self._memory[begin : begin + _WINDOW * _DIGEST_BYTES]
        at = window.find(wanted)
        while at % _DIGEST_BYTES and at >= 0:  # across two digests
            at = window.find(wanted, at + 1)
        return None if at < 0 else first + at // _DIGEST_BYTES

    def _records(self) -> list[int]:
        """The records in use."""
        table = self._memory[_DIGESTS_AT:_RECORDS_AT]
        found = []
        for begin in range(0, len(table), _WINDOW * _DIGEST_BYTES):
            window = table[begin : begin + _WINDOW * _DIGEST_BYTES]
            if window.strip(b"\0"):
                digests = range(0, len(window), _DIGEST_BYTES)
                found += [(begin + at) // _DIGEST_BYTES for at in digests if window[at : at + _DIGEST_BYTES] != _FREE]
        return found

    def _free_if_unused(self, record: int) -> None:
        counts = self._columns.unpack_from(self._memory, self._counts_at(record))
        if not any(counts) and not SharedCell(self._memory, self._record_at(record)).is_used:
            self._set_digest(record, _FREE)

    def _set_digest(self, record: int, digest: bytes) -> None:
        at = _DIGESTS_AT + record * _DIGEST_BYTES
        self._memory[at : at + _DIGEST_BYTES] = digest

    def _record_at(self, record: int) -> int:
        return _RECORDS_AT + record * self._record_bytes

    def _counts_at(self, record: int) -> int:
        return self._record_at(record) + _BUCKET.size


class SharedCell:
    """The units of a bucket and when they were counted. Requires the lock."""

    __slots__ = ("_at", "_memory")

    def __init__(self, memory: mmap.mmap, at: int) -> None:
        self._memory = memory
        self._at = at

    @property
    def is_used(self) -> bool:
        return bool(self.read()[1])

    def read(self) -> tuple[float, float]:
        units, at_s = _BUCKET.unpack_from(self._memory, self._at)
        return units, at_s

    def write(self, units: float, at_s: float) -> None:
        _BUCKET.pack_into(self._memory, self._at, units, at_s)


class _ProcessLock:
    """A lock between threads and between processes; the system releases it when a process dies."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._threads = threading.Lock()

    def __enter__(self) -> None:
        self._threads.acquire()
        deadline_s = 0.0
        while not self._is_free():
            now_s = time.monotonic()
            deadline_s = deadline_s or now_s + _LOCK_TIMEOUT_S
            if now_s >= deadline_s:
                return
            time.sleep(_LOCK_POLL_S)

    def _is_free(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._threads.release()


def _record_bytes(processes: int) -> int:
    return _BUCKET.size + 4 * processes + -(4 * processes) % 8


@lru_cache(maxsize=8192)
def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest()
