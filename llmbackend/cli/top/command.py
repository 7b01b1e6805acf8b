"""`llmbackend top`: its flags, the reader of a server's event feed, the live screen, and `--once` for scripts.

What events mean is defined in `feed_state.py`. Invariants: the server is only watched; the reader reconnects when a
connection ends, unless the server refuses; exit code 0 = ended by the user, or after `--once`; 1 = no server, or a
refusal.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import typer
from rich.console import Console
from rich.live import Live

from ..api_client import ApiClient, ApiError
from ..command_line import PlainHelpCommand
from ..terminal_text import harmless
from .feed_state import FeedState, as_object
from .screen import View, render

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_MIN_FEED_INTERVAL_MS, _MAX_FEED_INTERVAL_MS = 50, 200
_SILENCE_S: Final = 120.0
"""Longer than the interval at which an idle server sends comments."""
_PATH: Final = "/v2/engine/events"
_FIRST_WAIT_S, _MAX_WAIT_S = 0.5, 5.0
_MAX_QUEUED: Final = 1000
"""When it is reached, the reader waits, and the server drops events for this viewer."""


@app.command(cls=PlainHelpCommand)
def top(
    url: Annotated[str, typer.Option(help="The server's HTTP port.")] = "http://127.0.0.1:8000",
    model: Annotated[list[str] | None, typer.Option(help="Only these models; repeatable.", show_default=False)] = None,
    api_key: Annotated[
        str,
        typer.Option(
            envvar=["LLMBACKEND_API_KEY", "OPENAI_API_KEY"],
            help="An operator's key shows all requests, others only their own.",
            show_default=False,
        ),
    ] = "",
    interval_s: Annotated[
        float,
        typer.Option(
            min=0.1, max=60, help="Seconds between updates; with --once, the time over which rates are measured."
        ),
    ] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: one JSON object.")] = False,
) -> None:
    """Watch what a running server computes: engines, requests, tokens per second, KV memory."""
    if as_json and not once:
        raise typer.BadParameter("--json requires --once", param_hint="--json")
    console = Console(highlight=False)
    if not once and not console.is_terminal:
        raise typer.BadParameter("standard output is not a terminal, expected --once", param_hint="--once")
    try:
        reader = FeedReader(ApiClient(url, api_key, _SILENCE_S), model or (), _feed_interval_ms(interval_s))
        reader.start()
        if once:
            _show_once(reader, console, url, model or (), interval_s, as_json)
        else:
            _watch(reader, console, url, interval_s)
    except (ApiError, ValueError) as error:
        typer.echo(f"top: {harmless(_advised(error))}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        return


def _feed_interval_ms(interval_s: float) -> int:
    """A few messages per screen update."""
    return int(min(max(interval_s * 1e3 / 5, _MIN_FEED_INTERVAL_MS), _MAX_FEED_INTERVAL_MS))


def _advised(error: Exception) -> str:
    if isinstance(error, ApiError) and error.status in (401, 403):
        return f"{error}\nSet the variable LLMBACKEND_API_KEY."
    if isinstance(error, ApiError) and error.status == 404:
        return f"{error}\nIs this a server of llmbackend? --url is its HTTP port, without a path."
    return str(error)


def _watch(reader: FeedReader, console: Console, url: str, interval_s: float) -> None:
    state, notice = FeedState(), "connecting"
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            end_s = time.monotonic() + interval_s
            while (left_s := end_s - time.monotonic()) > 0:
                notice = _take(reader, state, notice, left_s)
            live.update(render(state, _view(console, url, notice)), refresh=True)


def _show_once(
    reader: FeedReader, console: Console, url: str, models: Sequence[str], interval_s: float, as_json: bool
) -> None:
    """Raises ApiError for a model without an instance."""
    state, notice = FeedState(), ""
    end_s = float("inf")
    while (left_s := end_s - time.monotonic()) > 0:
        notice = _take(reader, state, notice, min(left_s, 1.0))
        if state.has_snapshot and end_s == float("inf"):
            end_s = time.monotonic() + interval_s
            if missing := [name for name in models if name not in {model for model, _, _ in state.instances}]:
                raise ApiError(f"{url} has no loaded model '{missing[0]}'")
    if as_json:
        typer.echo(json.dumps(as_object(state, time.monotonic())))
    else:
        console.print(render(state, _view(console, url, notice)))


def _take(reader: FeedReader, state: FeedState, notice: str, timeout_s: float) -> str:
    """Applies the events received so far. Returns the current notice."""
    for item in reader.read(timeout_s):
        if isinstance(item, Event):
            state.apply(item.name, item.data, time.monotonic())
        else:
            notice = item.text
    return notice


def _view(console: Console, url: str, notice: str) -> View:
    width, height = console.size
    return View(url, width, height, time.monotonic(), notice)


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    data: Any


@dataclass(frozen=True, slots=True)
class Notice:
    """What is wrong with the connection; "" = nothing."""

    text: str


class FeedReader:
    """Reads the feed on its own thread. The queue contains the events in order; an ApiError is its last item."""

    def __init__(self, client: ApiClient, models: Sequence[str], interval_ms: int) -> None:
        self._client = client
        query = [*(("model", model) for model in models), ("interval_ms", str(interval_ms))]
        self._path = f"{_PATH}?{urlencode(query)}"
        self._queue: queue.Queue[Event | Notice | ApiError] = queue.Queue(_MAX_QUEUED)
        self._had_snapshot = False
        self._thread = threading.Thread(target=self._run, name="feed-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def read(self, timeout_s: float) -> list[Event | Notice]:
        """Waits for the first item. Raises ApiError if no more will arrive."""
        found: list[Event | Notice] = []
        try:
            item = self._queue.get(timeout=timeout_s)
            while True:
                if isinstance(item, ApiError):
                    raise item
                found.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return found

    def _run(self) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                self._follow()
                reason = "the server ended the connection"
                wait_s = _FIRST_WAIT_S
            except ApiError as error:
                if error.status in range(400, 500) or not self._had_snapshot:
                    self._queue.put(error)
                    return
                reason = str(error)
            self._queue.put(Notice(f"{reason}; connecting again"))
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, _MAX_WAIT_S)

    def _follow(self) -> None:
        with self._client.events(self._path) as events:
            for event in events:
                if event.name == "snapshot":
                    self._had_snapshot = True
                    self._queue.put(Notice(""))
                self._queue.put(Event(event.name, event.json()))
