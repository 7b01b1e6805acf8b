"""`n` and `best_of`: several generations of one prompt, through the real host and the engine's mock model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmbackend.core.backend_api import ErrorCode
from tests.helpers.llm_host import Call, LlmHost, llm_host
from tests.helpers.waiting import eventually, wait_for_self_check

SAMPLING: dict[str, Any] = {"temperature": 1.0, "max_tokens": 20, "seed": 5, "logprobs": 1}
FLAGS = {
    f"return_{name}": True
    for name in (
        "finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens", "output_ids",
    )
}  # fmt: skip
PROMPT = "several ways to go on from here: "


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmHost]:
    with llm_host(tmp_path_factory.mktemp("repository")) as one:
        yield one


def ask(host: LlmHost, stream: bool = False, **sampling: Any) -> Call:
    inputs: dict[str, Any] = {"return_sequence_index": True} if stream else {}
    return host.infer(
        text_input=PROMPT,
        stream=stream,
        exclude_input_in_output=True,
        sampling=SAMPLING | sampling,
        **FLAGS,
        **inputs,
    )


def ids_by_index(call: Call) -> dict[int, list[int]]:
    """Every choice's tokens, where responses have an index."""
    found: dict[int, list[int]] = {}
    for response in call.responses:
        assert response.error is None, response.error.message
        outputs = {tensor.name: tensor.data.tolist() for tensor in response.outputs}
        found.setdefault(int(outputs["sequence_index"][0]), []).extend(outputs["output_ids"])
    return found


def test_choices_are_what_single_requests_with_their_seeds_give(host: LlmHost) -> None:
    singles = [ask(host, seed=5 + index) for index in range(3)]
    together = ask(host, n=3)
    assert len(together.responses) == together.num_finals == 1
    assert together.all("text_output") == [one.text.encode() for one in singles]
    assert len(set(together.all("text_output"))) == 3
    assert together.all("output_ids") == [token_id for one in singles for token_id in one.all("output_ids")]
    for name in ("finish_reason", "cumulative_logprob", "num_output_tokens", "logprobs"):
        assert together.all(name) == [one.all(name)[0] for one in singles], name
    assert together.all("num_input_tokens") == [len(PROMPT)]


def test_in_a_stream_each_response_says_whose_it_is(host: LlmHost) -> None:
    stream = ask(host, stream=True, n=3)
    singles = [ask(host, seed=5 + index).all("output_ids") for index in range(3)]
    assert ids_by_index(stream) == dict(enumerate(singles))
    assert stream.num_finals == 1
    without_flag = host.infer(text_input=PROMPT, stream=True, sampling=SAMPLING | {"n": 2}, return_output_ids=True)
    assert ids_by_index(without_flag) == dict(enumerate(singles[:2]))


def test_whole_choices_in_responses_of_their_own(host: LlmHost) -> None:
    call = host.infer(
        text_input=PROMPT, sampling=SAMPLING | {"n": 3}, return_sequence_index=True, return_output_ids=True
    )
    assert len(call.responses) == 3
    assert ids_by_index(call) == ids_by_index(ask(host, stream=True, n=3))


@pytest.mark.parametrize("sequence_index", [{}, {"return_sequence_index": True}])
def test_cached_tokens_of_ranked_choices_are_those_of_the_first_one(
    tmp_path: Path, sequence_index: dict[str, Any]
) -> None:
    """The others find its prompt in the cache."""
    flags = {"return_num_cached_tokens": True, "exclude_input_in_output": True} | sequence_index
    with llm_host(tmp_path, block_size=8) as host:
        for prompt, seed in (("fresh prompt, " * 6, 9), ("another one, " * 6, 10)):
            sampling = SAMPLING | {"seed": seed, "max_tokens": 5, "n": 2, "best_of": 4}
            call = host.infer(text_input=prompt, sampling=sampling, **flags)
            assert call.error is None and {*call.all("num_cached_tokens")} == {0}


def test_best_of_gives_those_with_the_largest_logprob(host: LlmHost) -> None:
    singles = [ask(host, seed=5 + index) for index in range(4)]
    best = sorted(singles, key=lambda one: -float(one.all("cumulative_logprob")[0]))
    assert ask(host, n=2, best_of=4).all("text_output") == [one.text.encode() for one in best[:2]]
    assert ask(host, n=1, best_of=4, logprobs=None).text == best[0].text
    apart = host.infer(
        text_input=PROMPT,
        sampling=SAMPLING | {"n": 2, "best_of": 4},
        return_sequence_index=True,
        return_output_ids=True,
    )
    assert ids_by_index(apart) == {index: one.all("output_ids") for index, one in enumerate(best[:2])}


