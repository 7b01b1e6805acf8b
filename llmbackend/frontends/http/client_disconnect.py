"""Work that ends when its client goes away.

For: handlers whose answer takes a while. Does not know: what is answered. Invariant: work that is cut short has ended
when its caller hears of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from .request_scope import PRESENCE, ClientPresence

T = TypeVar("T")


async def unless_disconnected(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientDisconnect when the client goes away first. The body must have
    been read."""
    presence: ClientPresence | None = http.scope.get(PRESENCE)
    if presence is None:
        return await _beside_receive(http.receive, work)
    if presence.is_lost:
        work.close()
        raise ClientDisconnect
    return await _while_present(presence, work)


async def _while_present(presence: ClientPresence, work: Coroutine[Any, Any, T]) -> T:
    """Without a task of its own, which would cost more than most requests' work."""
    task = asyncio.current_task()
    assert task is not None
    is_cut = False

    def cut() -> None:
        nonlocal is_cut
        is_cut = True
        task.cancel()

    presence.when_lost(cut)
    try:
        return await work
    except asyncio.CancelledError:
        if is_cut and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        presence.forget(cut)


async def _beside_receive(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Under another ASGI server."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
