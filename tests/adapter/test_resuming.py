"""A request with the deltas of its responses goes on behind the last of them, in a host that has never seen it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from llmbackend.adapter.requests.resuming import DeltaWriter, PieceRecord
from llmbackend.core.backend_api import ErrorCode, Tensor, unavailable
from llmbackend.core.messages import Resume
from tests.helpers.llm_host import Call, LlmHost, llm_host
from tests.helpers.llm_requests import NUM_KINDS, prompt
from tests.helpers.llm_requests import sampling as sampling_of_kind
from tests.helpers.resumed_calls import assert_goes_on, by_choice, deltas, shown

NEW = Resume()
FLAGS = (
    *("output_ids", "text_tokens", "logprobs", "finish_reason", "stop_reason", "num_output_tokens", "usage"),
    *("num_input_tokens", "num_cached_tokens", "cumulative_logprob", "prompt_token_ids", "prompt_text"),
)
SHAPES: list[dict[str, Any]] = [
    {"structured_outputs": {"choice": ["zażółć", "zażyła", "żółw i gęś", "日本語のテキスト"]}},
    {"structured_outputs": {"choice": ["abcabd!"]}, "stop": ["abd!!", "cabx"]},
    {"structured_outputs": {"choice": ["zażółć gęślą"]}, "stop": ["łć gę"]},
    {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 2}}},
    {"reasoning_markers": ["", "</think>"], "thinking_token_budget": 5,
     "structured_outputs": {"regex": "[a-z]{3}é+"}},
    {"stop_token_ids": list(range(97, 123)), "include_stop_str_in_output": True},
]  # fmt: skip


def generated(number: int) -> dict[str, Any]:
    """Arguments of a request: every third with several choices, every other one a stream, most without a seed."""
    draw = random.Random(number)
    sampling = sampling_of_kind(number % NUM_KINDS) | {"temperature": draw.choice([0, 0.8, 1.0])}
    if draw.random() < 0.7:
        sampling |= {"seed": None}
    if draw.random() < 0.5:
        sampling |= draw.choice(SHAPES) | {"max_tokens": 24, "min_tokens": 0, "ignore_eos": False}
    stream = draw.random() < 0.6
    arguments: dict[str, Any] = {
        "text_input": prompt(number),
        "stream": stream,
        **{f"return_{name}": True for name in FLAGS if draw.random() < 0.6},
        **({"return_output_ids": True} if stream else {}),
    }
    if number % 3 == 0:
        sampling["n"] = draw.choice([2, 3])
        if not stream:
            sampling["best_of"] = sampling["n"] + draw.choice([0, 2])
            arguments["return_sequence_index"] = draw.random() < 0.7
    if not stream:
        arguments["exclude_input_in_output"] = draw.random() < 0.5
    return {**arguments, "sampling": sampling}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LlmHost, LlmHost]]:
    options: dict[str, Any] = {"max_model_len": 128, "max_logprobs": 20}
    with (
        llm_host(tmp_path_factory.mktemp("first"), **options) as first,
        llm_host(tmp_path_factory.mktemp("second"), **options) as second,
    ):
        for host in (first, second):  # starts the threads that compile grammars and compute masks
            host.infer(text_input="a", sampling=SHAPES[0])
        yield first, second


@pytest.mark.parametrize("number", range(48))
def test_every_cut_goes_on_exactly_in_another_host(hosts: tuple[LlmHost, LlmHost], number: int) -> None:
    first, second = hosts
    request = generated(number)
    whole = first.infer(**request, resume=NEW)
    for count in range(1, len(whole.responses) + 1):
        begun = whole.responses[:count]
        rest = second.infer(**request, resume=Resume(deltas(begun)))
        assert_goes_on(whole, begun, rest)
        assert bool(rest.responses) == (count < len(whole.responses))


@pytest.mark.parametrize("number", range(0, 48, 5))
def test_a_new_reader_gets_the_responses_again_as_they_were(hosts: tuple[LlmHost, LlmHost], number: int) -> None:
    first, second = hosts
    request = generated(number)
    whole = first.infer(**request, resume=NEW)
    for count in {1, len(whole.responses) // 2 or 1, len(whole.responses)}:
        known = deltas(whole.responses[:count])
        again = second.infer(**request, resume=Resume(known, replays=True))
        assert [shown(one) for one in again.responses[:count]] == [shown(one) for one in whole.responses[:count]]
        assert_goes_on(whole, whole.responses[:count], _behind(again, count))
        twice = second.infer(**request, resume=Resume(deltas(again.responses)))
        assert not twice.responses and twice.num_finals == 1


def _behind(call: Call, count: int) -> Call:
    rest = Call()
    rest.responses, rest.num_finals = call.responses[count:], call.num_finals
    return rest


def test_the_requests_are_of_all_kinds(hosts: tuple[LlmHost, LlmHost]) -> None:
    """Otherwise the cuts above would show little."""
    wholes = [hosts[0].infer(**generated(number), resume=NEW) for number in range(48)]
    assert sum(len(whole.responses) for whole in wholes) > 200
    texts = [whole.text for whole in wholes]
    assert any("ż" in text for text in texts) and any(text.startswith("[") for text in texts)
    assert any(b"" in whole.all("text_output") for whole in wholes), "no text was held back"
    unseeded = [generated(number) for number in range(48) if generated(number)["sampling"]["seed"] is None]
    assert len([one for one in unseeded if one["sampling"]["temperature"]]) > 10


def test_a_request_that_is_not_marked_has_no_deltas(hosts: tuple[LlmHost, LlmHost]) -> None:
    call = hosts[0].infer(text_input="a", stream=True)
    assert len(call.responses) > 1 and not any(response.delta for response in call.responses)


def test_only_new_tokens_are_counted(hosts: tuple[LlmHost, LlmHost]) -> None:
    first, second = hosts
    request: dict[str, Any] = {"text_input": "a", "stream": True, "return_output_ids": True,
                               "sampling": {"max_tokens": 9, "ignore_eos": True}}  # fmt: skip
    begun = first.infer(**request, resume=NEW).responses[:4]
    num_begun = sum(len(shown(one)["output_ids"]) for one in begun)
    before = second.metric("vllm:request_generation_tokens_sum") or 0.0
    second.infer(**request, resume=Resume(deltas(begun)))
    after = second.metric("vllm:request_generation_tokens_sum") or 0.0
    assert after - before == 9 - num_begun


def test_a_resumed_request_is_cancelled_like_any_other(hosts: tuple[LlmHost, LlmHost]) -> None:
    request: dict[str, Any] = {"text_input": "a", "stream": True, "sampling": {"max_tokens": 100, "ignore_eos": True}}
    begun = hosts[0].infer(**request, resume=NEW).responses[:2]
    call = hosts[1].start(**request, resume=Resume(deltas(begun)))
    call.handle.cancel()
    call.wait()
    assert call.error is None or call.error.code is ErrorCode.CANCELLED


def refusal(host: LlmHost, known: tuple[bytes, ...], **request: Any) -> str:
    call = host.infer(**{"text_input": "a", "stream": True, **request}, resume=Resume(known))
    assert call.error is not None and call.error.code is ErrorCode.INVALID_ARG
    return call.error.message


def test_deltas_of_something_else_are_refused(hosts: tuple[LlmHost, LlmHost]) -> None:
    host = hosts[1]
    encode = msgspec.msgpack.encode
    assert "delta 0 cannot be read" in refusal(host, (b"\xc1",))
    assert "delta 1 cannot be read" in refusal(host, (encode([[], [1]]), encode({"a": 1})))
    assert "name generation 1, the request has 1" in refusal(host, (encode([[[1, []]]]),))
    assert "2 seeds, this one has 1" in refusal(host, (encode([[], [1, 2]]),))
    assert "hold token 100000" in refusal(host, (encode([[[0, [["", [100000]]]]]]),))


BATCHES = 'max_batch_size: 4 parameters { key: "tensor_schema" value { string_value: "tensorrtllm" } }'


@pytest.fixture(scope="module")
def batch_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LlmHost, LlmHost]]:
    with (
        llm_host(tmp_path_factory.mktemp("first"), BATCHES) as first,
        llm_host(tmp_path_factory.mktemp("second"), BATCHES) as second,
    ):
        yield first, second


def batch(stream: bool) -> tuple[Tensor, ...]:
    """Three prompts with seeds and lengths of their own, two choices of each."""
    prompts = np.array([[b"one"], [b"two"], [b"three"]], np.object_)
    columns: dict[str, list[Any]] = {
        "max_tokens": [4, 9, 6], "seed": [3, 4, 5], "end_id": [-1] * 3, "top_k": [50] * 3, "stream": [stream] * 3,
        "num_return_sequences": [2] * 3, "return_log_probs": [True] * 3, "return_num_input_tokens": [True] * 3,
        "return_num_output_tokens": [True] * 3,
    }  # fmt: skip
    kinds: dict[str, Any] = {"seed": np.uint64, "stream": np.bool_}
    tensors = [
        Tensor.of(name, np.array([[one] for one in values], kinds.get(name, _kind(name))))
        for name, values in columns.items()
    ]
    return (Tensor.of("text_input", prompts), *tensors)


def _kind(name: str) -> Any:
    return np.bool_ if name.startswith("return_") else np.int32


@pytest.mark.parametrize("stream", [True, False])
def test_a_batch_of_prompts_goes_on_exactly(batch_hosts: tuple[LlmHost, LlmHost], stream: bool) -> None:
    first, second = batch_hosts
    whole = first.start_tensors(batch(stream), resume=NEW).wait()
    for count in range(1, len(whole.responses) + 1):
        begun = whole.responses[:count]
        rest = second.start_tensors(batch(stream), resume=Resume(deltas(begun))).wait()
        assert_goes_on(whole, begun, rest)


def test_a_generation_that_had_failed_is_not_begun_again(batch_hosts: tuple[LlmHost, LlmHost]) -> None:
    host = batch_hosts[1]
    failed = DeltaWriter([3, 4, 5], 0).delta((PieceRecord(2).failed(unavailable("no engine")),))
    rest = host.start_tensors(batch(True), resume=Resume((failed,))).wait()
    assert len(by_choice(rest.responses)) == 5 and rest.num_finals == 1
    again = host.start_tensors(batch(True), resume=Resume((failed,), replays=True)).wait()
    error = again.responses[0].error
    assert error is not None and (error.code, error.message) == (ErrorCode.UNAVAILABLE, "no engine")
    assert len(by_choice(again.responses[1:])) == 5 and again.num_finals == 1
