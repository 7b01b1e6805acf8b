"""Failures of the Messages API as its official client sees them: before a stream, in the middle of one, at limits; and
clients that go away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from llmbackend.core.errors import invalid_argument
from llmbackend.frontends.anthropic.answers import error_event, error_response
from llmbackend.frontends.http.errors import OpenAIError
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.limits import InferenceLimits
from tests.helpers.fake_llm_server import FAILED, MODEL, REASON, FakeLlmServer
from tests.helpers.openai_live_server import serve_openai
from tests.helpers.waiting import eventually

BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def server() -> FakeLlmServer:
    return FakeLlmServer()


@pytest.fixture(scope="module")
def base(server: FakeLlmServer) -> Iterator[str]:
    gate: Any = InferenceGate(server, InferenceLimits(max_concurrent_requests=1))  # type: ignore[arg-type]
    with serve_openai(server, max_body_bytes=20_000, gate=gate) as base:
        yield base
    gate.close()


@pytest.fixture(scope="module")
def client(base: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0) as client:
        client.models.list()  # its libraries open a pipe once and for all
        yield client


def says(text: str) -> dict[str, Any]:
    return BODY | {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "kind", "type_", "text"),
    [
        (says("overloaded"), anthropic.OverloadedError, "overloaded_error", "maximum queue size"),
        (BODY | {"model": "young"}, anthropic.OverloadedError, "overloaded_error", "not ready"),
        (BODY | {"model": FAILED}, anthropic.OverloadedError, "overloaded_error", REASON),
        (
            says("too long"),
            anthropic.BadRequestError,
            "invalid_request_error",
            "prompt is too long: 99999 tokens > 2047 maximum",
        ),
        (says("x" * 30_000), anthropic.RequestTooLargeError, "request_too_large", "20000 bytes"),
    ],
)
def test_a_failure_before_the_answer(
    client: anthropic.Anthropic, body: dict[str, Any], kind: Any, type_: str, text: str, stream: bool
) -> None:
    with pytest.raises(kind) as raised:
        client.messages.create(**body, stream=stream)
    error: Any = raised.value.body
    assert error["error"]["type"] == type_ and text in error["error"]["message"]
    assert error["request_id"] == raised.value.response.headers["request-id"]
    assert ("retry-after" in raised.value.response.headers) == (type_ == "overloaded_error")


CLAUDE_CODES_PATTERN = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)
"""At an error with this text, Claude Code compacts the conversation."""


@pytest.mark.parametrize(
    ("message", "tokens", "most"),
    [
        ("the prompt has 5000 tokens, expected at most 4095: this model's maximum context length is 4096", 5000, 4095),
        ("the prompt has 5000 tokens, expected at most 4000 (max_prompt_tokens)", 5000, 4000),
        ("the prompt has 99999 characters, expected at most 9: this model's maximum context length is 16", 17, 16),
        ("input 'messages' has 99 messages, expected at most 16: this model's maximum context length is 16", 17, 16),
        ("The prompt is longer than the maximum model length of 64", 65, 64),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words(message: str, tokens: int, most: int) -> None:
    error = OpenAIError.of(invalid_argument(message))
    for body in (error_response(error, "req_1").body, error_event(error, "req_1")):
        found = CLAUDE_CODES_PATTERN.search(bytes(body).decode())
        assert found is not None and (int(found[1]), int(found[2])) == (tokens, most)


def test_a_failure_in_mid_stream_is_the_last_event(client: anthropic.Anthropic) -> None:
    texts: list[str] = []
    failing = pytest.raises(anthropic.APIStatusError, match="the engine died")
    with failing, client.messages.stream(**says("fail late")) as stream:
        texts.extend(stream.text_stream)
    assert "".join(texts) == "You"


def test_the_servers_limit_is_a_rate_limit(client: anthropic.Anthropic, server: FakeLlmServer) -> None:
    with client.messages.stream(**says("forever")) as stream:
        assert next(iter(stream)).type == "message_start"
        with pytest.raises(anthropic.RateLimitError, match="limit of 1 concurrent"):
            client.messages.create(**BODY)
    eventually(server.handles[-1].over.is_set)
    assert server.handles[-1].cancelled.is_set()


def test_a_client_that_goes_away_cancels_its_request(base: str, server: FakeLlmServer) -> None:
    with httpx.Client(base_url=base, timeout=0.5) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/messages", json=says("forever"))
    eventually(lambda: server.handles[-1].over.is_set())
    assert server.handles[-1].cancelled.is_set()
