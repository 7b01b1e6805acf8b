"""Requests with an `Idempotency-Key`, over real connections: retried, joined, cut off, and used for something else."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from llmbackend.core.lifecycle.model_lifecycle import CUT_REASON, cut_off
from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.access.api_keys import ApiKey, digest_of
from llmbackend.frontends.access.rate_limit import NO_LIMITS
from llmbackend.frontends.access.settings import AccessSettings
from llmbackend.frontends.http.request_scope import PRESENCE, ClientPresence
from llmbackend.frontends.journals.idempotency import IdempotentRequests
from llmbackend.frontends.journals.kept_answers import KeptAnswers
from llmbackend.frontends.journals.store_settings import IdempotencyLimits
from tests.helpers.held_answers import num_answers
from tests.helpers.kserve_runner import Running
from tests.helpers.mock_llm_host import MODEL, mock_llm_host
from tests.helpers.waiting import eventually

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
GENERATE, STREAM = f"/v2/models/{MODEL}/generate", f"/v2/models/{MODEL}/generate_stream"
TOKENS = 12


def body(path: str, tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    """A request whose answer is another one each time: without a seed."""
    if path.startswith("/v2"):
        letters = list(range(97, 123))
        sampling = json.dumps({"temperature": 1, "allowed_token_ids": letters, "max_tokens": tokens})
        return {"text_input": "one", "stream": path == STREAM, "sampling_parameters": sampling} | more
    asked = {"prompt": "one"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "one"}]}
    extra = {} if path == MESSAGES else {"ignore_eos": True, "temperature": 1}
    return {"model": MODEL, "max_tokens": tokens, **asked, **extra, **more}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("models"), start=mock_llm_host, engine={"mock_step_ms": 4})
    httpx.post(f"http://{running.http}{GENERATE}", json=body(GENERATE))  # starts the thread that computes masks
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def no_inference_is_left(running: Running) -> Iterator[None]:
    yield
    eventually(lambda: not running.gate.open_inferences)


@pytest.fixture
def client(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{running.http}", timeout=30) as client:
        yield client


def post(client: httpx.Client, path: str, key: str, json: Any = None, **headers: str) -> httpx.Response:
    return client.post(path, json=json or body(path), headers={"Idempotency-Key": key} | headers)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, GENERATE, STREAM])
@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_gets_the_same_answer(client: httpx.Client, path: str, stream: bool) -> None:
    more = {"stream": True} if stream and path.startswith("/v1") else {}
    key = f"retry {path} {stream}"
    first, second = (post(client, path, key, body(path, **more)) for _ in range(2))
    assert first.status_code == 200 and len(first.content) > 20
    assert second.content == first.content
    assert "idempotent-replayed" not in first.headers and second.headers["idempotent-replayed"] == "true"
    assert second.headers["content-type"] == first.headers["content-type"]
    assert post(client, path, f"{key} another", body(path, **more)).content != first.content


def test_requests_with_one_key_at_the_same_time_are_one(running: Running, client: httpx.Client) -> None:
    most = 0

    def one(_: int) -> bytes:
        nonlocal most
        headers = {"Idempotency-Key": "together"}
        with (
            httpx.Client(base_url=f"http://{running.http}", timeout=30) as own,
            own.stream("POST", STREAM, json=body(STREAM), headers=headers) as response,
        ):
            most = max(most, running.gate.open_inferences)
            return response.read()

    with ThreadPoolExecutor(6) as threads:
        answers = set(threads.map(one, range(6)))
    assert len(answers) == 1 and answers.pop().count(b"data: ") >= TOKENS
    assert most == 1


@pytest.mark.parametrize("path", [COMPLETIONS, STREAM])
def test_a_request_goes_on_without_its_client_and_a_retry_joins_it(
    running: Running, client: httpx.Client, path: str
) -> None:
    asked = body(path, 60)
    headers = {"Idempotency-Key": f"cut {path}"}
    with httpx.Client(base_url=f"http://{running.http}", timeout=0.05 if path == COMPLETIONS else 30) as hasty:
        if path == COMPLETIONS:
            with pytest.raises(httpx.ReadTimeout):
                hasty.post(path, json=asked, headers=headers)
        else:
            with hasty.stream("POST", path, json=asked, headers=headers) as response:
                next(response.iter_lines())
    eventually(lambda: running.gate.open_inferences == 1)
    whole = post(client, path, f"cut {path}", asked)
    assert whole.status_code == 200 and whole.headers["idempotent-replayed"] == "true"
    assert post(client, path, f"cut {path}", asked).content == whole.content


def test_a_request_that_nobody_comes_back_to_is_cancelled(tmp_path: Path) -> None:
    with Running(
        tmp_path, start=mock_llm_host, idempotent=IdempotentRequests(IdempotencyLimits(), KeptAnswers(0.1)),
        engine={"mock_step_ms": 20},
    ) as running:  # fmt: skip
        with httpx.Client(base_url=f"http://{running.http}", timeout=30) as client:
            asked = body(COMPLETIONS, 200, stream=True)
            with client.stream("POST", COMPLETIONS, json=asked, headers={"Idempotency-Key": "left"}) as response:
                next(response.iter_lines())
        eventually(lambda: not running.gate.open_inferences)
        eventually(lambda: not num_answers(running.idempotent))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, GENERATE])
def test_another_request_with_the_key_is_refused(client: httpx.Client, path: str) -> None:
    key = f"reused {path}"
    assert post(client, path, key).status_code == 200
    for other in (body(path, 3), body(path, TOKENS, user="longer than it was")):
        refused = post(client, path, key, other)
        assert refused.status_code == 422, refused.text
        assert f"the key '{key}' of the header 'Idempotency-Key' was used with another request" in refused.text
        error = refused.json()["error"]
        assert isinstance(error, str) or error["type"] == "invalid_request_error"
    assert post(client, path, key).headers["idempotent-replayed"] == "true"


def test_another_path_is_another_request(client: httpx.Client) -> None:
    assert post(client, CHAT, "path").status_code == 200
    assert post(client, MESSAGES, "path").status_code == 422


def test_an_answer_that_came_before_the_body_is_not_kept(client: httpx.Client) -> None:
    for _ in range(2):
        refused = post(client, f"/v2/models/{MODEL}/infer", "decoupled", {"inputs": []})
        assert refused.status_code == 501 and "decoupled" in refused.text


def test_a_refusal_is_not_kept(client: httpx.Client) -> None:
    wrong = body(COMPLETIONS, max_tokens=-5)
    for _ in range(2):
        refused = post(client, COMPLETIONS, "mended", wrong)
        assert refused.status_code == 400 and "idempotent-replayed" not in refused.headers
    assert post(client, COMPLETIONS, "mended").status_code == 200


@pytest.mark.parametrize("resumable", ["false", "true"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, STREAM])
def test_a_stream_that_ends_with_an_error_is_not_kept(
    running: Running, client: httpx.Client, path: str, resumable: str
) -> None:
    more = {"stream": True} if path.startswith("/v1") else {}
    key = f"failing {path} {resumable}"
    headers = {"Idempotency-Key": key} | ({} if path == MESSAGES else {"X-Resumable-Stream": resumable})
    with client.stream("POST", path, json=body(path, 100, **more), headers=headers) as first:
        pieces = first.iter_raw()
        begin = next(pieces)
        cut_off(running.gate.server._versions.ready_models())  # type: ignore[attr-defined]
        assert first.status_code == 200 and CUT_REASON.encode() in begin + b"".join(pieces)
    again = post(client, path, key, body(path, 100, **more))
    assert "idempotent-replayed" not in again.headers and CUT_REASON not in again.text


@pytest.mark.parametrize("key", ["", "k" * 256, "a\tb"])
def test_a_key_that_is_none_is_refused(client: httpx.Client, key: str) -> None:
    refused = post(client, COMPLETIONS, key)
    assert refused.status_code == 400 and "expected 1 to 255, printable" in refused.text


def test_other_endpoints_pass_the_header_over(running: Running, client: httpx.Client) -> None:
    before = num_answers(running.idempotent)
    for _ in range(2):
        assert client.post(
            "/tokenize", json={"model": MODEL, "prompt": "a"}, headers={"Idempotency-Key": "t"}
        ).is_success
    assert num_answers(running.idempotent) == before


def test_what_is_kept_is_bounded(tmp_path: Path) -> None:
    limits = IdempotencyLimits(ttl_s=0.5, max_answers=2, max_bytes=1200)
    with (
        Running(tmp_path, start=mock_llm_host, idempotent=IdempotentRequests(limits, KeptAnswers(5))) as running,
        httpx.Client(base_url=f"http://{running.http}", timeout=30) as client,
    ):
        for number in range(4):
            assert post(client, COMPLETIONS, f"bounded {number}").status_code == 200
            assert num_answers(running.idempotent) <= 2
        assert post(client, COMPLETIONS, "bounded 3").headers["idempotent-replayed"] == "true"
        large = post(client, STREAM, "bounded bytes", body(STREAM, 30))
        assert len(large.content) > limits.max_bytes
        assert "idempotent-replayed" not in post(client, STREAM, "bounded bytes", body(STREAM, 30)).headers
        eventually(lambda: not num_answers(running.idempotent))


def test_a_stream_too_large_to_be_kept_is_sent_once(tmp_path: Path) -> None:
    limits = IdempotencyLimits(max_answer_bytes=500)
    idempotent = IdempotentRequests(limits, KeptAnswers(5))
    with (
        Running(tmp_path, start=mock_llm_host, idempotent=idempotent, engine={"mock_step_ms": 2}) as running,
        httpx.Client(base_url=f"http://{running.http}", timeout=30) as client,
    ):
        assert post(client, STREAM, "large", body(STREAM, 40)).content.count(b"data: ") >= 40
        again = post(client, STREAM, "large", body(STREAM, 40))
        assert again.status_code == 409 and "too large to retain" in again.text


async def test_an_answer_in_many_pieces_reaches_its_client_whatever_may_be_kept() -> None:
    pieces = [b"%02d" % number * 50 for number in range(30)]
    sent: list[Message] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        assert not (await receive())["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (*pieces, b""):
            await send({"type": "http.response.body", "body": piece, "more_body": bool(piece)})

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)
        await asyncio.sleep(0)

    headers = [(b"idempotency-key", b"one")]
    scope = {"type": "http", "method": "POST", "path": f"/v2/models/{MODEL}/infer", "headers": headers}
    idempotent = IdempotentRequests(IdempotencyLimits(max_answer_bytes=1000), KeptAnswers(5))
    await idempotent.serve(application, scope | {PRESENCE: ClientPresence()}, receive, send)
    assert sent[0]["status"] == 200
    assert b"".join(message["body"] for message in sent[1:]) == b"".join(pieces)
    await idempotent.close()


def test_keys_of_tenants_are_their_own(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one:sk-one\ntwo:sk-two\n")
    keys.chmod(0o600)
    access = AccessControl(AccessSettings(api_key_file=keys))
    with Running(tmp_path / "models", start=mock_llm_host, access=access) as running:
        with httpx.Client(base_url=f"http://{running.http}", timeout=30) as client:
            answers = [
                post(client, COMPLETIONS, "same", Authorization=f"Bearer sk-{name}") for name in ("one", "two", "one")
            ]
        assert answers[0].content == answers[2].content != answers[1].content
        owners = [ApiKey(name, digest_of(f"sk-{name}"), NO_LIMITS).owner for name in ("one", "two")]
        assert [num_answers(running.idempotent, owner) for owner in owners] == [1, 1]


def test_a_client_that_leaves_while_it_sends_its_body_leaves_the_key_free(
    running: Running, client: httpx.Client
) -> None:
    begun = threading.Event()

    def halves() -> Iterator[bytes]:
        yield b'{"model":'
        begun.set()
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError), httpx.Client(base_url=f"http://{running.http}", timeout=30) as own:
        own.post(COMPLETIONS, content=halves(),
                 headers={"Idempotency-Key": "half", "content-type": "application/json"})  # fmt: skip
    assert begun.is_set()
    answer = post(client, COMPLETIONS, "half")
    assert answer.status_code == 200 and "idempotent-replayed" not in answer.headers


def test_a_request_does_not_wait_for_a_body_that_does_not_come(running: Running, client: httpx.Client) -> None:
    host, port = running.http.split(":")
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: slow\r\nContent-Type: application/json\r\n"
    )
    asked = client.build_request("POST", COMPLETIONS, json=body(COMPLETIONS)).content
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        slow.sendall(f"{head}Content-Length: {len(asked)}\r\n\r\n".encode() + asked[:5])
        eventually(lambda: num_answers(running.idempotent) and post(client, COMPLETIONS, "slow").status_code == 409)
        assert "is still being sent" in post(client, COMPLETIONS, "slow").json()["error"]["message"]
        slow.sendall(asked[5:])
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert post(client, COMPLETIONS, "slow").headers["idempotent-replayed"] == "true"


def test_what_is_kept_for_all_keys_together_is_bounded(tmp_path: Path) -> None:
    idempotent = IdempotentRequests(IdempotencyLimits(), KeptAnswers(5, max_bytes=1000))
    keys = tmp_path / "keys"
    keys.write_text("one:sk-one\ntwo:sk-two\n")
    keys.chmod(0o600)
    access = AccessControl(AccessSettings(api_key_file=keys))
    with (
        Running(tmp_path / "models", start=mock_llm_host, access=access, idempotent=idempotent) as running,
        httpx.Client(base_url=f"http://{running.http}", timeout=30) as client,
    ):
        one, two = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
        large = post(client, STREAM, "large", body(STREAM, 30), **one)
        assert len(large.content) > 1000
        assert post(client, COMPLETIONS, "small", **two).status_code == 200
        assert "idempotent-replayed" not in post(client, STREAM, "large", body(STREAM, 30), **one).headers
