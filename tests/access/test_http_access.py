"""HTTP access control as an ASGI application: what it leaves as it is, and what it writes to the log."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message, Receive, Scope, Send

from llmbackend.frontends.access.access_control import AccessControl, HttpAccess
from llmbackend.frontends.access.api_keys import KeyRing, unnamed_keys
from llmbackend.frontends.access.permissions import NO_RESTRICTIONS
from llmbackend.frontends.access.rate_limit import NO_LIMITS
from llmbackend.frontends.access.request_identity import REQUEST_IDENTITY, AccessMetrics
from llmbackend.frontends.access.settings import NO_ACCESS_CONTROL


def scope(path: str, *headers: tuple[bytes, bytes]) -> Scope:
    return {"type": "http", "method": "POST", "path": path, "query_string": b"secret=1", "headers": list(headers)}


def access(app: Any, log_requests: bool = False) -> HttpAccess:
    keys = KeyRing(unnamed_keys(["right"], NO_LIMITS))
    return HttpAccess(app, keys, NO_RESTRICTIONS, AccessMetrics(CollectorRegistry()), log_requests)


RIGHT = (b"authorization", b"Bearer right")


async def no_body() -> Message:
    raise AssertionError("the body was read")


async def run(app: Any, request: Scope, receive: Receive = no_body) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await app(request, receive, send)
    return sent


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"the answer"})


def test_without_settings_nothing_is_checked() -> None:
    control = AccessControl(NO_ACCESS_CONTROL)
    assert control.wrap_http(answer, CollectorRegistry()) is answer
    assert control.grpc_interceptors(CollectorRegistry()) == ()


async def test_chunks_pass_as_they_come_and_are_the_same_objects() -> None:
    gate, passed = asyncio.Event(), asyncio.Event()
    chunk = {"type": "http.response.body", "body": b"x", "more_body": True}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send(chunk)
        await gate.wait()
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Message) -> None:
        if message is chunk:
            passed.set()

    running = asyncio.create_task(access(app)(scope("/v1/completions", RIGHT), no_body, send))
    await asyncio.wait_for(passed.wait(), 10)
    assert not running.done()
    gate.set()
    await running


@pytest.mark.parametrize(
    "authorization",
    [b"", b"right", b"Basic right", b"Bearer", b"Bearer ", b"Bearer wrong", b"Bearer right right", b"\xff\xfe"],
)
def test_a_refused_request_is_answered_before_its_body_is_read(authorization: bytes) -> None:
    start, body = asyncio.run(run(access(answer), scope("/v1/completions", (b"authorization", authorization))))
    assert start["status"] == 401 and b"invalid_api_key" in body["body"]


def test_the_scheme_is_spelled_in_any_case_and_the_first_header_counts() -> None:
    first = (b"authorization", b"bEaReR right")
    start, _ = asyncio.run(run(access(answer), scope("/v2", first, (b"authorization", b"Bearer wrong"))))
    assert start["status"] == 200


def test_a_request_leaves_no_identity_to_the_next_one_of_its_task() -> None:
    seen: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(REQUEST_IDENTITY.get() is not None)
        await answer(scope, receive, send)

    async def two_requests() -> None:
        await run(access(app), scope("/v1/completions", RIGHT))
        await run(access(app), scope("/v2/health/live"))

    asyncio.run(two_requests())
    assert seen == [True, False]


def test_the_access_log_has_one_line_and_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    request = scope("/v2/models/m\nE0000 forged] line/infer", RIGHT, (b"x-secret", b"secret"))
    asyncio.run(run(access(answer, log_requests=True), request))
    (record,) = caplog.records
    assert record.message.startswith("POST /v2/models/m%0AE0000%20forged%5D%20line/infer 200 key=api-key-1 ")
    assert "secret" not in record.message and "right" not in record.message and "answer" not in record.message


def test_an_application_that_raises_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("bug")

    with pytest.raises(RuntimeError, match="bug"):
        asyncio.run(run(access(broken, log_requests=True), scope("/v2", RIGHT)))
    assert caplog.records[0].message.startswith("POST /v2 - key=api-key-1 ")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (((b"x-api-key", b"right"),), 200),
        (((b"x-api-key", b"wrong"),), 401),
        ((), 401),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v2/models/m/infer"])
def test_a_key_comes_in_either_header(path: str, headers: tuple[tuple[bytes, bytes], ...], status: int) -> None:
    assert asyncio.run(run(access(answer), scope(path, *headers)))[0]["status"] == status


@pytest.mark.parametrize(("path", "wins"), [("/v1/messages", "x-api-key"), ("/v1/chat/completions", "authorization")])
def test_of_two_keys_the_apis_own_counts(path: str, wins: str) -> None:
    for right in ("x-api-key", "authorization"):
        keys = [(name, b"Bearer " * (name == "authorization") + (b"right" if name == right else b"wrong"))
                for name in ("x-api-key", "authorization")]  # fmt: skip
        sent = asyncio.run(run(access(answer), scope(path, *((name.encode(), value) for name, value in keys))))
        assert sent[0]["status"] == (200 if right == wins else 401)


@pytest.mark.parametrize(
    ("path", "headers", "is_anthropic"),
    [
        ("/v1/messages", (), True),
        ("/v1/messages/count_tokens", (), True),
        ("/v1/models", ((b"anthropic-version", b"2023-06-01"),), True),
        ("/v1/models", (), False),
        ("/v1/chat/completions", ((b"anthropic-version", b"2023-06-01"),), False),
        ("/v1/messages_of_others", (), False),
    ],
)
def test_a_refusal_has_the_shape_of_the_clients_api(
    path: str, headers: tuple[tuple[bytes, bytes], ...], is_anthropic: bool
) -> None:
    body = json.loads(asyncio.run(run(access(answer), scope(path, *headers)))[1]["body"])
    if is_anthropic:
        assert body["type"] == "error" and body["error"]["type"] == "authentication_error"
        assert "x-api-key" in body["error"]["message"]
    else:
        assert body["error"]["code"] == "invalid_api_key"
