"""Event streams that are written where their tokens arrive have the bytes of those that the request's task sends."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import orjson
import pytest
from sse_starlette.sse import AppStatus
from starlette.requests import ClientDisconnect, Request

from llmbackend.core.messages import InferenceResponse
from llmbackend.core.outputs import Outputs, layout_of
from llmbackend.frontends.http.direct_body import DirectBody
from llmbackend.frontends.http.event_stream import EventStream, pieces_of
from llmbackend.frontends.http.request_scope import PRESENCE, ClientPresence, unless_disconnected
from llmbackend.frontends.kserve.generate import TextEvents, json_of_response
from tests.helpers.kserve_runner import Running
from tests.helpers.mock_llm_host import MODEL, mock_llm_host
from tests.helpers.waiting import eventually

TOKENS = 12
SAMPLING = {"temperature": 0, "ignore_eos": True}
COMPLETION = {"model": MODEL, "prompt": "one two", "stream": True, "max_tokens": TOKENS, **SAMPLING}
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "one two"}],
    "stream": True,
    "max_tokens": TOKENS,
    **SAMPLING,
}
USAGE = {"stream_options": {"include_usage": True}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate_stream": (
        f"/v2/models/{MODEL}/generate_stream",
        {
            "text_input": "one two",
            "stream": True,
            "id": "mine",
            "sampling_parameters": json.dumps(SAMPLING | {"max_tokens": TOKENS}),
        },
    ),
    "generate_stream, more outputs": (
        f"/v2/models/{MODEL}/generate_stream",
        {
            "text_input": "one two",
            "stream": True,
            "return_num_output_tokens": True,
            "return_finish_reason": True,
            "sampling_parameters": json.dumps(SAMPLING | {"max_tokens": TOKENS}),
        },
    ),
    "completion": ("/v1/completions", COMPLETION),
    "completion, usage": ("/v1/completions", COMPLETION | USAGE),
    "completion, usage with each": (
        "/v1/completions",
        COMPLETION | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "completion, logprobs": ("/v1/completions", COMPLETION | {"logprobs": 2}),
    "completion, echo": ("/v1/completions", COMPLETION | {"echo": True}),
    "completion, echo with logprobs": ("/v1/completions", COMPLETION | {"echo": True, "logprobs": 1}),
    "completion, token ids": ("/v1/completions", COMPLETION | {"return_token_ids": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, usage": ("/v1/chat/completions", CHAT | USAGE),
    "chat, logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    "response": (
        "/v1/responses",
        {"model": MODEL, "input": "one two", "stream": True, "max_output_tokens": TOKENS, "temperature": 0},
    ),
    "message": (
        "/v1/messages",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "one two"}],
            "stream": True,
            "max_tokens": TOKENS,
            "temperature": 0,
        },
    ),
}
SEVERAL = COMPLETION | {"prompt": ["one two", "three"], "n": 2, "seed": 5, "temperature": 1.0}
_DRAWN = re.compile(rb'[0-9a-f]{32}|"(created|created_at|completed_at)":\d+')


HOST_OPTIONS = {"start": mock_llm_host, "engine": {"mock_step_ms": 2}}


@pytest.fixture
def client(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{running.http}", timeout=20) as client:
        yield client
    eventually(lambda: not running.gate.open_inferences)


def answer(client: httpx.Client, path: str, body: dict[str, Any]) -> bytes:
    """The body, without what is drawn for each request."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return _DRAWN.sub(b"", response.content)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What goes straight to connections."""
    pieces: list[bytes] = []
    write = DirectBody.write

    def note(self: DirectBody, piece: bytes) -> None:
        pieces.append(piece)
        write(self, piece)

    monkeypatch.setattr(DirectBody, "write", note)
    return pieces


