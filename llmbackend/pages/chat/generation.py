"""Generation: one answer, from its request to its end, shown as it arrives.

For: page.py. Does not know: the chat around it. Invariants: the page changes at most some ten times a second, and less
often where that takes longer, so that long answers of several viewers do not take up the page process; what has
arrived is kept however the answer ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from nicegui import Client

from ..api import ApiError
from ..engine_news import listening
from ..shell import Viewer
from .answer import Answer
from .conversation import Turn
from .turn_views import AnswerView

_SHOW_EVERY_S: Final = 0.06
_SHARE_OF_TIME: Final = 0.2
"""That much of the time is spent on showing, at most."""
_SILENCE_S: Final = 3.0
"""Without a token the page says that it waits."""


class Generation:
    def __init__(self, viewer: Viewer, request: Mapping[str, Any], view: AnswerView, client: Client) -> None:
        self._api = viewer.api
        self._key = viewer.key
        self._request = request
        self._view = view
        self._client = client
        self._answer = Answer()
        self._engine_state = ""
        self._recovery_ms: float | None = None
        self._news_s = time.monotonic()
        self._longest_pause_s = 0.0
        """Between two pieces of the answer."""
        self._is_dirty = False
        self._reading: asyncio.Task[None] | None = None
        self._is_stopped = False
        self.is_dropped = False
        """Nobody wants the answer any more, not even what has arrived."""
        self.needs_key = False
        """The API has refused the request for want of a key."""

    def stop(self) -> None:
        """Ends it; the request is cancelled with its connection."""
        self._is_stopped = True
        if self._reading is not None:
            self._reading.cancel()

    def drop(self) -> None:
        self.is_dropped = True
        self.stop()

    def so_far(self) -> Turn:
        """What has arrived of an answer that has not ended."""
        return msgspec.structs.replace(self._turn(), finish_reason="interrupted")

    async def run(self) -> Turn:
        """The answer, complete or as far as it came."""
        if self._is_stopped:
            return self._turn()
        self._reading = asyncio.create_task(self._read())
        showing = asyncio.create_task(self._show())
        try:
            with listening(self._key, self._take_news), contextlib.suppress(asyncio.CancelledError):
                await self._reading
        finally:
            self._reading.cancel()
            showing.cancel()
            await asyncio.gather(self._reading, showing, return_exceptions=True)
        return self._turn()

    def _turn(self) -> Turn:
        turn = self._answer.turn(is_stopped=self._is_stopped)
        return msgspec.structs.replace(turn, recovery_ms=self._recovery_ms)

    async def _read(self) -> None:
        try:
            async with contextlib.aclosing(
                self._api.stream("POST", "/v1/chat/completions", dict(self._request))
            ) as events:
                async for event in events:
                    if event.data == "[DONE]":
                        return
                    self._take(json.loads(event.data))
        except ApiError as error:
            self._answer.error = str(error)
            self.needs_key = error.status == 401
        except ValueError as error:
            self._answer.error = f"the stream is not readable: {error}"

    def _take(self, chunk: dict[str, Any]) -> None:
        now_s = time.monotonic()
        if self._answer.has_begun:
            self._longest_pause_s = max(self._longest_pause_s, now_s - self._news_s)
        self._news_s = now_s
        self._answer.take(chunk)
        self._is_dirty = True
        self._engine_state = ""

    def _take_news(self, news: dict[str, Any]) -> None:
        """A model may have several engines: a recovery in which the answer did not pause was that of another one."""
        if news.get("model") != self._request["model"]:
            return
        self._engine_state = str(news.get("state", ""))
        recovery_ms = float(news.get("recovery_ms") or 0)
        pause_s = max(self._longest_pause_s, time.monotonic() - self._news_s)
        if recovery_ms and pause_s * 1e3 > recovery_ms / 2:
            self._recovery_ms = (self._recovery_ms or 0) + recovery_ms

    async def _show(self) -> None:
        while True:
            began_s = time.monotonic()
            with self._client:
                self._show_once(began_s)
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(_SHOW_EVERY_S, took_s / _SHARE_OF_TIME))

    def _show_once(self, now_s: float) -> None:
        if self._is_dirty:
            self._is_dirty = False
            self._view.grow(self._answer.content, self._answer.reasoning, self._answer.tool_calls)
        self._view.show_state(self._waits_for(now_s - self._news_s))

    def _waits_for(self, silence_s: float) -> str:
        if self._engine_state in ("recovering", "starting"):
            return f"The engine is {self._engine_state}; the answer goes on as soon as it is back."
        if self._engine_state in ("failed", "stopped"):
            return f"The engine has {self._engine_state}."
        if silence_s > _SILENCE_S:
            return f"No token for {silence_s:.0f} s; still connected."
        return "" if self._answer.content or self._answer.reasoning or self._answer.tool_calls else "…"
