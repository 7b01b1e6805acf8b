"""`python -m llmbackend.server.frontend_process`: a frontend process of a host or of a cluster's launcher.

Several of them share a port; each has its own event loop. Independent of models, backends and its parent. Invariants:
it listens when told to; it ends immediately if its parent ends, and when told to, after its running requests.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Final

import uvloop

from llmbackend.core.errors import TritonError
from llmbackend.core.server_log import RepeatedErrors, RepeatFilter
from llmbackend.fork_server.server import end_with

from .frontend_settings import (
    HEARTBEAT_INTERVAL_S,
    ControlChannel,
    Drain,
    FrontendSettings,
    Leave,
    Message,
    Reload,
    Serve,
    Serving,
    receive_settings,
)
from .process import exit_now, raise_limit, write_records

if TYPE_CHECKING:
    from .frontend_endpoints import FrontendEndpoints

log = logging.getLogger(__name__)

GC_THRESHOLD_OBJECTS: Final = 10_000
"""The same as in serve.py."""
GONE: Final = 1
"""Exit code if the parent has ended or the ports cannot be bound."""


def main() -> int:
    end_with(os.getppid())  # even while stopped by SIGSTOP, so that the next server can bind the ports
    channel = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    try:
        settings = receive_settings(channel)
    except EOFError:
        return GONE
    write_records((RepeatFilter(RepeatedErrors()),), settings.is_verbose)
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent handles the terminal's signals
        signal.signal(number, signal.SIG_IGN)
    raise_limit(settings.limits.connections)
    gc.set_threshold(GC_THRESHOLD_OBJECTS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(settings, channel))


async def _run(settings: FrontendSettings, channel: socket.socket) -> int:
    from .frontend_endpoints import FrontendEndpoints  # takes half a second

    control = await ControlChannel.over(channel)
    endpoints = FrontendEndpoints(settings)
    gc.freeze()
    inbox = _Inbox(control, settings.exit_timeout_s)
    while (message := await inbox.next()) is not None:
        if isinstance(message, Serve):
            try:
                await endpoints.start()
            except (OSError, RuntimeError, TritonError) as error:
                log.error("cannot serve: %s", error)
                return GONE
            _send_heartbeats(control)
        elif isinstance(message, Reload):
            endpoints.reload()
        elif isinstance(message, Leave):
            await endpoints.leave()
        elif isinstance(message, Drain):
            return await _drain(endpoints, inbox, message.grace_s)
    return GONE


def _send_heartbeats(control: ControlChannel) -> None:
    control.send(Serving())
    asyncio.get_running_loop().call_later(HEARTBEAT_INTERVAL_S, _send_heartbeats, control)


class _Inbox:
    """The parent's messages, and a Drain for each SIGTERM."""

    def __init__(self, control: ControlChannel, exit_timeout_s: float) -> None:
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._messages.put_nowait, Drain(exit_timeout_s))
        self._reading = asyncio.create_task(self._read(control))

    async def next(self) -> Message | None:
        """None: the parent has ended."""
        return await self._messages.get()

    async def _read(self, control: ControlChannel) -> None:
        while (message := await control.receive()) is not None:
            self._messages.put_nowait(message)
        self._messages.put_nowait(None)


async def _drain(endpoints: FrontendEndpoints, inbox: _Inbox, grace_s: float) -> int:
    """Returns at once when the parent has ended; a second Drain sets a new limit."""
    stopping = asyncio.create_task(endpoints.stop(grace_s))
    while not stopping.done():
        hearing = asyncio.create_task(inbox.next())
        await asyncio.wait((stopping, hearing), return_when=asyncio.FIRST_COMPLETED)
        if not hearing.done():
            hearing.cancel()
        elif (message := hearing.result()) is None:
            return GONE
        elif isinstance(message, Drain):
            await asyncio.wait((stopping,), timeout=message.grace_s)
            break
    return 0


if __name__ == "__main__":
    exit_now(main())