def through_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DirectBody, "of", classmethod(lambda cls, scope: None))


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_send_the_same_bytes(
    client: httpx.Client, written: list[bytes], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    direct = answer(client, *KINDS[kind])
    assert written  # on a busy machine several tokens come in one piece
    through_the_task(monkeypatch)
    written.clear()
    assert answer(client, *KINDS[kind]) == direct
    assert not written


def test_choices_of_several_prompts_are_the_same_both_ways(
    client: httpx.Client, written: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = choices(answer(client, "/v1/completions", SEVERAL))
    assert written and direct.keys() == {0, 1, 2, 3}
    through_the_task(monkeypatch)
    assert choices(answer(client, "/v1/completions", SEVERAL)) == direct


def choices(body: bytes) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    *events, done, _ = body.split(b"\n\n")
    assert done == b"data: [DONE]"
    for event in events:
        # What was drawn is missing in it, and a comma may be left over.
        (choice,) = json.loads(event[event.index(b'"choices":') + 10 : event.rindex(b"]") + 1])
        found.setdefault(choice["index"], []).append(choice)
    return found


@pytest.mark.parametrize("http_version", ["1.0", "1.1"])
def test_a_connection_is_kept_or_closed_as_its_client_asks(
    running: Running, written: list[bytes], http_version: str
) -> None:
    async def exchange() -> bytes:
        host, port = running.http.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = orjson.dumps(COMPLETION)
        for connection in ("keep-alive", "close"):
            head = f"POST /v1/completions HTTP/{http_version}\r\nHost: localhost\r\nConnection: {connection}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            if http_version == "1.0":
                break
        received = await reader.read()
        writer.close()
        return received

    received = asyncio.run(exchange())
    if http_version == "1.0":  # which knows no chunks
        assert received.endswith(b"data: [DONE]\n\n") and not written
    else:
        assert written and received.count(b"data: [DONE]") == received.count(b"\r\n0\r\n\r\n") == 2


class Source:
    """An EventSource by hand."""

    def __init__(self) -> None:
        self.quiet_s: float | None = None
        self.is_over = False
        self.needs_task = False
        self.waiting: list[bytes] = []
        self.tell: Callable[[], None] = lambda: None

    def listen(self, listener: Callable[[], None]) -> None:
        self.tell = listener

    def ready(self) -> bytes:
        waiting, self.waiting = self.waiting, []
        return b"".join(waiting)

    async def awaited(self) -> bytes:
        raise AssertionError("nothing has to be awaited")

    def ping(self) -> bytes:
        return b": ping\n\n"

    def add(self, event: bytes) -> None:
        self.waiting.append(event)
        self.tell()


class Client:
    """A connection as a stream sees it."""

    def __init__(self) -> None:
        self.is_open = True
        self.direct: list[bytes] = []
        self.sent: list[bytes] = []
        self.may_send = asyncio.Event()
        self.may_send.set()

    def write(self, piece: bytes) -> None:
        assert self.is_open
        self.direct.append(piece)

    async def send(self, message: Any) -> None:
        await self.may_send.wait()
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])


async def no_message() -> Any:
    raise AssertionError("the connection tells of itself")


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def by_hand(script: Callable[[Source, Client, ClientPresence], Any]) -> tuple[Source, Client, list[bool]]:
    """Runs a stream whose source and client are in the hands of `script`."""
    closed: list[bool] = []

    async def run() -> tuple[Source, Client]:
        source, client, presence = Source(), Client(), ClientPresence()
        stream = EventStream(pieces_of(source, client), {}, on_close=lambda: closed.append(True))  # type: ignore[arg-type]
        scope = {"type": "http", "method": "POST", PRESENCE: presence}
        task = asyncio.create_task(stream(scope, no_message, client.send))
        await settle()
        await script(source, client, presence)
        await asyncio.wait_for(task, 10)
        return source, client

    return *asyncio.run(run()), closed


