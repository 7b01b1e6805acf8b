"""Helpers for server processes: signals, threads, exit, log records, file descriptors, readiness."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn, ParamSpec, TypeVar

import msgspec

from llmbackend.fork_server.process_resources import OwnedFolder
from llmbackend.frontends.limits import FrontendLimits

from .process_memory import descendants

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_directories: list[OwnedFolder] = []


def stop_on_signal() -> asyncio.Event:
    """The first SIGTERM or SIGINT sets the event; a second one ends the process immediately with exit code 1."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            log.error("Signal (%d) received again, exiting at once.", number)
            exit_now(1)
        log.info("Signal (%d) received.", number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def reload_on_hangup(stop: asyncio.Event, reloads: Sequence[Callable[[], None]]) -> None:
    """SIGHUP calls `reloads`; but if it means that this process's terminal was closed, it sets `stop`."""
    loop = asyncio.get_running_loop()
    had_terminal = _has_terminal()

    def on_signal() -> None:
        if had_terminal and not _has_terminal():
            log.info("the terminal was closed")
            stop.set()
        else:
            log.info("Signal (%d) received.", signal.SIGHUP)
            for reload in reloads:
                reload()

    loop.add_signal_handler(signal.SIGHUP, on_signal)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Runs `function` on a new daemon thread. (asyncio.to_thread has a limited number of threads, so hanging calls
    would block others, and the process would wait for them on exit.)"""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # a T when there is not an error

    def run() -> None:
        try:
            result, error = function(*args, **kwargs), None
        except BaseException as raised:
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=getattr(function, "__name__", "worker"), daemon=True).start()
    return future


def temporary_directory(kind: str) -> Path:
    """A directory that is removed with the process. kind: part of its name."""
    _directories.append(OwnedFolder(kind))
    return _directories[-1].path


def kill_children() -> None:
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def exit_now(code: int) -> NoReturn:
    """Ends the process without waiting for its threads, one of which may hang."""
    kill_children()
    for directory in _directories:
        directory.remove()
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class LogRecordLine(msgspec.Struct, frozen=True):
    """A log record that a process writes to its parent."""

    logger: str
    level: int
    created_s: float
    path: str
    line: int
    text: str


class _RecordWriter(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        text = logging.Formatter().format(record)
        kept = LogRecordLine(record.name, record.levelno, record.created, record.pathname, record.lineno, text)
        try:
            sys.stderr.buffer.write(msgspec.json.encode(kept) + b"\n")
            sys.stderr.buffer.flush()
        except (OSError, ValueError):  # the parent has ended, and this process will soon do so
            return


def write_records(filters: tuple[logging.Filter, ...], is_verbose: bool) -> None:
    """Log records now go to standard error as LogRecordLines; other libraries' from WARNING on."""
    handler = _RecordWriter()
    for each in filters:
        handler.addFilter(each)
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.WARNING)
    logging.getLogger("llmbackend").setLevel(logging.DEBUG if is_verbose else logging.INFO)


def log_line(line: bytes, process_name: str, pid: int) -> None:
    """Logs a line that another process has written, prefixed with its name."""
    try:
        kept = msgspec.json.decode(line, type=LogRecordLine)
    except msgspec.DecodeError:
        log.error("%s: %s", process_name, line.decode("utf-8", "replace").rstrip())
        return
    logger = logging.getLogger(kept.logger)
    if not logger.isEnabledFor(kept.level):
        return
    text = f"{process_name}: {kept.text}"
    record = logger.makeRecord(kept.logger, kept.level, kept.path, kept.line, text, (), None)
    record.created, record.process = kept.created_s, pid
    logger.handle(record)


_MIN_RESERVE: Final = 20
_MAX_RESERVE: Final = 512
_OWN_DESCRIPTORS: Final = 1024
"""Descriptors for models, engines and libraries, in addition to connections and the reserve."""


@dataclass(frozen=True)
class DescriptorRoom:
    """File descriptors of this process. limit: how many it may open; in_use: how many are open."""

    limit: int
    in_use: int

    @classmethod
    def now(cls) -> DescriptorRoom:
        return cls(_finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0]), _count_open())

    @property
    def first_reserved(self) -> int:
        """The lowest descriptor that connections must not use."""
        return self.limit - max(_MIN_RESERVE, min(self.limit // 8, _MAX_RESERVE))

    @property
    def connections(self) -> int:
        return max(self.first_reserved - self.in_use, 0)


def raise_limit(connections: int) -> None:
    """Raises the soft limit of open files for this many connections, within the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(connections + _MAX_RESERVE + _OWN_DESCRIPTORS, _finite(hard))
    if _finite(soft) < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def fitted(limits: FrontendLimits, room: DescriptorRoom) -> FrontendLimits:
    """`limits` with the numbers of connections reduced proportionally to fit the descriptors; logs a warning if so.
    Surplus connections are then not kept open for a refusal: they could take a recovering engine's descriptors."""
    permitted = limits.connections
    if room.connections >= permitted:
        return limits

    def share(count: int) -> int:
        return max(1, count * room.connections // permitted)

    http, grpc = share(limits.http.max_connections), share(limits.grpc.max_connections)
    log.warning(
        "the limit of %d open files (ulimit -n), of which %d are in use, is below what the flags permit: "
        "%d instead of %d HTTP and %d instead of %d gRPC connections are served",
        *(room.limit, room.in_use),
        *(http, limits.http.max_connections, grpc, limits.grpc.max_connections),
    )
    return replace(
        limits,
        http=replace(limits.http, max_connections=http, max_refused_connections=0),
        grpc=replace(limits.grpc, max_connections=grpc),
        metrics_max_connections=share(limits.metrics_max_connections),
    )


def _finite(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _count_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


READY_DESCRIPTOR: Final = "LLMBACKEND_READY_FD"
"""Environment variable with the number of a descriptor for `report_ready`."""


def take_ready_descriptor() -> int | None:
    """The descriptor passed to this process; None in later calls."""
    text = os.environ.pop(READY_DESCRIPTOR, "")
    if not text:
        return None
    try:
        os.set_inheritable(descriptor := int(text), False)
    except (ValueError, OSError):
        log.warning("%s is '%s', expected the number of an open descriptor", READY_DESCRIPTOR, text)
        return None
    return descriptor


def report_ready(descriptor: int | None, urls: Mapping[str, str]) -> None:
    if descriptor is None:
        return
    try:
        with open(descriptor, "w") as pipe:
            pipe.write(json.dumps(dict(urls)) + "\n")
    except OSError as error:
        log.warning("the program that started this server could not be told that it is ready: %s", error)
