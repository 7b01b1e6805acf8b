"""The llm backend in the real host with the real engine loop and its mock model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmbackend.core.backend_api import NO_TENANT, ErrorCode, Tenant
from tests.helpers.llm_host import MODEL, LlmHost, llm_host

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
_EXTRAS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens", "output_ids")
FLAGS = {f"return_{name}": True for name in _EXTRAS}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmHost]:
    with llm_host(tmp_path_factory.mktemp("repository")) as one:
        yield one


def test_the_model_is_ready_and_shows_vllm_backends_interface(host: LlmHost) -> None:
    assert host.server.model_is_ready(MODEL)
    metadata = host.server.model_metadata(MODEL)
    assert {one.name: (one.datatype, one.shape) for one in metadata.inputs}["text_input"] == ("BYTES", (1,))
    assert {one.name: (one.datatype, one.shape) for one in metadata.outputs}["num_output_tokens"] == ("UINT32", (-1,))


def test_one_response_with_the_prompt_before_the_text(host: LlmHost) -> None:
    call = host.infer(text_input="hello ", sampling=GREEDY)
    assert len(call.responses) == call.num_finals == 1
    assert call.text.startswith("hello ")
    assert call.output_names == [{"text_output"}]
    alone = host.infer(text_input="hello ", exclude_input_in_output=True, sampling=GREEDY)
    assert call.text == "hello " + alone.text


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_stream_and_whole_are_the_same(host: LlmHost, seed: int) -> None:
    sampling = {"seed": seed, "max_tokens": 60, "logprobs": 2, "stop": ["e", "\u00e9x"], "min_tokens": 3}
    flags = {**FLAGS, "exclude_input_in_output": True}
    whole = host.infer(text_input="tell me", sampling=sampling, **flags)
    stream = host.infer(text_input="tell me", sampling=sampling, stream=True, return_text_tokens=True, **flags)
    assert stream.text == whole.text
    text_tokens = [entry for one in stream.all("text_tokens") for entry in json.loads(one)]
    assert [token_id for token_id, _, _ in text_tokens if token_id >= 0] == whole.all("output_ids")
    assert "".join(text for _, text, is_special in text_tokens if not is_special) == whole.text
    assert stream.all("output_ids") == whole.all("output_ids")
    assert sum(stream.all("num_output_tokens")) == whole.all("num_output_tokens")[0] == len(whole.all("output_ids"))
    positions = [position for one in stream.all("logprobs") for position in json.loads(one)]
    assert positions == json.loads(whole.all("logprobs")[0])
    assert stream.all("cumulative_logprob")[-1] == whole.all("cumulative_logprob")[0]
    assert set(stream.all("num_input_tokens")) == {7}
    assert stream.all("finish_reason")[-1:] == whole.all("finish_reason")
    assert set(stream.all("finish_reason")[:-1]) <= {b"None"}
    assert stream.num_finals == 1


def test_stream_and_whole_are_the_same_for_random_requests(host: LlmHost) -> None:
    draw = random.Random(0)
    for _ in range(30):
        sampling = {
            "seed": draw.randrange(1 << 40),
            "max_tokens": draw.randint(1, 50),
            "min_tokens": draw.choice([0, 1]),
            "stop": draw.sample(["a", "Z", " ", "1", "~", "\u007f", "}", "M"], draw.randint(0, 4)),
            "stop_token_ids": draw.sample(range(259), draw.randint(0, 20)),
            "include_stop_str_in_output": draw.random() < 0.5,
            "skip_special_tokens": draw.random() < 0.5,
            "temperature": draw.choice([0, 0.7, 3]),
            "ignore_eos": draw.random() < 0.5,
        }
        inputs = {"text_input": "p", "sampling": sampling, "exclude_input_in_output": True, **FLAGS}
        whole, stream = host.infer(**inputs), host.infer(**inputs, stream=True)
        for name in ("output_ids", "finish_reason"):
            expected = whole.all(name)
            assert stream.all(name)[-len(expected) :] == expected
        assert stream.text == whole.text
        assert len(stream.all("output_ids")) == whole.all("num_output_tokens")[0]


def test_a_stream_has_several_responses_and_ends_with_content(host: LlmHost) -> None:
    call = host.infer(text_input="go", stream=True, sampling=GREEDY, return_finish_reason=True)
    assert len(call.responses) > 2
    assert call.all("finish_reason")[-1] == b"length"
    assert all(call.all("text_output"))


def test_logprobs_have_vllms_form(host: LlmHost) -> None:
    call = host.infer(text_input="go", sampling={**GREEDY, "logprobs": 2, "max_tokens": 3}, **FLAGS)
    positions = json.loads(call.all("logprobs")[0])
    assert len(positions) == 3
    for token_id, position in zip(call.all("output_ids"), positions, strict=True):
        assert next(iter(position)) == str(token_id)
        assert set(position[str(token_id)]) == {"logprob", "rank", "decoded_token"}
        assert position[str(token_id)]["rank"] == 1
    sampled = [position[str(one)]["logprob"] for one, position in zip(call.all("output_ids"), positions, strict=True)]
    assert call.all("cumulative_logprob")[0] == pytest.approx(sum(sampled))


def test_cumulative_logprob_needs_no_logprobs(host: LlmHost) -> None:
    call = host.infer(text_input="go", sampling=GREEDY, return_cumulative_logprob=True, return_logprobs=True)
    assert call.all("cumulative_logprob")[0] < 0
    assert call.all("logprobs") == [b"null"]


def test_a_stop_string_ends_the_generation_early(host: LlmHost) -> None:
    free = host.infer(input_ids=[1, 2, 3], sampling={**GREEDY, "max_tokens": 60}, return_output_ids=True)
    stop = next(char for char in free.text[5:] if char.isascii())
    call = host.infer(input_ids=[1, 2, 3], sampling={**GREEDY, "max_tokens": 60, "stop": stop}, **FLAGS)
    assert call.text == free.text[: free.text.index(stop)]
    assert call.all("finish_reason") == [b"stop"]
    assert call.all("output_ids") == free.all("output_ids")[: len(call.all("output_ids"))]
    assert call.all("output_ids")[-1] == ord(stop)


def test_messages_go_through_the_chat_template(host: LlmHost) -> None:
    messages = json.dumps([{"role": "user", "content": "hi"}])
    flags = {"return_num_input_tokens": True, "return_output_ids": True}
    call = host.infer(messages=messages, sampling=GREEDY, **flags)
    prompt = "user: hi\nassistant: "
    assert call.all("num_input_tokens") == [len(prompt)]
    as_text = host.infer(text_input=prompt, sampling=GREEDY, exclude_input_in_output=True, **flags)
    as_ids = host.infer(input_ids=list(prompt.encode()), sampling=GREEDY, **flags)
    assert call.text == as_text.text == as_ids.text
    assert call.all("output_ids") == as_text.all("output_ids") == as_ids.all("output_ids")
    chat = json.dumps({"messages": json.loads(messages), "chat_template_kwargs": {}, "add_generation_prompt": False})
    assert host.infer(messages=chat, sampling=GREEDY, **flags).all("num_input_tokens") == [len("user: hi\n")]


def test_a_prompt_that_begins_as_an_earlier_one_is_partly_cached(tmp_path: Path) -> None:
    prompt, flags = list(range(100)), {"return_num_cached_tokens": True, "return_output_ids": True}
    with llm_host(tmp_path) as host:
        first = host.infer(input_ids=prompt, sampling=GREEDY, **flags)
        again = host.infer(input_ids=prompt, sampling=GREEDY, **flags)
        stream = host.infer(input_ids=prompt, sampling=GREEDY, stream=True, **flags)
        salted = host.infer({**GREEDY, "cache_salt": "mine"}, input_ids=prompt, **flags)
        assert [one.all("num_cached_tokens") for one in (first, again, salted)] == [[0], [96], [0]]
        assert set(stream.all("num_cached_tokens")) == {96}
        assert (
            first.all("output_ids") == again.all("output_ids") == stream.all("output_ids") == salted.all("output_ids")
        )
        assert host.metric("vllm:prefix_cache_queries_total") == 400
        assert host.metric("vllm:prefix_cache_hits_total") == 192


def test_usage_comes_with_the_first_and_the_last_response(tmp_path: Path) -> None:
    prompt = list(range(100))
    with llm_host(tmp_path) as host:
        whole = host.infer(input_ids=prompt, sampling=GREEDY, return_usage=True, return_output_ids=True)
        stream = host.infer(input_ids=prompt, sampling=GREEDY, return_usage=True, return_output_ids=True, stream=True)
        choices = host.infer({**GREEDY, "n": 2}, input_ids=prompt, return_usage=True)
        num_tokens = len(whole.all("output_ids"))
        assert whole.all("usage") == [100, num_tokens, 0]
        assert len(stream.responses) > 2 and stream.all("usage") == [100, 1, 96, 100, num_tokens, 96]
        assert choices.all("usage") == [100, num_tokens, 96] * 2


def test_tenants_do_not_find_what_others_computed_with_any_salt(tmp_path: Path) -> None:
    prompt, flags = list(range(100)), {"return_num_cached_tokens": True}
    alice, bob = Tenant("alice", cache_name="alice"), Tenant("bob", cache_name="bob")

    with llm_host(tmp_path) as host:

        def cached(tenant: Tenant, salt: str | None = None) -> list[int]:
            sampling = GREEDY if salt is None else {**GREEDY, "cache_salt": salt}
            return host.infer(sampling=sampling, tenant=tenant, input_ids=prompt, **flags).all("num_cached_tokens")

        assert [cached(tenant) for tenant in (alice, alice, bob, bob, NO_TENANT)] == [[0], [96], [0], [96], [0]]
        for salt in ("alice", "alice\0", "\0alice", "('alice', '', '')"):
            assert cached(bob, salt) == cached(NO_TENANT, salt) == [0]
        assert [cached(alice, "mine"), cached(alice, "mine")] == [[0], [96]]
        sharing = [Tenant("carol"), Tenant("dave", is_operator=True)]
        assert [cached(tenant) for tenant in sharing] == [[96], [96]], "they share with those without a key"


@pytest.mark.parametrize("salt", ["", 7, "\ud800"])
def test_a_salt_is_a_text(host: LlmHost, salt: object) -> None:
    call = host.infer(text_input="a", sampling={"cache_salt": salt})
    assert (
        call.error is not None and "'cache_salt'" in call.error.message and "a non-empty string" in call.error.message
    )


def test_request_parameters_carry_sampling_as_generate_sends_it(host: LlmHost) -> None:
    parameters = {"temperature": 0, "max_tokens": "5", "ignore_eos": True, "id": "7"}
    call = host.infer(parameters, text_input="a", return_num_output_tokens=True)
    assert call.all("num_output_tokens") == [5]


def test_only_requested_outputs_are_sent(host: LlmHost) -> None:
    call = host.infer(text_input="a", sampling=GREEDY, stream=True, outputs=("output_ids",), **FLAGS)
    assert call.output_names == [{"output_ids"}] * 24
    assert len(call.all("output_ids")) == 24


@pytest.mark.parametrize(
    ("inputs", "expected", "code"),
    [
        ({"text_input": ""}, "the prompt is empty", ErrorCode.INVALID_ARG),
        ({"input_ids": [259]}, "'input_ids' holds 259, expected token ids from 0 to 258", ErrorCode.INVALID_ARG),
        ({"input_ids": [-1]}, "'input_ids' holds -1", ErrorCode.INVALID_ARG),
        ({"text_input": "x" * 256}, "the prompt has 256 tokens, expected at most 255", ErrorCode.INVALID_ARG),
        ({"text_input": "x" * 10_000_000}, "the prompt has 10000000 characters", ErrorCode.INVALID_ARG),
        ({"text_input": "a", "messages": "[]"}, "exactly one of the inputs", ErrorCode.INVALID_ARG),
        ({"messages": "[]"}, "non-empty JSON list", ErrorCode.INVALID_ARG),
        ({"messages": "{"}, "'messages' is not JSON", ErrorCode.INVALID_ARG),
        ({"messages": '{"messages": [1], "tool": 1}'}, "unknown fields ['tool']", ErrorCode.INVALID_ARG),
        ({"messages": '{"messages": [{"role": "a"}], "tools": {}}'}, "'tools' of input", ErrorCode.INVALID_ARG),
        ({"messages": '[{"role": "user", "content": "\\ud800"}]'}, "cannot be tokenised", ErrorCode.INVALID_ARG),
        ({"text_input": "a", "sampling": {"temperature": -1}}, "'temperature' is -1", ErrorCode.INVALID_ARG),
        ({"text_input": "a", "sampling": {"guided_json": "{"}}, "'guided_json'", ErrorCode.INVALID_ARG),
        (
            {"text_input": "a", "stream": True, "exclude_input_in_output": False},
            "When streaming",
            ErrorCode.INVALID_ARG,
        ),
    ],
)
def test_a_bad_request_is_answered_and_the_next_one_served(
    host: LlmHost, inputs: dict[str, Any], expected: str, code: ErrorCode
) -> None:
    call = host.infer(**inputs)
    assert call.num_finals == len(call.responses) == 1
    assert call.error is not None
    assert expected in call.error.message
    assert call.error.code is code
    assert host.infer(text_input="a", sampling=GREEDY).error is None


def test_many_requests_at_once_get_what_each_gets_alone(host: LlmHost) -> None:
    def request(index: int) -> dict[str, Any]:
        sampling = {"seed": index, "max_tokens": 5 + index % 40, "ignore_eos": True}
        return {"text_input": "p" * (1 + index % 50), "sampling": sampling, "return_output_ids": True}

    alone = [host.infer(**request(index)) for index in range(40)]
    together = [
        host.start(**request(index), stream=index % 2 == 0, exclude_input_in_output=True) for index in range(40)
    ]
    for one, other in zip(alone, together, strict=True):
        assert other.wait().all("output_ids") == one.all("output_ids")


def test_metrics_and_statistics_count_what_happened(tmp_path: Path) -> None:
    with llm_host(tmp_path) as host:
        assert host.metric("vllm:request_success_total", finished_reason="length") == 0
        host.infer(text_input="four", sampling=GREEDY)
        host.infer(text_input="four", stream=True, sampling=GREEDY)
        host.infer(text_input="a", sampling={"top_p": 7})
        assert host.metric("vllm:request_success_total", finished_reason="length") == 2
        for name, total in [("prompt", 8), ("generation", 48)]:
            assert host.metric(f"vllm:request_{name}_tokens_sum") == total
        assert host.metric("vllm:time_to_first_token_seconds_count") == 2
        assert host.metric("vllm:inter_token_latency_seconds_count") == 46
        assert host.metric("vllm:time_per_output_token_seconds_count") == 46
        assert host.metric("vllm:request_params_n_count") == 2
        assert host.metric("vllm:e2e_request_latency_seconds_count") == 2
        (statistics,) = host.server.model_statistics(MODEL)
    inference = statistics.inference_stats
    assert (inference.success.count, inference.fail.count) == (2, 1)
    assert (statistics.inference_count, statistics.execution_count) == (2, 2)
    assert inference.compute_infer.ns > 0
    assert inference.success.ns >= inference.compute_infer.ns


def test_metrics_of_vllm_backend(tmp_path: Path) -> None:
    """Names, labels and buckets of its src/utils/metrics.py, commit 8de0c14."""
    with llm_host(tmp_path) as host:
        for sampling in ({}, {"n": 3}, {"n": 2, "best_of": 4}):
            host.infer(text_input="four", sampling=GREEDY | sampling, stream="best_of" not in sampling)
        assert host.metric("vllm:request_params_n_count") == 3
        assert host.metric("vllm:request_params_n_sum") == 6
        buckets = {
            name: sorted(bounds_of(host, f"vllm:{name}"))
            for name in ("request_params_n", "time_per_output_token_seconds")
        }
    per_token = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
    assert buckets == {
        "request_params_n": [1.0, 2.0, 5.0, 10.0, 20.0, float("inf")],
        "time_per_output_token_seconds": [*per_token, float("inf")],
    }


def bounds_of(host: LlmHost, name: str) -> set[float]:
    families = host.server.metrics_registry.collect()
    return {float(s.labels["le"]) for family in families for s in family.samples if s.name == f"{name}_bucket"}


def test_what_a_request_tells_of_its_prompt(host: LlmHost) -> None:
    prompt = "what came before"
    asked: dict[str, Any] = {"prompt_logprobs": 2, "max_tokens": 5, "temperature": 0, "logprobs": 2}
    flags = {"return_prompt_token_ids": True, "return_logprobs": True, "exclude_input_in_output": True}
    whole = host.infer(text_input=prompt, sampling=asked, **flags)
    assert whole.all("prompt_token_ids") == list(prompt.encode())
    first, *others = json.loads(whole.all("prompt_logprobs")[0])
    assert first is None and len(others) == len(prompt) - 1
    for position, character in zip(others, prompt[1:], strict=True):
        assert next(iter(position)) == str(ord(character))
        assert position[str(ord(character))]["decoded_token"] == character
        assert 2 <= len(position) <= 3 and all(entry["logprob"] <= 0 for entry in position.values())
    stream = host.infer(text_input=prompt, sampling=asked, stream=True, **flags)
    assert stream.all("prompt_token_ids") == list(prompt.encode())
    assert stream.all("prompt_logprobs") == whole.all("prompt_logprobs")
    choices = host.infer(text_input=prompt, sampling=asked | {"n": 3, "best_of": 4, "temperature": 1}, **flags)
    assert choices.all("prompt_logprobs") == whole.all("prompt_logprobs")
    assert choices.all("prompt_token_ids") == list(prompt.encode())
    assert len(choices.all("text_output")) == 3
    # Greedy: what it says of a prompt that it wrote itself is what it said while writing.
    longer = prompt + whole.text
    again = host.infer(text_input=longer, sampling={"prompt_logprobs": 2, "max_tokens": 0}, **flags)
    assert json.loads(again.all("prompt_logprobs")[0])[len(prompt) :] == json.loads(whole.all("logprobs")[0])


def test_a_stream_of_tokens_has_the_logprobs_of_a_prompt_in_several_chunks(tmp_path: Path) -> None:
    prompt = "what came before, in chunks of eight tokens"
    asked: dict[str, Any] = {"prompt_logprobs": 2, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    outputs = ("output_ids", "prompt_logprobs")
    with llm_host(tmp_path, max_num_batched_tokens=8) as host:
        flags = {"text_input": prompt, "return_output_ids": True}
        whole = host.infer(sampling=asked, outputs=outputs, **flags)
        stream = host.infer(sampling=asked, outputs=outputs, stream=True, **flags)
    assert stream.all("prompt_logprobs") == whole.all("prompt_logprobs")
    assert len(json.loads(stream.all("prompt_logprobs")[0])) == len(prompt)
    assert stream.all("output_ids") == whole.all("output_ids") and len(stream.responses) == 5


def test_max_tokens_0(host: LlmHost) -> None:
    for stream in (False, True):
        call = host.infer(text_input="all there is", stream=stream, sampling={"max_tokens": 0}, **FLAGS)
        assert call.all("finish_reason") == [b"length"]
        assert call.all("output_ids") == [] and call.all("num_output_tokens") == [0]
        assert call.text == ("" if stream else "all there is")


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_most_logprobs(host: LlmHost, tmp_path: Path, name: str) -> None:
    for count in (21, -1):
        call = host.infer(text_input="a", sampling={name: count})
        assert call.error is not None and f"'{name}' is {count}, expected an integer from 0 to 20" in call.error.message
    with llm_host(tmp_path, max_logprobs=-1, max_model_len=4096, num_kv_blocks=1024) as lenient:
        flags: dict[str, Any] = {"return_logprobs": True}
        call = lenient.infer(text_input="abc", sampling={name: -1, "max_tokens": 1, "temperature": 0}, **flags)
        assert len(json.loads(call.all(name)[0])[-1]) == 259
        if name == "prompt_logprobs":
            long = lenient.infer(text_input="x" * 1009, sampling={name: -1, "max_tokens": 1})
            assert long.error is not None and "'prompt_logprobs' is 259: 260 logprobs for each of" in long.error.message


def test_logprobs_of_tokens_by_their_ids(host: LlmHost) -> None:
    asked: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    flags: dict[str, Any] = {"return_logprobs": True}
    all_of_them = {"logprob_token_ids": [258, 65, 66]}
    positions = json.loads(host.infer(text_input="a", sampling=asked | all_of_them, **flags).all("logprobs")[0])
    best = json.loads(host.infer(text_input="a", sampling=asked | {"logprobs": 20}, **flags).all("logprobs")[0])
    assert len(positions) == len(best) == 6
    for position, likeliest in zip(positions, best, strict=True):
        assert next(iter(position)) == next(iter(likeliest)) and {"258", "65", "66"} <= position.keys()
        assert len(position) <= 4 and position["258"]["rank"] is None
        for token_id in position.keys() & likeliest.keys():
            assert position[token_id]["logprob"] == pytest.approx(likeliest[token_id]["logprob"])
    for wrong, expected in (([259], "names '259'"), (list(range(129)), "has 129 token ids, expected at most 128")):
        call = host.infer(text_input="a", sampling={"logprob_token_ids": wrong})
        assert call.error is not None and expected in call.error.message
