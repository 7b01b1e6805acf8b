"""Several tokens in one step, seen by a client: the same text, ids, logprobs and end, stream or not, wherever a stop
string falls."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.llm_host import Call, LlmHost, llm_host
from tests.helpers.repeating_text import repeat_text

OUTPUTS = ("finish_reason", "cumulative_logprob", "logprobs", "num_output_tokens", "output_ids")
FLAGS = {f"return_{name}": True for name in OUTPUTS}
SPECULATION = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def random_request(draw: random.Random) -> dict[str, Any]:
    """The text is of the characters ( to 3 and repeats itself, so stop strings of two fall in the middle of steps."""
    sampling = {
        "seed": draw.randrange(1 << 40),
        "max_tokens": draw.choice((3, 9, 40, 80)),
        "min_tokens": draw.choice((0, 0, 3)),
        "stop": [draw.choice("(*,./13") + draw.choice("(*,./13") for _ in range(draw.choice((0, 2, 6)))],
        "include_stop_str_in_output": draw.random() < 0.5,
        "temperature": draw.choice((0, 0.9)),
        "frequency_penalty": draw.choice((0, 0, 0.5)),
        "ignore_eos": draw.random() < 0.5,
        "logprobs": draw.choice((None, 1)),
    }
    text = "".join(draw.choice("()*+,-") for _ in range(6))
    return {"text_input": text, "sampling": sampling, "exclude_input_in_output": True, **FLAGS}


def seen(call: Call) -> tuple[Any, ...]:
    logprobs = [position for one in call.all("logprobs") for position in json.loads(one) or ()]
    ends = call.all("finish_reason")[-1], call.all("cumulative_logprob")[-1]
    return call.text, call.all("output_ids"), sum(call.all("num_output_tokens")), logprobs, *ends


def accepted(host: LlmHost) -> float:
    return host.metric("vllm:spec_decode_num_accepted_tokens_total") or 0.0


def test_a_client_sees_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repeat_text(monkeypatch)
    draw = random.Random(3)
    requests = [random_request(draw) for _ in range(25)]
    with llm_host(tmp_path / "plain") as host:
        expected = [seen(host.infer(**request)) for request in requests]
        assert accepted(host) == 0
    assert {one[4] for one in expected} == {b"stop", b"length"}
    with llm_host(tmp_path / "fast", speculative_config=SPECULATION) as host:
        for stream in (False, True):
            assert [seen(host.infer(**request, stream=stream)) for request in requests] == expected
        assert accepted(host) > 100
        drafts, tokens = (host.metric(f"vllm:spec_decode_num_{name}_total") for name in ("drafts", "draft_tokens"))
        assert drafts is not None
        assert tokens is not None
        assert drafts <= tokens
        assert accepted(host) < tokens
