"""An answer over several connections: what is asked for again, and what is kept when there is no more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("nicegui")

from llmbackend.pages.api import ApiError, ServerEvent
from llmbackend.pages.chat import generation as module
from llmbackend.pages.chat.conversation import Turn, UnfinishedAnswer
from llmbackend.pages.chat.generation import Generation

DONE = ServerEvent("message", "[DONE]", "s:9")


def piece(text: str, number: int, finish_reason: str | None = None) -> ServerEvent:
    choice = {"delta": {"content": text}, "finish_reason": finish_reason}
    return ServerEvent("message", json.dumps({"choices": [choice]}), f"s:{number}")


class Connections:
    """The API: each stream is the next of `scripts`, events and at last perhaps an error."""

    def __init__(self, *scripts: list[ServerEvent | ApiError]) -> None:
        self._scripts = iter(scripts)
        self.asked: list[Mapping[str, str]] = []

    async def stream(
        self, method: str, path: str, body: Any, headers: Mapping[str, str]
    ) -> AsyncGenerator[ServerEvent, None]:
        self.asked.append(headers)
        for item in next(self._scripts):
            if isinstance(item, ApiError):
                raise item
            yield item

    async def get(self, path: str) -> Any:
        assert path == "/v2/models/served"
        return {"name": "of the host"}


class Shown:
    """View, client and viewer, of which the generation wants nothing back."""

    key = ""

    def __init__(self, api: Connections) -> None:
        self.api = api

    def grow(self, *_: Any) -> None: ...

    def show_state(self, text: str) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def no_news(key: str, listener: Callable[..., None]) -> Iterator[None]:
        yield

    monkeypatch.setattr(module, "listening", no_news)
    monkeypatch.setattr(module, "_RETRY_EVERY_S", 0.0)


def answer(unfinished: UnfinishedAnswer, *scripts: list[ServerEvent | ApiError]) -> tuple[Turn, Connections]:
    api = Connections(*scripts)
    shown: Any = Shown(api)

    async def run() -> Turn:
        return await Generation(shown, {"model": "adapter"}, unfinished, shown, shown, "served").run()

    return asyncio.run(run()), api


def begun(**fields: Any) -> UnfinishedAnswer:
    return UnfinishedAnswer(key="k", index=1, base=Turn(role="assistant"), **{"turn": Turn(role="assistant")} | fields)


def test_a_stream_that_breaks_off_is_read_on_behind_its_last_event() -> None:
    first: list[ServerEvent | ApiError] = [piece("one ", 0), piece("two ", 1), ApiError(0, "broken")]
    turn, api = answer(begun(), first, [ApiError(503, "starting")], [piece("three", 2, "stop"), DONE])
    assert (turn.content, turn.finish_reason, turn.error) == ("one two three", "stop", "")
    assert api.asked[0] == {"x-resumable-stream": "true", "idempotency-key": "k"}
    assert api.asked[1:] == [{"last-event-id": "s:1"}] * 2


def test_a_stream_that_ends_without_saying_so_is_read_on() -> None:
    turn, api = answer(begun(), [piece("one ", 0)], [piece("two", 1, "stop"), DONE])
    assert (turn.content, len(api.asked)) == ("one two", 2)


def test_a_new_page_reads_the_stream_from_its_beginning() -> None:
    known = begun(turn=Turn(role="assistant", content="one "), stream_id="s")
    turn, api = answer(known, [piece("one ", 0), piece("two", 1, "stop"), DONE])
    assert (turn.content, turn.finish_reason) == ("one two", "stop")
    assert api.asked == [{"last-event-id": "s"}]


def test_what_the_page_before_had_stays_where_the_server_has_lost_the_stream() -> None:
    known = begun(turn=Turn(role="assistant", content="one two"), stream_id="s")
    turn, _ = answer(known, [ApiError(404, "there is no stream 's'")])
    assert (turn.content, turn.finish_reason, turn.error) == ("one two", "interrupted", "")
    assert turn.can_be_continued


def test_a_refusal_is_said_at_once() -> None:
    turn, api = answer(begun(), [ApiError(503, "the queue is full")])
    assert (turn.content, turn.error, len(api.asked)) == ("", "the queue is full", 1)


def test_a_silence_is_not_spoken_each_second() -> None:
    shown: Any = Shown(Connections())
    generation = Generation(shown, {}, begun(), shown, shown, "served")
    texts = {generation._waits_for(second + 0.5) for second in range(60)}
    assert texts == {"…", *(f"No token for more than {limit} s; still connected." for limit in (3, 10, 30))}


def test_a_recovery_is_shown_if_the_engine_is_of_the_hosts_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events have the host's name of the model, not the one by which a chat calls it."""
    listeners: list[Callable[[dict[str, Any]], None]] = []
    states: list[str] = []
    found: dict[str, str] = {}

    @contextmanager
    def listening(key: str, listener: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        listeners.append(listener)
        yield

    class Recovering(Connections):
        async def stream(self, *_: Any) -> AsyncGenerator[ServerEvent, None]:
            yield piece("one ", 0)
            for model in ("adapter", "other", "of the host"):
                listeners[0]({"model": model, "state": "recovering"})
                end = len(states) + 2
                while len(states) < end:
                    await asyncio.sleep(0)
                found[model] = states[-1]
            yield piece("two", 1, "stop")
            yield DONE

    monkeypatch.setattr(module, "listening", listening)
    monkeypatch.setattr(module, "_SHOW_EVERY_S", 0.0)
    monkeypatch.setattr(Shown, "show_state", lambda _, text: states.append(text))
    shown: Any = Shown(Recovering())

    async def run() -> Turn:
        return await Generation(shown, {"model": "adapter"}, begun(), shown, shown, "served").run()

    assert asyncio.run(run()).content == "one two"
    assert {model: "recovering" in state for model, state in found.items()} == {
        "adapter": False,
        "other": False,
        "of the host": True,
    }