@pytest.mark.parametrize(
    ("sampling", "stream", "expected"),
    [
        ({"n": 0}, False, "sampling parameter 'n' is 0, expected an integer from 1 to 128"),
        ({"n": 129}, False, "expected an integer from 1 to 128"),
        ({"n": 3, "best_of": 2}, False, "sampling parameter 'best_of' is 2, expected at least n (3)"),
        ({"n": 1, "best_of": 2}, True, "sampling parameter 'best_of' is 2; in a stream it must be equal to n (1)"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    host: LlmHost, sampling: dict[str, Any], stream: bool, expected: str
) -> None:
    call = ask(host, stream, **sampling)
    assert call.error is not None and expected in call.error.message
    assert call.error.code is ErrorCode.INVALID_ARG


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_prompt_is_computed_once(tmp_path: Path, prefix_caching: bool) -> None:
    with llm_host(tmp_path, enable_prefix_caching=prefix_caching, max_num_batched_tokens=16) as host:
        choices = ask(host, stream=True, n=4)
        assert len(ids_by_index(choices)) == 4
        assert host.metric("vllm:prefix_cache_hits_total") == 3 * 32  # of 33 tokens, in blocks of 8
        again = ask(host, seed=9)
        hits = 32 if prefix_caching else 0
        assert host.metric("vllm:prefix_cache_hits_total") == 3 * 32 + hits
        assert again.error is None


def test_a_cancel_ends_all_choices(tmp_path: Path) -> None:
    with llm_host(tmp_path, mock_step_ms=2, max_model_len=4096, num_kv_blocks=4096) as host:
        endless = {"max_tokens": 4000, "ignore_eos": True, "n": 3, "seed": 1}
        for stream in (True, False):
            call = host.start(text_input=PROMPT, stream=stream, sampling=endless)
            eventually(lambda: host.metric("vllm:num_requests_running") == 3)
            call.handle.cancel()
            call.wait()
            assert call.error is not None and call.error.code is ErrorCode.CANCELLED
            eventually(lambda: host.metric("vllm:num_requests_running") == 0)
            assert call.num_finals == 1


def test_choices_that_do_not_fit_into_the_queue_are_refused_together(tmp_path: Path) -> None:
    parameters = 'parameters { key: "max_queue_size" value { string_value: "3" } }\n'
    with llm_host(tmp_path, pbtxt=parameters) as host:
        call = ask(host, n=4)
        assert call.error is not None and call.error.code is ErrorCode.UNAVAILABLE
        assert "its queue holds 0 requests, and 4 would be added" in call.error.message
        assert len(ask(host, n=3).all("text_output")) == 3


def test_models_that_answer_once_give_all_choices_in_one_response(tmp_path: Path) -> None:
    with llm_host(tmp_path, pbtxt="model_transaction_policy { decoupled: false }\n") as host:
        assert len(ask(host, n=3).all("text_output")) == 3
        call = host.infer(text_input=PROMPT, sampling={"n": 2}, return_sequence_index=True)
        assert call.error is not None and "decoupled: false" in call.error.message


def test_the_prompt_stands_before_each_choice(host: LlmHost) -> None:
    texts = host.infer(text_input=PROMPT, sampling=SAMPLING | {"n": 2}).all("text_output")
    assert [text.startswith(PROMPT.encode()) for text in texts] == [True, True]
    assert len(set(texts)) == 2


def test_choices_survive_their_engine(tmp_path: Path) -> None:
    """With a long prompt whose logprobs are asked for, so that the engine dies in the middle of those, too."""
    prompt = PROMPT * 12
    asked = SAMPLING | {"n": 3, "prompt_logprobs": 1, "max_tokens": 30, "ignore_eos": True}
    engine: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 16}

    def outputs(call: Call) -> tuple[dict[int, list[int]], list[bytes]]:
        return ids_by_index(call), call.all("prompt_logprobs")

    with llm_host(tmp_path / "calm", **engine) as host:
        expected = outputs(host.infer(text_input=prompt, stream=True, sampling=asked, return_output_ids=True))
    assert len(expected[0]) == 3 and len(expected[1]) == 1
    engine |= {"transport": "process", "mock_step_ms": 4.0, "fault_directory": str(tmp_path)}
    with llm_host(tmp_path / "shaken", **engine) as host:
        call = host.start(text_input=prompt, stream=True, sampling=asked, return_output_ids=True)
        for number in (1, 2):
            eventually(lambda: host.metric("vllm:num_requests_running") == 3)
            (tmp_path / "exit").touch()
            eventually(lambda number=number: host.metric("llmbackend:engine_restarts_total", cause="exit") == number)  # type: ignore[misc]
        assert outputs(call.wait()) == expected
        wait_for_self_check()
        assert host.metric("llmbackend:invariant_breaches_total") == 0
