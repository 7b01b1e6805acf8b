"""The output `stop_reason`: what ended a generation, if it was something that the request named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.llm_host import LlmHost, llm_host

EOS = 257


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmHost]:
    with llm_host(tmp_path_factory.mktemp("repository")) as started:
        yield started


def stop_reasons(host: LlmHost, *, stream: bool = False, **sampling: Any) -> list[Any]:
    call = host.infer(
        text_input="a",
        stream=stream,
        exclude_input_in_output=True,
        sampling={"temperature": 0, "max_tokens": 12, **sampling},
        return_stop_reason=True,
        return_output_ids=True,
    )
    return [json.loads(one) for one in call.all("stop_reason")]


def greedy(host: LlmHost) -> list[int]:
    sampling = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    ids: list[int] = host.infer(text_input="a", sampling=sampling, return_output_ids=True).all("output_ids")
    return ids


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_and_a_stop_token_are_named_in_the_last_response(host: LlmHost, stream: bool) -> None:
    token = greedy(host)[3]
    assert stop_reasons(host, stream=stream, ignore_eos=True, stop_token_ids=[token]) == [token]
    text = chr(token)
    assert stop_reasons(host, stream=stream, ignore_eos=True, stop=["never", text]) == [text]
    assert stop_reasons(host, stream=stream, ignore_eos=True, max_tokens=2) == [None]


def test_the_end_of_sequence_is_the_models_unless_it_is_ignored(host: LlmHost) -> None:
    likely = {EOS: 100}
    assert stop_reasons(host, logit_bias=likely) == [None]
    assert stop_reasons(host, logit_bias=likely, stop_token_ids=[EOS]) == [None]
    assert stop_reasons(host, logit_bias=likely, stop_token_ids=[EOS], ignore_eos=True) == [EOS]


def test_each_choice_has_its_own(host: LlmHost) -> None:
    token = greedy(host)[3]
    assert stop_reasons(host, n=3, ignore_eos=True, stop_token_ids=[token]) == [token] * 3


def test_it_is_only_sent_when_asked_for(host: LlmHost) -> None:
    call = host.infer(text_input="a", sampling={"max_tokens": 2})
    assert call.output_names == [{"text_output"}]
