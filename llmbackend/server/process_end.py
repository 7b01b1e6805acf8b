"""How a server process ends: signals, threads for work that may hang, and an exit that leaves no child process.

For: serve.py. Does not know: models, protocols, what its child processes are. Invariants: the first SIGTERM or SIGINT
asks for a stop, the second one ends the process; SIGHUP reloads files. When the process exits, it kills its children,
also those that hang. (After a SIGKILL of the server its children end by themselves: each watches a pipe to its parent.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, ParamSpec, TypeVar

from llmbackend.fork_server.temporary_folders import OwnedFolder

from .process_memory import descendants

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_directories: list[OwnedFolder] = []


def stop_on_signal() -> asyncio.Event:
    """The event that the first SIGTERM or SIGINT sets; the second one ends the process at once with exit code 1."""
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


def reload_on_hangup(stop: asyncio.Event, reload: Callable[[], None]) -> None:
    """SIGHUP calls `reload`. Where it means that this process's terminal was closed, it sets `stop` instead."""
    loop = asyncio.get_running_loop()
    had_terminal = _has_terminal()

    def on_signal() -> None:
        if had_terminal and not _has_terminal():
            log.info("the terminal was closed")
            stop.set()
        else:
            log.info("Signal (%d) received.", signal.SIGHUP)
            reload()

    loop.add_signal_handler(signal.SIGHUP, on_signal)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Runs `function` on a new daemon thread. (asyncio.to_thread has a pool, which calls that hang may fill, and which
    the process waits for when it exits.)"""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # a T when there is no error

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
    """A directory that lives as long as the process. kind: a word of its name."""
    _directories.append(OwnedFolder(kind))
    return _directories[-1].path


def kill_children() -> None:
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def exit_now(code: int) -> NoReturn:
    """Ends the process without waiting for its threads, since one of them may hang."""
    kill_children()
    for directory in _directories:
        directory.remove()
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
