"""Helpers for tests of the engine's control side: mock cores, random requests, and a run's results per request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.messages import EngineStats, InferRequest, SamplingParams, StepOutput, StepResult, TokenLogprobs
from llmbackend.engine.step import RowTable, SampledTokens, StepPlan
from llmbackend.testing.mock_model import MockRunner
from tests.helpers.mock_oracle import mock_generate


def make_core(runner_class: type[MockRunner] = MockRunner, **arguments: Any) -> EngineCore:
    config = EngineConfig(model="mock", **arguments)
    return EngineCore(config, runner_class(config))


def make_request(
    request_id: str, prompt: Iterable[int] = (1, 2, 3), priority: int = 0, **sampling: Any
) -> InferRequest:
    sampling = {"temperature": 0.0, "max_tokens": 8, **sampling}
    return InferRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**sampling),
        priority=priority,
    )


def random_requests(seed: int, count: int, max_prompt: int = 40, max_tokens: int = 40) -> list[InferRequest]:
    """Greedy and seeded requests of mixed lengths, some with logprobs, penalties, stop tokens or no end of sequence."""
    draw = np.random.default_rng(seed)
    return [
        make_request(
            f"r{i}",
            draw.integers(0, 256, draw.integers(1, max_prompt + 1)).tolist(),
            max_tokens=int(draw.integers(1, max_tokens + 1)),
            temperature=float(draw.choice([0.0, 0.7, 1.5])),
            top_k=int(draw.choice([0, 5])),
            top_p=float(draw.choice([1.0, 0.8])),
            seed=i,
            ignore_eos=bool(draw.integers(2)),
            min_tokens=int(draw.choice([0, 0, 4])),
            stop_token_ids=tuple(draw.integers(32, 127, draw.choice([0, 3])).tolist()),
            frequency_penalty=float(draw.choice([0.0, 0.5])),
            logprobs=[None, 0, 3][draw.integers(3)],
        )
        for i in range(count)
    ]


@dataclass
class Outcome:
    """All that one request gave."""

    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    error: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def add(self, output: StepOutput) -> None:
        assert self.finish_reason is None, f"{output.request_id} gave an output after its end"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.finish_reason, self.error = output.finish_reason, output.error
        if output.finish_reason == "stop":
            assert output.stop_token_id is not None
            assert not output.token_ids or output.token_ids[-1] == output.stop_token_id


@dataclass
class Outcomes:
    of: dict[str, Outcome] = field(default_factory=dict)

    def __getitem__(self, request_id: str) -> Outcome:
        return self.of.setdefault(request_id, Outcome())

    def add(self, result: StepResult) -> StepResult:
        for output in result.outputs:
            self[output.request_id].add(output)
        return result


def run_counted(core: EngineCore, requests: Iterable[InferRequest] = ()) -> tuple[Outcomes, EngineStats]:
    """Adds the requests and steps until all is over; the core's own check runs after each step. Also the last step's
    counters."""
    for request in requests:
        core.add(request)
    outcomes, stats = Outcomes(), EngineStats()
    while core.has_work:
        stats = outcomes.add(core.step()).stats
        core.check()
    return outcomes, stats


def run_to_end(core: EngineCore, requests: Iterable[InferRequest] = ()) -> Outcomes:
    return run_counted(core, requests)[0]


def random_life(
    core: EngineCore,
    draw: np.random.Generator,
    requests: Sequence[InferRequest],
    fail_launch: Callable[[], None] | None = None,
) -> tuple[Outcomes, set[str]]:
    """Adds requests, ends some of them and makes launches fail, all at random, until none is left; the core is checked
    after every move. Returns the outcomes, and the ids of requests that were told to end."""
    pending, outcomes, aborted = [*requests], Outcomes(), set[str]()
    names = [request.request_id for request in requests]
    while pending or core.has_work:
        move = draw.random()
        if move < 0.25 and pending:
            core.add(pending.pop())
        elif move < 0.30:
            aborted.add(name := str(draw.choice(names)))
            core.abort(name)
        elif move < 0.33 and fail_launch is not None:
            fail_launch()
        elif core.has_work:
            outcomes.add(core.step())
        core.check()
    return outcomes, aborted


def ends_with_eos() -> InferRequest:
    """A greedy request that meets the end of sequence after more than 5 tokens and before the 60th."""
    for i in range(256):
        request = make_request("eos", (i,), max_tokens=100)
        if 5 < len(mock_generate(request).token_ids) < 60:
            return request
    raise AssertionError("the mock model never ends")


def expect_oracle(outcome: Outcome, request: InferRequest, max_model_len: int = 4096) -> None:
    """The outcome is what the request gives alone, without an engine."""
    expected = mock_generate(request, max_model_len=max_model_len)
    new = expected.token_ids[len(request.output_token_ids) :]
    assert (outcome.token_ids, outcome.finish_reason) == (new, expected.finish_reason)
    assert outcome.logprobs == expected.logprobs


class FaultyRunner(MockRunner):
    """Raises when a row whose prompt starts with POISON is computed; gives one that starts with NAN its own error."""

    POISON, NAN = 200, 201

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        first_tokens = table.token_ids[plan.rows, 0]
        if (first_tokens == self.POISON).any():
            raise ArithmeticError("poisoned")
        sampled = super().execute(plan, table)
        bad = plan.rows[(first_tokens == self.NAN) & plan.sample_rows].tolist()
        return SampledTokens(sampled.token_ids, sampled.logprobs, dict.fromkeys(bad, "its logits are not numbers"))