def test_nothing_is_written_past_a_client_that_is_behind() -> None:
    async def script(source: Source, client: Client, presence: ClientPresence) -> None:
        source.add(b"1")
        client.is_open = False
        client.may_send.clear()
        source.add(b"2")
        await settle()
        client.is_open = True  # while the task still sends the second one
        source.add(b"3")
        source.add(b"4")
        await settle()
        assert (client.direct, client.sent, source.waiting) == ([b"1"], [], [b"3", b"4"])
        client.may_send.set()
        await settle()
        source.add(b"5")
        source.is_over = True
        source.add(b"6")

    _, client, closed = by_hand(script)
    assert (client.direct, client.sent, closed) == ([b"1", b"5"], [b"2", b"34", b"6", b""], [True])


def test_a_stream_ends_at_once_when_its_client_is_gone() -> None:
    async def script(source: Source, client: Client, presence: ClientPresence) -> None:
        source.add(b"1")
        presence.lost()

    source, client, closed = by_hand(script)
    assert (client.direct, client.sent, closed) == ([b"1"], [], [True])
    source.add(b"2")  # nobody listens any more
    assert client.direct == [b"1"]


def test_only_a_stream_that_is_quiet_pings() -> None:
    async def script(source: Source, client: Client, presence: ClientPresence) -> None:
        while not client.sent:
            await asyncio.sleep(0.001)
        assert client.sent[0] == b": ping\n\n"
        source.is_over = True
        source.add(b"1")

    class Quiet(Source):
        def __init__(self) -> None:
            super().__init__()
            self.quiet_s = 0.01

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "Source", Quiet)
        _, client, closed = by_hand(script)
    assert (client.direct, client.sent[-1], closed) == ([], b"", [True])


def test_an_open_stream_goes_on_while_the_server_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    """sse-starlette would end it."""
    monkeypatch.setattr(AppStatus, "should_exit", True)

    async def script(source: Source, client: Client, presence: ClientPresence) -> None:
        source.add(b"1")
        await asyncio.sleep(0.05)
        source.is_over = True
        source.add(b"2")

    _, client, closed = by_hand(script)
    assert (client.direct, client.sent, closed) == ([b"1"], [b"2", b""], [True])


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (("text_output",), ('a " \\ \n \u00e9 \U0001f600',)),
        (("text_output", "finish_reason"), ("", "stop")),
        (("zz", "aa", "model_name"), ("last", "first", "in place of the name")),
        ((), ()),
    ],
)
@pytest.mark.parametrize("request_id", ["", 'an "id"'])
def test_an_event_of_texts_is_the_json_of_the_response(
    names: tuple[str, ...], values: tuple[str, ...], request_id: str
) -> None:
    layout = layout_of(names, ("BYTES",) * len(names))
    response = InferenceResponse("a model", 3, request_id, Outputs(layout, values))
    assert TextEvents(response, layout).event(values) == b"data: %b\n\n" % json_of_response(response)


@pytest.mark.parametrize("how", ["ends", "client", "server", "gone before"])
def test_work_ends_with_its_client_or_with_its_request(how: str) -> None:
    seen: list[str] = []

    async def work() -> str:
        try:
            await asyncio.sleep(0 if how == "ends" else 60)
        except asyncio.CancelledError:
            seen.append("cut short")
            raise
        return "done"

    async def handle(http: Request) -> str:
        try:
            return await unless_disconnected(http, work())
        except ClientDisconnect:
            await asyncio.sleep(0)  # nothing of the cancellation is left
            return "disconnected"

    async def run() -> str:
        presence = ClientPresence()
        if how == "gone before":
            presence.lost()
        task = asyncio.create_task(handle(Request({"type": "http", PRESENCE: presence})))
        await settle()
        if how == "client":
            presence.lost()
        if how == "server":
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            return "cancelled"

    expected = {"ends": "done", "client": "disconnected", "server": "cancelled", "gone before": "disconnected"}
    assert asyncio.run(run()) == expected[how]
    assert seen == (["cut short"] if how in ("client", "server") else [])
