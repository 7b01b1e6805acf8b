"""Streams that a client can come back to, over real connections that are cut at every event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.access.keyed_server import KeyedServer
from llmbackend.frontends.access.settings import AccessSettings
from llmbackend.frontends.journals import resumable_streams
from llmbackend.frontends.journals.idempotency import IdempotentRequests
from llmbackend.frontends.journals.kept_answers import KeptAnswers
from llmbackend.frontends.journals.resumable_streams import ResumableStreams
from llmbackend.frontends.journals.store_settings import IdempotencyLimits
from tests.helpers.held_answers import num_answers, num_streams
from tests.helpers.kserve_runner import Running
from tests.helpers.mock_llm_host import MODEL, mock_llm_host
from tests.helpers.waiting import eventually

GENERATE = f"/v2/models/{MODEL}/generate_stream"
COMPLETIONS = "/v1/completions"
ASK = {"X-Resumable-Stream": "true"}
TOKENS = 12
SAMPLING = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}


def body(path: str, **sampling: Any) -> dict[str, Any]:
    sampling = SAMPLING | sampling
    if path == GENERATE:
        return {"text_input": "one two three", "stream": True, "sampling_parameters": json.dumps(sampling)}
    return {"model": MODEL, "prompt": "one two three", "stream": True, **sampling}


KEYS = "one:sk-one\ntwo:sk-two\n"
GRACE_S = 0.2
Event = tuple[str, str]
"""(id, data)"""


HOST_OPTIONS = {"start": mock_llm_host, "engine": {"mock_step_ms": 1}}


@pytest.fixture(autouse=True)
def no_inference_is_left(running: Running) -> Iterator[None]:
    yield
    eventually(lambda: not running.gate.open_inferences)


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Running]:
    """Streams end soon after their client has gone, and would go on for long."""
    streams = ResumableStreams(KeptAnswers(GRACE_S))
    with Running(tmp_path, start=mock_llm_host, streams=streams, engine={"mock_step_ms": 20}) as running:
        yield running


def events(response: httpx.Response) -> Iterator[Event]:
    id = ""
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            id = value
        elif name == "data":
            yield id, value
            id = ""


def begin(http: httpx.Client, path: str, at_most: int | None = None, **sampling: Any) -> tuple[str, list[Event]]:
    """The stream's id, and its first events; the connection is closed behind them."""
    found: list[Event] = []
    with http.stream("POST", path, json=body(path, **sampling), headers=ASK) as response:
        assert response.status_code == 200
        if at_most != 0:
            for event in events(response):
                found.append(event)
                if len(found) == at_most:
                    break
        return response.headers["x-stream-id"], found


def resume_stream(http: httpx.Client, path: str, last: str, at_most: int | None = None) -> list[Event]:
    found: list[Event] = []
    with http.stream("POST", path, json=body(path), headers={"Last-Event-ID": last}) as response:
        assert response.status_code == 200, response.read()
        for event in events(response):
            found.append(event)
            if len(found) == at_most:
                break
    return found


def said(found: list[Event]) -> list[Any]:
    """What does not differ from one request to the next."""
    datas: list[dict[str, Any]] = [json.loads(data) for _, data in found if data != "[DONE]"]
    return [{name: value for name, value in data.items() if name not in ("id", "created")} for data in datas]


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
def test_a_client_that_is_cut_off_at_any_event_gets_every_event_once(http: httpx.Client, path: str) -> None:
    _, whole = begin(http, path)
    plain = http.post(path, json=body(path))
    assert "x-stream-id" not in plain.headers and "id: " not in plain.text
    assert said([("", line[6:]) for line in plain.text.splitlines() if line.startswith("data: ")]) == said(whole)
    assert len(whole) >= TOKENS
    for cut in range(len(whole)):
        stream, first = begin(http, path, cut)
        assert [id for id, _ in first] == [f"{stream}:{number}" for number in range(cut)]
        last = first[-1][0] if first else stream
        rest = resume_stream(http, path, last)
        assert [id for id, _ in rest] == [f"{stream}:{number}" for number in range(cut, len(whole))]
        assert said(first + rest) == said(whole)
        assert resume_stream(http, path, last) == rest


def test_a_client_that_is_cut_off_at_every_event(http: httpx.Client) -> None:
    _, whole = begin(http, COMPLETIONS)
    stream, found = begin(http, COMPLETIONS, 1)
    while len(found) < len(whole):
        found += resume_stream(http, COMPLETIONS, found[-1][0], 1)
    assert said(found) == said(whole)
    assert resume_stream(http, COMPLETIONS, found[-1][0]) == []
    assert {id.partition(":")[0] for id, _ in found} == {stream}


def test_several_readers_at_once(running: Running, http: httpx.Client) -> None:
    stream, first = begin(http, COMPLETIONS, 1, max_tokens=60)
    with httpx.Client(base_url=f"http://{running.http}", timeout=20) as other:
        assert resume_stream(other, COMPLETIONS, stream) == first + resume_stream(http, COMPLETIONS, first[-1][0])


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
@pytest.mark.parametrize(
    ("header", "value", "status", "message"),
    [
        ("Last-Event-ID", "17", 400, "the header 'Last-Event-ID' is '17', expected the id of an event"),
        ("Last-Event-ID", "a" * 32 + ":5", 404, f"there is no stream '{'a' * 32}', or it is no longer available"),
        ("X-Resumable-Stream", "yes", 400, "the header 'X-Resumable-Stream' is 'yes', expected true or false"),
    ],
)
def test_headers_that_are_wrong(
    http: httpx.Client, path: str, header: str, value: str, status: int, message: str
) -> None:
    response = http.post(path, json=body(path), headers={header: value})
    assert (response.status_code, message in response.text) == (status, True), response.text


