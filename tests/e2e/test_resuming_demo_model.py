"""The bundled model: requests that go on in another host give what one that was left alone gives, logprobs too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llmbackend.core.messages import Resume
from tests.helpers.llm_host import Call, LlmHost, llm_host
from tests.helpers.resumed_calls import assert_goes_on, deltas
from tests.helpers.server_process import ROOT

pytestmark = pytest.mark.slow
REQUESTS: dict[str, dict[str, Any]] = {
    "unseeded": {"temperature": 1.0, "logprobs": 3, "max_tokens": 24, "prompt_logprobs": 2},
    "greedy": {"temperature": 0, "max_tokens": 30, "min_tokens": 10, "repetition_penalty": 1.2},
    "schema": {"temperature": 1.0, "max_tokens": 40, "structured_outputs": {
        "json": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["one", "two"]}},
                 "required": ["a", "b"], "additionalProperties": False}}},
    "choices": {"temperature": 1.0, "max_tokens": 12, "n": 3, "stop": ["e"]},
}  # fmt: skip
FLAGS = {f"return_{name}": True for name in (
    "output_ids", "logprobs", "finish_reason", "cumulative_logprob", "num_output_tokens", "num_cached_tokens",
)}  # fmt: skip


@contextmanager
def demo(repository: Path, **engine: Any) -> Iterator[LlmHost]:
    model = str(ROOT / "model_repository" / "demo" / "1")
    with llm_host(repository, model=model, transport="process", max_model_len=256, num_threads=1, **engine) as host:
        yield host


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LlmHost, LlmHost]]:
    """The second one drafts tokens, and computes prompts in chunks: neither changes what comes."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with (
        demo(tmp_path_factory.mktemp("first")) as first,
        demo(tmp_path_factory.mktemp("second"), speculative_config=drafts, max_num_batched_tokens=16) as second,
    ):
        yield first, second


def send(host: LlmHost, name: str, stream: bool, resume: Resume) -> Call:
    return host.infer(
        text_input="The sum of two and three is", stream=stream, sampling=REQUESTS[name], resume=resume, **FLAGS,
        **({} if stream else {"return_sequence_index": True}),
    )  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_it_goes_on_exactly(hosts: tuple[LlmHost, LlmHost], name: str) -> None:
    first, second = hosts
    whole = send(first, name, True, Resume())
    for count in range(1, len(whole.responses) + 1, 9):
        begun = whole.responses[:count]
        assert_goes_on(whole, begun, send(second, name, True, Resume(deltas(begun))))


def test_whole_answers_go_on_with_the_next_choice(hosts: tuple[LlmHost, LlmHost]) -> None:
    first, second = hosts
    whole = send(first, "choices", False, Resume())
    assert len(whole.responses) == 3
    for count in (1, 2, 3):
        begun = whole.responses[:count]
        assert_goes_on(whole, begun, send(second, "choices", False, Resume(deltas(begun))))
