"""Faults of a server or of its surroundings.

Used by the trials. Independent of streams and of the server. Invariant: `inject` returns when the fault is in effect;
leaving it reverts whatever can be reverted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import psutil

from .supervised import Supervised

PAUSE_S = 20.0
HUNG_CLIENTS = 8
"""Of each kind: those that do not read, and those that send half a request."""


@dataclass(frozen=True)
class Target:
    """worker: the process that has used the most CPU time since the streams began. Of a server with one process it is
    `first`."""

    server: Supervised
    first: psutil.Process
    worker: psutil.Process


Inject = Callable[[Target], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class Fault:
    """patience_s: after it every stream must have ended. hurts_worker: what it does to a server of one process is done
    by another fault already."""

    inject: Inject
    patience_s: float = 120.0
    hurts_worker: bool = False


def target(server: Supervised, before_s: Mapping[int, float]) -> Target:
    """before_s: `cpu_times_s` when the streams began."""
    processes = server.processes()
    used_s = cpu_times_s(server)
    worker = max(processes, key=lambda one: used_s.get(one.pid, 0.0) - before_s.get(one.pid, 0.0))
    return Target(server, processes[0], worker)


def cpu_times_s(server: Supervised) -> dict[int, float]:
    """By process id."""
    found: dict[int, float] = {}
    for process in server.processes():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


@asynccontextmanager
async def _nothing(target: Target) -> AsyncIterator[None]:
    yield


def _killed(which: str) -> Inject:
    @asynccontextmanager
    async def inject(target: Target) -> AsyncIterator[None]:
        getattr(target, which).kill()
        yield

    return inject


def _stopped(which: str, seconds: float) -> Inject:
    """SIGSTOP, and after `seconds` SIGCONT; 0 = never."""

    @asynccontextmanager
    async def inject(target: Target) -> AsyncIterator[None]:
        process: psutil.Process = getattr(target, which)
        process.suspend()
        later = asyncio.create_task(_resume(process, seconds)) if seconds else None
        yield
        if later is not None:
            await later

    return inject


async def _resume(process: psutil.Process, seconds: float) -> None:
    await asyncio.sleep(seconds)
    with contextlib.suppress(psutil.Error):  # it has been ended meanwhile
        process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def _full_disk(target: Target) -> AsyncIterator[None]:
    """Of its log, its temporary files and its folder."""
    folder = target.server.folder
    if not os.path.ismount(folder):
        raise PermissionError("a full disk needs the right to mount one")
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    (folder / "filler").unlink()


@asynccontextmanager
async def _hung_clients(target: Target) -> AsyncIterator[None]:
    """Some send half a request, some ask for a stream that they never read."""
    server = target.server
    body = json.dumps(
        {
            "model": server.model,
            "messages": [{"role": "user", "content": "Count for ever."}],
            "stream": True,
            "max_tokens": 400,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {server.rival.address}\r\nContent-Type: application/json\r\n"
    request = head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    with contextlib.ExitStack() as clients:
        for sent in [request, request[: len(request) - len(body) // 2]] * HUNG_CLIENTS:
            client = clients.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(("127.0.0.1", server.rival.port))
            client.sendall(sent)
        yield


FAULTS: dict[str, Fault] = {
    "none": Fault(_nothing),
    "SIGKILL of the worker": Fault(_killed("worker"), hurts_worker=True, patience_s=240.0),
    "SIGKILL of the serving process": Fault(_killed("first"), patience_s=240.0),
    f"SIGSTOP of the worker for {PAUSE_S:g} s": Fault(_stopped("worker", PAUSE_S), hurts_worker=True),
    f"SIGSTOP of the serving process for {PAUSE_S:g} s": Fault(_stopped("first", PAUSE_S)),
    "SIGSTOP of the worker, for ever": Fault(_stopped("worker", 0), hurts_worker=True, patience_s=300.0),
    "SIGSTOP of the serving process, for ever": Fault(_stopped("first", 0), patience_s=300.0),
    "full disk": Fault(_full_disk),
    f"{2 * HUNG_CLIENTS} hung clients": Fault(_hung_clients),
}
