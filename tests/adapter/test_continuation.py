"""A request that goes on behind earlier tokens gives what the interrupted one would have given, wherever it was cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from llmbackend.core.backend_api import ErrorCode
from tests.helpers.llm_host import Call, LlmHost, llm_host
from tests.helpers.llm_requests import NUM_KINDS, prompt
from tests.helpers.llm_requests import sampling as sampling_of_kind

EOS = 257
CHOICES = ["zażółć", "zażyła", "żółw i gęś", "日本語のテキスト"]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    *((prompt(kind), sampling_of_kind(kind) | {"prompt_logprobs": None}) for kind in range(NUM_KINDS)),
    ("multi-byte", {"structured_outputs": {"choice": CHOICES}, "temperature": 1.0, "seed": 3, "max_tokens": 40}),
    ("held back", {"structured_outputs": {"choice": ["abcabd!"]}, "stop": ["abd!!", "cabx"], "temperature": 0,
                   "max_tokens": 40}),
    ("stopped", {"structured_outputs": {"choice": ["zażółć gęślą"]}, "stop": ["łć gę"], "temperature": 0,
                 "max_tokens": 40}),
    ("schema", {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 2}},
                "temperature": 0.8, "seed": 9, "max_tokens": 24}),
    ("reasoned", {"reasoning_markers": ["", "</think>"], "thinking_token_budget": 5,
                  "structured_outputs": {"regex": "[a-z]{3}é+"}, "temperature": 1.0, "seed": 4, "max_tokens": 30}),
    ("stop token", {"stop_token_ids": list(range(97, 123)), "temperature": 1.0, "seed": 5, "max_tokens": 30,
                    "include_stop_str_in_output": True}),
]  # fmt: skip


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmHost]:
    with llm_host(tmp_path_factory.mktemp("repository"), max_model_len=128) as started:
        send(started, REQUESTS[NUM_KINDS])  # starts the threads that compile grammars and compute masks
        yield started


@dataclass(frozen=True)
class Output:
    text: str
    token_ids: list[int]
    text_tokens: list[Any]
    logprobs: list[Any]
    finish_reason: str
    stop_reason: str
    num_output_tokens: int


def send(host: LlmHost, request: tuple[str, dict[str, Any]], *, stream: bool = True, **inputs: Any) -> Call:
    text, sampling = request
    flags = ("output_ids", "text_tokens", "logprobs", "finish_reason", "stop_reason",
             "num_output_tokens")  # fmt: skip
    wanted: dict[str, Any] = {f"return_{name}": True for name in flags}
    return host.infer(
        text_input=text, stream=stream, sampling={"logprobs": 1} | sampling, exclude_input_in_output=True, **wanted,
        **inputs,
    )  # fmt: skip


def output(call: Call) -> Output:
    return Output(
        call.text,
        call.all("output_ids"),
        [entry for part in call.all("text_tokens") for entry in json.loads(part)],
        [entry for part in call.all("logprobs") for entry in json.loads(part) or ()],
        call.all("finish_reason")[-1].decode(),
        b"".join(call.all("stop_reason")).decode(),
        sum(call.all("num_output_tokens")),
    )


def beginnings(call: Call) -> Iterator[tuple[Output, bool]]:
    """What had come after each response, and whether that was all."""
    responses = call.responses
    for count in range(1, len(responses) + 1):
        part = Call()
        part.responses = responses[:count]
        yield output(part), count == len(responses)


@pytest.mark.parametrize("request_index", range(len(REQUESTS)))
def test_every_cut_of_a_stream_is_continued_exactly(host: LlmHost, request_index: int) -> None:
    request = REQUESTS[request_index]
    call = send(host, request)
    whole = output(call)
    assert whole.token_ids
    for begun, is_all in beginnings(call):
        for stream in (True, False):
            rest = output(send(host, request, stream=stream, prior_output_ids=begun.token_ids))
            assert begun.text + rest.text == whole.text
            assert begun.token_ids + rest.token_ids == whole.token_ids
            assert begun.text_tokens + rest.text_tokens == whole.text_tokens
            assert begun.logprobs + rest.logprobs == whole.logprobs
            assert (rest.finish_reason, rest.stop_reason) == (whole.finish_reason, whole.stop_reason)
            assert rest.num_output_tokens == len(rest.token_ids)
            assert bool(rest.token_ids) != is_all


def test_the_requests_end_in_every_way_and_hold_text_back(host: LlmHost) -> None:
    """Otherwise the cuts above would show little."""
    wholes = [output(send(host, request)) for request in REQUESTS]
    assert {whole.finish_reason for whole in wholes} == {"stop", "length"}
    assert any(whole.token_ids[-1] == EOS for whole in wholes)
    assert any(not text for whole in wholes for _, text, _ in whole.text_tokens), "no token's text was held back"
    assert {json.loads(whole.stop_reason) for whole in wholes} > {None, "łć gę"}
    assert any(isinstance(json.loads(whole.stop_reason), int) for whole in wholes)
    assert any(character > "\x7f" for whole in wholes for character in whole.text)


def test_tokens_may_be_cut_where_no_response_ended(host: LlmHost) -> None:
    """Between the bytes of a character, and within text that may become a stop string."""
    for request in REQUESTS:
        plain: dict[str, Any] = {
            "text_input": request[0], "sampling": request[1], "exclude_input_in_output": True,
            "return_output_ids": True,
        }  # fmt: skip
        whole = host.infer(**plain)
        ids = whole.all("output_ids")
        for count in range(1, len(ids)):
            rest = host.infer(prior_output_ids=ids[:count], **plain)
            assert whole.text.endswith(rest.text)
            assert rest.all("output_ids") == ids[count:]


def refusal(host: LlmHost, sampling: dict[str, Any], ids: list[int], **inputs: Any) -> tuple[str, str | None]:
    error = host.infer(text_input="a", sampling=sampling, prior_output_ids=ids, **inputs).error
    assert error is not None and error.code is ErrorCode.INVALID_ARG
    return error.message, error.param


@pytest.mark.parametrize(
    ("sampling", "ids", "param", "text"),
    [
        ({"temperature": 0, "max_tokens": 2}, [97, 98, 99], "prior_output_ids", "has 3 tokens, expected at most 2"),
        ({"temperature": 0}, [97, -1], "prior_output_ids", "holds -1, expected token ids from 0 to 258"),
        ({"temperature": 0}, [1 << 20], "prior_output_ids", "holds 1048576"),
        ({"temperature": 1}, [97], "seed", "'seed' is missing"),
        ({"temperature": 1, "seed": -1}, [97], "seed", "'seed' is missing"),
        ({"temperature": 0, "n": 2}, [97], "prior_output_ids", "holds the tokens of one choice"),
        ({"temperature": 0, "best_of": 2}, [97], "prior_output_ids", "holds the tokens of one choice"),
        ({"temperature": 0}, [97, EOS, 98], "prior_output_ids", f"the first 2 tokens end with the stop token {EOS}"),
        ({"temperature": 0, "stop": "b"}, [97, 98, 99], "prior_output_ids", "first 2 tokens complete a stop string"),
    ],
)
def test_what_cannot_have_been_sent_is_refused(
    host: LlmHost, sampling: dict[str, Any], ids: list[int], param: str, text: str
) -> None:
    message, named = refusal(host, sampling, ids)
    assert text in message and named == param


def test_the_prompt_cannot_be_sent_again(host: LlmHost) -> None:
    message, param = refusal(host, {"temperature": 0}, [97], exclude_input_in_output=False)
    assert param == "exclude_input_in_output" and "'prior_output_ids'" in message
    assert host.infer(text_input="a", sampling={"temperature": 0}, prior_output_ids=[97]).text[:1] != "a"


def test_a_question_about_the_prompt_goes_on_behind_nothing(host: LlmHost) -> None:
    message, _ = refusal(host, {}, [97], prompt_only=True)
    assert "'prior_output_ids'" in message


def test_an_ignored_end_of_sequence_is_a_token_like_others(host: LlmHost) -> None:
    call = host.infer(
        text_input="a",
        sampling={"temperature": 0, "ignore_eos": True, "max_tokens": 4},
        prior_output_ids=[97, EOS, 98],
        return_output_ids=True,
    )
    assert len(call.all("output_ids")) == 1


def test_tokens_that_the_grammar_forbids_are_refused(host: LlmHost) -> None:
    message, _ = refusal(host, {"temperature": 0, "structured_outputs": {"choice": ["yes", "no"]}}, [97])
    assert "the tokens so far do not follow 'structured_outputs'" in message


def test_no_tokens_are_a_new_generation(host: LlmHost) -> None:
    call = host.infer(text_input="a", sampling={"temperature": 1, "n": 2}, prior_output_ids=[])
    assert call.error is None


def test_only_new_tokens_are_counted(host: LlmHost) -> None:
    request = REQUESTS[0]
    whole = output(send(host, request))
    before = host.metric("vllm:request_generation_tokens_sum") or 0.0
    send(host, request, prior_output_ids=whole.token_ids[:3])
    after = host.metric("vllm:request_generation_tokens_sum") or 0.0
    assert after - before == len(whole.token_ids) - 3