def test_a_stream_is_come_back_to_at_its_own_endpoint_behind_an_event_that_it_has(http: httpx.Client) -> None:
    stream, whole = begin(http, COMPLETIONS)
    for path, last, status in ((GENERATE, stream, 404), (COMPLETIONS, f"{stream}:{len(whole)}", 400)):
        response = http.post(path, json=body(path), headers={"Last-Event-ID": last})
        assert response.status_code == status
    response = http.post(COMPLETIONS, json=body(COMPLETIONS) | {"stream": False}, headers=ASK)
    assert response.status_code == 400 and "requires 'stream': true" in response.text


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
def test_a_stream_without_a_client_is_cancelled_after_its_grace(hasty: Running, path: str) -> None:
    with httpx.Client(base_url=f"http://{hasty.http}", timeout=20) as http:
        stream, _ = begin(http, path, 1, max_tokens=200)
        assert hasty.gate.open_inferences == 1
        eventually(lambda: not hasty.gate.open_inferences)
        hasty.wait_until_nothing_is_open()
        response = http.post(path, json=body(path), headers={"Last-Event-ID": stream})
        assert (response.status_code, "no longer available" in response.text) == (404, True)
    assert not num_streams(hasty.streams)


def test_a_stream_is_its_keys_alone(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    access = AccessControl(AccessSettings(api_key_file=tmp_path / "keys"))
    with (
        Running(tmp_path, start=mock_llm_host, access=access) as running,
        httpx.Client(base_url=f"http://{running.http}", headers={"Authorization": "Bearer sk-one"}) as http,
    ):
        stream, found = begin(http, COMPLETIONS)
        assert resume_stream(http, COMPLETIONS, stream) == found
        theirs = {"Last-Event-ID": stream, "Authorization": "Bearer sk-two"}
        assert http.post(COMPLETIONS, json=body(COMPLETIONS), headers=theirs).status_code == 404


def test_what_streams_and_retried_requests_hold_is_bounded_together(tmp_path: Path) -> None:
    kept = KeptAnswers(5, max_bytes=30_000)
    streams, idempotent = ResumableStreams(kept), IdempotentRequests(IdempotencyLimits(), kept)
    with (
        Running(
            tmp_path, start=mock_llm_host, streams=streams, idempotent=idempotent, engine={"mock_step_ms": 5}
        ) as running,
        httpx.Client(base_url=f"http://{running.http}", timeout=20) as http,
    ):
        for key in ("one", "two"):
            asked = body(COMPLETIONS, max_tokens=80, stream=False)
            assert http.post(COMPLETIONS, json=asked, headers={"Idempotency-Key": key}).status_code == 200
        begin(http, COMPLETIONS, max_tokens=100)
        assert kept.held_bytes > 15_000 and num_answers(idempotent) == 2
        stream, _ = begin(http, COMPLETIONS, 1, max_tokens=200)  # what had ended makes room for it
        eventually(lambda: kept.held_bytes > 28_200 and num_streams(streams) == 1)
        for headers in (ASK, {"Idempotency-Key": "three"}):
            refused = http.post(COMPLETIONS, json=body(COMPLETIONS), headers=headers)
            assert refused.status_code in (429, 503) and "other retained answers hold" in refused.text
        eventually(lambda: not running.gate.open_inferences)
        assert not num_answers(idempotent) and kept.held_bytes <= 30_000
        gone = http.post(COMPLETIONS, json=body(COMPLETIONS), headers={"Last-Event-ID": stream})
        assert (gone.status_code, "are no longer available" in gone.text) == (404, True)


def test_a_reader_that_is_too_far_behind_is_told_so(
    running: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable_streams, "MAX_STREAM_BYTES", 1000)
    stream, _ = begin(http, COMPLETIONS, 1)
    eventually(lambda: not running.gate.open_inferences)
    response = http.post(COMPLETIONS, json=body(COMPLETIONS), headers={"Last-Event-ID": stream})
    assert (response.status_code, "are no longer available" in response.text) == (404, True)
    assert resume_stream(http, COMPLETIONS, f"{stream}:{TOKENS - 1}")[-1][1] == "[DONE]"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("headers", [ASK, {"Last-Event-ID": "a" * 32}])
def test_endpoints_that_can_not_refuse_it_by_name(http: httpx.Client, path: str, headers: dict[str, str]) -> None:
    response = http.post(path, json={"model": MODEL, "input": "x", "stream": True}, headers=headers)
    assert (response.status_code, f"a stream of {path} cannot" in response.text) == (400, True), response.text


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
def test_a_key_at_its_limit_gets_the_rest_of_its_stream(tmp_path: Path, path: str) -> None:
    (tmp_path / "keys").write_text("one:sk-one tpm=5\n")
    access = AccessControl(AccessSettings(api_key_file=tmp_path / "keys"))
    with (
        Running(tmp_path, start=mock_llm_host, access=access, kind=KeyedServer) as running,
        httpx.Client(base_url=f"http://{running.http}", headers={"Authorization": "Bearer sk-one"}) as http,
    ):
        stream, found = begin(http, path, 1)
        eventually(lambda: not running.gate.open_inferences)
        for last, status in (("", 429), ("a" * 32, 404)):
            assert http.post(path, json=body(path), headers={"Last-Event-ID": last}).status_code == status
        found += resume_stream(http, path, found[-1][0])
    assert [id for id, _ in found] == [f"{stream}:{number}" for number in range(len(found))]
    assert len(found) >= TOKENS
