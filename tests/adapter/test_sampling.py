"""Sampling parameters: casts, ranges, refusals, and what comes out for the engine."""

from __future__ import annotations

from typing import Any

import pytest

from llmbackend.adapter.schemas.sampling import ACCEPTED, GenerationParams, parse_sampling_parameters
from llmbackend.core.backend_api import ErrorCode, TritonError


def parse(remaining_tokens: int = 100, **values: Any) -> GenerationParams:
    return parse_sampling_parameters(values, remaining_tokens=remaining_tokens, vocab_size=259)


def refusal(**values: Any) -> TritonError:
    with pytest.raises(TritonError) as caught:
        parse(**values)
    return caught.value


def test_defaults_are_vllms() -> None:
    params = parse()
    sampling = params.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature, sampling.top_k) == (16, 0, 1.0, 0)
    assert (sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (1.0, 0.0, 1.0)
    assert (params.stop, params.include_stop_str_in_output, params.skip_special_tokens) == ((), False, True)


def test_top_p_of_0_is_greedy() -> None:
    sampling = parse(top_p=0, temperature=1.5).sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)


def test_values_may_be_strings_as_vllm_backends_clients_send_them() -> None:
    params = parse(
        temperature="0",
        top_p="0.5",
        top_k="-1",
        max_tokens="7",
        ignore_eos="True",
        skip_special_tokens="false",
        stop_token_ids="[1, 2, 1]",
        allowed_token_ids=[7, 8],
        logit_bias='{"5": "-1.5"}',
    )
    sampling = params.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.0, 0.5, 0, 7)
    assert (sampling.ignore_eos, params.skip_special_tokens) == (True, False)
    assert sampling.stop_token_ids == (1, 2)
    assert sampling.allowed_token_ids == (7, 8)
    assert sampling.logit_bias == {5: -1.5}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", -1, "of at least 0"),
        ("max_tokens", 1.5, "an integer"),
        ("max_tokens", True, "an integer"),
        ("max_tokens", "many", "an integer"),
        ("max_tokens", float("inf"), "an integer"),
        ("min_tokens", -1, "of at least 0"),
        ("min_tokens", 17, "at most max_tokens (16)"),
        ("temperature", -0.1, "of at least 0"),
        ("temperature", float("nan"), "a number"),
        ("temperature", "warm", "a number"),
        ("temperature", [1], "a number"),
        ("top_k", -2, "of at least -1"),
        ("top_p", -0.1, "from 0.0 to 1.0"),
        ("top_p", 1.01, "from 0.0 to 1.0"),
        ("min_p", 2, "from 0.0 to 1.0"),
        ("repetition_penalty", 0, "above 0.0"),
        ("presence_penalty", 2.5, "from -2.0 to 2.0"),
        ("frequency_penalty", -2.5, "from -2.0 to 2.0"),
        ("logit_bias", [1], "an object"),
        ("logit_bias", {"x": 1}, "token ids from 0 to 258"),
        ("logit_bias", {"1": 101}, "from -100.0 to 100.0"),
        ("logit_bias", {"259": 1}, "token ids from 0 to 258"),
        ("seed", 1 << 63, "from"),
        ("stop", "", "a non-empty string"),
        ("stop", ["a", ""], "a non-empty string"),
        ("stop", [1], "a non-empty string"),
        ("stop", ["\ud800"], "a non-empty string"),
        ("bad_words", ["ok", "\ud800"], "a list of strings"),
        ("cache_salt", "\ud800", "a non-empty string"),
        ("stop_token_ids", 3, "a list of token ids"),
        ("allowed_token_ids", [], "at least one token id"),
        ("allowed_token_ids", [259], "token ids from 0 to 258"),
        ("stop_token_ids", [259], "token ids from 0 to 258"),
        ("ignore_eos", "maybe", "true or false"),
        ("ignore_eos", 2, "true or false"),
        ("logprobs", 21, "from 0 to 20"),
        ("n", 129, "from 1 to 128"),
        ("best_of", 0, "from 1 to 128"),
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_range(name: str, value: Any, expected: str) -> None:
    error = refusal(**{name: value})
    assert error.code is ErrorCode.INVALID_ARG
    assert f"'{name}" in error.message
    assert expected in error.message


def test_an_unknown_name_is_refused_with_the_names_that_exist() -> None:
    error = refusal(temprature=1)
    assert error.code is ErrorCode.INVALID_ARG
    assert "'temprature'" in error.message
    assert all(name in error.message for name in ACCEPTED)


