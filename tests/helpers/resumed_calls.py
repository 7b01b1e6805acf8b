"""The results of a request on one host and of its continuation on another: whether they equal those of a single
host."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmbackend.core.messages import InferenceResponse
from tests.helpers.llm_host import Call

Shown = dict[str, list[Any]]


def shown(response: InferenceResponse) -> Shown:
    assert response.error is None, response.error.message
    return {tensor.name: tensor.data.ravel().tolist() for tensor in response.outputs}


JSON_LISTS = ("text_tokens", "logprobs")
LISTS = (*JSON_LISTS, "output_ids", "output_log_probs")


def by_choice(responses: list[InferenceResponse]) -> dict[str, Shown]:
    """All that came of each choice. Choices are sent as they come, and a step may give several tokens where a grammar
    forces them, so neither their order nor their responses are compared."""
    found: dict[str, Shown] = {}
    for one in map(shown, responses):
        choice = found.setdefault(f"{one.get('batch_index')} {one.get('sequence_index')}", {})
        for name, values in one.items():
            if name in JSON_LISTS:
                values = [entry for value in values for entry in json.loads(value) or ()]
            if name == "text_output":
                choice[name] = [b"".join((*choice.get(name, ()), *values))]
            elif name in LISTS:
                choice[name] = choice.get(name, []) + values
            elif name in ("num_output_tokens", "sequence_length"):
                choice[name] = [choice.get(name, [0])[0] + values[0]]
            else:
                choice[name] = values  # the last one counts
    return found


def deltas(responses: list[InferenceResponse]) -> tuple[bytes, ...]:
    assert all(response.delta for response in responses)
    return tuple(response.delta for response in responses)


def assert_goes_on(whole: Call, begun: list[InferenceResponse], rest: Call) -> None:
    assert rest.num_finals == 1
    expected, got = by_choice(whole.responses), by_choice(begun + rest.responses)
    assert expected.keys() == got.keys()
    had = by_choice(begun)
    for choice, responses in expected.items():
        if choice not in had:  # nobody was told of its cached tokens: another engine may have others
            for one in (responses, got[choice]):
                one.pop("num_cached_tokens", None)
                one["usage"] = one.get("usage", [])[:2]
        assert got[choice].pop("cumulative_logprob", 0) == pytest.approx(responses.pop("cumulative_logprob", 0))
        assert got[choice] == responses
