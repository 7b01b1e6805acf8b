"""Strange requests to each endpoint: an answer in the right shape, no 5xx of ours, no traceback."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from trials.fuzz import examples
from trials.fuzz.app_under_test import AppUnderTest
from trials.fuzz.exchange import HttpInput, complaint
from trials.fuzz.http_inputs import DECOUPLED, HTTP_INPUTS, WHOLE
from trials.fuzz.inputs import as_json

PER_TARGET = settings(suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("target", HTTP_INPUTS)
def test_strange_requests(target: str, app: AppUnderTest) -> None:
    @PER_TARGET
    @given(HTTP_INPUTS[target])
    def run(request: HttpInput) -> None:
        answer, tracebacks = app.send(request)
        assert complaint(request, answer) == "", f"{request.method} {request.path} {request.body[:300]!r}"
        assert not tracebacks

    run()
    app.send(HttpInput("/v2/repository/models/scratch/unload", b""))


VALID = [
    *[("/v1/chat/completions", body) for body in examples.CHAT],
    *[("/v1/completions", body) for body in examples.COMPLETION],
    *[("/v1/responses", body) for body in examples.RESPONSES],
    *[("/v1/responses/input_tokens", body) for body in examples.INPUT_TOKENS],
    *[("/v1/conversations", body) for body in examples.CONVERSATIONS_MADE],
    *[("/v1/messages", body) for body in examples.MESSAGES],
    *[("/v1/messages/count_tokens", body) for body in examples.COUNT_TOKENS],
    *[("/tokenize", body) for body in examples.TOKENIZE],
    *[("/detokenize", body) for body in examples.DETOKENIZE],
    *[(f"/v2/models/{DECOUPLED}/generate_stream", body) for body in examples.GENERATE],
    *[(f"/v2/models/{WHOLE}/infer", body) for body in examples.INFER],
]


@pytest.mark.parametrize(("path", "body"), VALID)
def test_the_examples_are_valid(path: str, body: object, app: AppUnderTest) -> None:
    answer, tracebacks = app.send(HttpInput(path, as_json(body)))
    assert (answer.status, tracebacks) == (200, []), answer.body
