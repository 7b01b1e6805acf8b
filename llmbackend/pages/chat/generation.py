"""Generation: requests an answer, reads its stream and shows it as it arrives.

Used by page.py. Independent of the rest of the chat. Invariants: the page is updated at most about 16 times a second,
and updates take at most a fifth of the time, so that long answers do not saturate the page process; the text that has
arrived is never lost, however the answer ends. The stream is resumable: after a lost connection, reading continues
after the last event; a reloaded page reads the stream from its beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

import msgspec
from nicegui import Client, background_tasks

from ..api import ApiError
from ..engine_news import listening
from ..shell import Viewer
from .answer import Answer
from .conversation import INTERRUPTED, Turn, UnfinishedAnswer
from .turn_views import AnswerView

_SHOW_EVERY_S: Final = 0.06
_SHARE_OF_TIME: Final = 0.2
"""Maximum share of the time spent on updates of the page."""
_SILENCES_S: Final = (300, 60, 30, 10, 3)
"""Times without a token after which the page says so: not each second, because screen readers speak it each time."""
_PATH: Final = "/v1/chat/completions"
_ID_PREFIX: Final = "chatcmpl-"
"""The server's prefix to the client's request id in the id of a chat completion."""
_RESUME_GRACE_S: Final = 30.0
"""How long the server keeps a stream without a connection (--resume-grace)."""
_RETRY_EVERY_S: Final = 1.0
_UNAUTHORIZED: Final = 401
_NOT_FOUND: Final = 404
_LOST_CONNECTION: Final = (0, 502, 503)


class Generation:
    def __init__(
        self,
        viewer: Viewer,
        request: Mapping[str, Any],
        unfinished: UnfinishedAnswer,
        view: AnswerView,
        client: Client,
        root: str,
    ) -> None:
        """unfinished  the answer so far; read from its stream if it has one
        root  of the request's `model`, as the API lists it
        """
        self._api = viewer.api
        self._key = viewer.key
        self._request = {**request, "request_id": unfinished.key}
        self._unfinished = unfinished
        self._view = view
        self._client = client
        self._host_model = root
        """The host's name of the model, once it is known."""
        self._answer = Answer(unfinished.base)
        self._event_id = unfinished.stream_id
        """Id of the last event, or of the stream; "" = nothing has arrived."""
        self._is_disconnected = False
        self._engine_state = ""
        self._recovery_ms: float | None = None
        self._news_s = time.monotonic()
        self._longest_pause_s = 0.0
        """Longest time between two parts of the answer."""
        self._is_dirty = bool(unfinished.turn.content)
        self._reading: asyncio.Task[None] | None = None
        self._is_stopped = False
        self.is_dropped = False
        """Whether this page discards the answer."""
        self.needs_key = False
        """Whether the API refused the request's key."""

    def stop(self) -> None:
        """Stops the answer here and on the server; the text so far is preserved."""
        self._is_stopped = True
        background_tasks.create(self._stop_request(), name="stop an answer")
        self._end_reading()

    def drop(self) -> None:
        self.is_dropped = True
        self.stop()

    def leave(self) -> None:
        """The browser has disconnected. The server continues for a while, in case the page is reloaded."""
        self.is_dropped = True
        self._end_reading()

    def so_far(self) -> UnfinishedAnswer:
        """The state from which another page can continue."""
        stream_id = self._event_id.partition(":")[0]
        return msgspec.structs.replace(self._unfinished, turn=self._kept(), stream_id=stream_id)

    async def run(self) -> Turn:
        """The answer, complete or as far as it came."""
        if self._is_stopped:
            return self.turn()
        self._reading = asyncio.create_task(self._read())
        others = [asyncio.create_task(self._show()), asyncio.create_task(self._find_host_model())]
        try:
            with listening(self._key, self._take_news), contextlib.suppress(asyncio.CancelledError):
                await self._reading
        finally:
            for task in (self._reading, *others):
                task.cancel()
            await asyncio.gather(self._reading, *others, return_exceptions=True)
        return self.turn()

    async def _find_host_model(self) -> None:
        with contextlib.suppress(ApiError):
            model = await self._api.get(f"/v2/models/{quote(self._host_model, safe='')}")
            self._host_model = str(model["name"])

    def _end_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def _stop_request(self) -> None:
        path = f"/v2/models/{quote(self._host_model, safe='')}/stop"
        with contextlib.suppress(ApiError):  # it may have ended; otherwise it ends after the grace period
            await self._api.post(path, {"id": f"{_ID_PREFIX}{self._unfinished.key}"})

    def turn(self) -> Turn:
        """The answer as if it ended now."""
        kept = self._kept()
        if not kept.finish_reason and not kept.error:
            kept = msgspec.structs.replace(kept, finish_reason=INTERRUPTED)
        return kept

    def _kept(self) -> Turn:
        """The answer as received here or, if that is longer, by the previous page."""
        turn = self._answer.turn(is_stopped=self._is_stopped)
        known = self._unfinished.turn
        if len(known.content) + len(known.reasoning) > len(turn.content) + len(turn.reasoning):
            turn = msgspec.structs.replace(known, finish_reason=turn.finish_reason, error=turn.error)
        timing = None if self._unfinished.stream_id else turn.timing  # a stream that is read again arrives at once
        return msgspec.structs.replace(turn, recovery_ms=self._recovery_ms, timing=timing)

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Reads until the answer has ended, over several connections if necessary."""
        try:
            while not await self._read_connection():
                self._is_disconnected = True
                await asyncio.sleep(_RETRY_EVERY_S)
        except ValueError as error:
            self._answer.error = f"the stream cannot be read: {error}"

    async def _read_connection(self) -> bool:
        """Returns True if the answer has ended. Raises ValueError for an event that is not JSON."""
        try:
            async with contextlib.aclosing(self._api.stream("POST", _PATH, self._request, self._headers())) as events:
                async for event in events:
                    if event.data == "[DONE]":
                        return True
                    self._event_id = event.id or self._event_id
                    self._take(json.loads(event.data))
        except ApiError as error:
            return self._fail(error)
        return self._fail(ApiError(0, "the server has closed the connection"))

    def _headers(self) -> dict[str, str]:
        """Headers for the rest of the known stream, otherwise for a new one or one with the same key."""
        if self._event_id:
            return {"last-event-id": self._event_id}
        return {"x-resumable-stream": "true", "idempotency-key": self._unfinished.key}

    def _fail(self, error: ApiError) -> bool:
        """Records the error; returns False to reconnect instead."""
        silence_s = time.monotonic() - self._news_s
        if self._event_id and error.status in _LOST_CONNECTION and silence_s < _RESUME_GRACE_S:
            return False
        if not (self._event_id and error.status == _NOT_FOUND):  # an expired stream ends without an error
            self._answer.error = str(error)
        self.needs_key = error.status == _UNAUTHORIZED
        return True

    def _take(self, chunk: dict[str, Any]) -> None:
        now_s = time.monotonic()
        if self._answer.has_begun:
            self._longest_pause_s = max(self._longest_pause_s, now_s - self._news_s)
        self._news_s = now_s
        self._answer.take(chunk)
        self._is_dirty = True
        self._is_disconnected = False
        self._engine_state = ""

    def _take_news(self, news: dict[str, Any]) -> None:
        """A recovery during which the answer did not pause belongs to another engine of the model."""
        if news.get("model") != self._host_model:
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
            kept = self._kept()
            self._view.grow(kept.content, kept.reasoning, kept.tool_calls)
        self._view.show_state(self._waits_for(now_s - self._news_s))

    def _waits_for(self, silence_s: float) -> str:
        if self._engine_state in ("recovering", "starting"):
            return f"The engine is {self._engine_state}. The answer continues as soon as it is back."
        if self._engine_state in ("failed", "stopped"):
            return f"The engine has {self._engine_state}."
        if self._is_disconnected:
            return "Connection to the server lost. Trying again."
        for limit_s in _SILENCES_S:
            if silence_s > limit_s:
                return f"No token for more than {limit_s} s; still connected."
        return "" if self._answer.has_begun else "…"