@pytest.mark.parametrize("name", ["flat_logprobs", "use_beam_search"])
def test_a_vllm_field_that_is_not_built_is_refused_by_name(name: str) -> None:
    error = refusal(**{name: "x"})
    assert error.code is ErrorCode.UNSUPPORTED
    assert f"'{name}' is not supported" in error.message


def test_the_requests_id_is_no_sampling_parameter() -> None:
    assert parse(id="42", temperature=0.0).sampling.temperature == 0.0


def test_max_tokens_is_capped_to_the_room_and_null_means_all_of_it() -> None:
    assert parse(remaining_tokens=5, max_tokens=50).sampling.max_tokens == 5
    assert parse(remaining_tokens=5).sampling.max_tokens == 5
    assert parse(remaining_tokens=500, max_tokens=None).sampling.max_tokens == 500
    with pytest.raises(TritonError, match=r"'min_tokens' is 6.*the 5 tokens that fit"):
        parse(remaining_tokens=5, min_tokens=6, max_tokens=10)


def test_null_means_the_default_elsewhere() -> None:
    params = parse(temperature=None, stop=None, seed=None, logprobs=None, top_k=None)
    assert params.sampling.temperature == 1.0
    assert params.sampling.logprobs is None
    assert params.stop == ()


def test_a_seed_is_always_set() -> None:
    drawn = {parse().sampling.seed for _ in range(8)} | {parse(seed=-1).sampling.seed}
    assert len(drawn) == 9
    assert all(0 <= seed < 1 << 63 for seed in drawn)
    assert parse(seed=7).sampling.seed == parse(seed="7").sampling.seed == 7
    assert parse(seed=-5).sampling.seed >= 0


def test_logprobs_of_the_sampled_token_are_asked_for_when_they_are_needed() -> None:
    assert parse_sampling_parameters({}, remaining_tokens=9, vocab_size=9, logprobs_needed=True).sampling.logprobs == 0
    wanted = parse_sampling_parameters({"logprobs": 3}, remaining_tokens=9, vocab_size=9, logprobs_needed=True)
    assert wanted.sampling.logprobs == 3


def test_stop_is_a_string_or_a_list_and_stays_with_the_adapter() -> None:
    assert parse(stop="[1]").stop == ("[1]",)
    params = parse(stop=["a", "b", "a"], include_stop_str_in_output="true")
    assert (params.stop, params.include_stop_str_in_output) == (("a", "b"), True)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("stop", ["x"] * 257, "has 257 strings, expected at most 256"),
        ("stop", ["ok", "x" * 1025], "'stop'[1] has 1025 characters, expected at most 1024"),
        ("stop", [f"{index:02}" + "x" * 1000 for index in range(17)], "has 17034 characters in all, expected at most"),
        ("stop_token_ids", [1] * 1025, "has 1025 token ids, expected at most 1024"),
        ("cache_salt", "x" * 1025, "has 1025 characters, expected at most 1024"),
        ("logit_bias", {str(index): 1 for index in range(1025)}, "has 1025 token ids, expected at most 1024"),
    ],
)
def test_what_costs_time_per_token_is_bounded(name: str, value: Any, expected: str) -> None:
    error = refusal(**{name: value})
    assert error.code is ErrorCode.INVALID_ARG
    assert name in error.message and expected in error.message


def test_the_bounds_themselves_are_allowed() -> None:
    parse(stop=[f"{index:064}" for index in range(256)])
    parse(stop=["x" * 1024], cache_salt="x" * 1024)
    sampling = parse_sampling_parameters(
        {"stop_token_ids": list(range(1024)), "logit_bias": {str(index): 1 for index in range(1024)}},
        remaining_tokens=100,
        vocab_size=2000,
    ).sampling
    assert (len(sampling.stop_token_ids), len(sampling.logit_bias)) == (1024, 1024)


def test_too_many_parameters_are_refused_before_any_is_read() -> None:
    assert "has 257 sampling parameters, expected at most 256" in refusal(**dict.fromkeys(map(str, range(257)))).message


def test_all_wrong_keys_of_a_logit_bias_are_named() -> None:
    error = refusal(logit_bias={"x": 1, "5": 1, "-1": 1, "259": 1, "y" * 1000: 1, "1.5": 1})
    assert "'logit_bias' names 'x', '-1', '259', '" + "y" * 24 + "…', '1.5', expected token ids from 0" in error.message
    many = refusal(logit_bias={f"key{index}": 1 for index in range(1000)})
    assert "'key19' and 980 more, expected" in many.message
    assert len(many.message) < 1000
