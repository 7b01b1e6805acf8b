"""The engine core as a state machine: requests are added and aborted, steps fail, in any order.

After every rule no block and no row is lost. Every request ends exactly once; its tokens are those that it would give
alone, to the last one if it finished, up to its end if it was aborted or failed; only the cause of a failure fails.
How to search with many more sequences: machine_settings.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, initialize, invariant, multiple, rule

from llmbackend.engine.config import EngineConfig, SpeculativeConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.messages import InferRequest, SamplingParams, StepOutput
from llmbackend.engine.step import RowTable, SampledTokens, StepPlan
from llmbackend.testing.mock_model import MockRunner
from tests.helpers.engine_requests import VOCAB_SIZE, priorities, prompts, resumed, salts, sampling_params, shares
from tests.helpers.machine_settings import machine_settings
from tests.helpers.mock_devices import FailingDevice
from tests.helpers.mock_engine import Outcome, make_request
from tests.helpers.mock_oracle import mock_generate, mock_prompt_logprobs
from tests.helpers.repeating_text import repeat_text

MAX_MODEL_LEN = 40
EAGER = SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=3, prompt_lookup_min=1, max_step_tokens=16)
CACHING = ((True, 0), (True, 4), (True, 30), (False, 0))
"""Whether there is a prefix cache, and how many blocks of host memory it has beside the device's."""
NOT_NUMBERS = "its logits are not numbers"
TOO_LARGE = "the engine's whole KV cache"
POISONOUS = "ArithmeticError: poisonous"
BAD_BIAS = "logit_bias names token"
IMPOSSIBLE = {
    "prompt_token_ids is empty": make_request("", ()),
    "prompt_token_ids has": make_request("", range(MAX_MODEL_LEN)),
    "outside the vocabulary": make_request("", (VOCAB_SIZE,)),
    "max_tokens is -1": make_request("", max_tokens=-1),
    BAD_BIAS: make_request("", logit_bias={VOCAB_SIZE: 1.0}),
}
"""Requests that can never run, by a part of the text that says so."""


class FailingRunner(MockRunner):
    """A mock runner that raises after it has written to the KV cache, as a real one may.

    poisonous: requests that no step survives. not_numbers: requests whose sampled row gets an error of its own.
    failures_left: how many of the next executions raise, with any rows. Ids are those of requests.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.poisonous: set[str] = set()
        self.not_numbers: set[str] = set()
        self.failures_left = 0

    @property
    def num_rows(self) -> int:
        return len(self._requests)

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        sampled = super().execute(plan, table)
        ids = {row: self._requests[row].request_id for row in plan.rows.tolist()}
        if self.failures_left:
            self.failures_left -= 1
            raise RuntimeError("this execution fails")
        if self.poisonous & set(ids.values()):
            raise ArithmeticError("poisonous")
        errors = {row: NOT_NUMBERS for row in plan.rows[plan.sample_rows].tolist() if ids[row] in self.not_numbers}
        return dataclasses.replace(sampled, errors=errors)


@dataclass
class Life:
    """One request from its add to its end.

    expected: all the tokens that it would give alone, those before its add included. finish_reason: its end, alone.
    impossible: why it can never run, or "". may_fail: texts of the errors that it may end with.
    """

    request: InferRequest
    expected: tuple[int, ...] = ()
    finish_reason: str = "error"
    impossible: str = ""
    aborted: bool = False
    may_fail: set[str] = field(default_factory=set)
    is_live: bool = True
    """Whether the engine holds it: not one that was over when it came, was aborted, or has ended."""
    has_run: bool = True
    """Whether it was not over when it came."""
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def ended(self) -> bool:
        return self.outcome.finish_reason is not None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.request.output_token_ids + self.outcome.token_ids


class EngineMachine(RuleBasedStateMachine):
    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize(
        block_size=st.integers(1, 4),
        spare_blocks=st.integers(-2, 6),
        max_num_seqs=st.sampled_from((5, 3, 1)),
        max_num_batched_tokens=st.sampled_from((64, 8, 3, 1)),
        speculates=st.booleans(),
        caching=st.sampled_from(CACHING),
    )
    def make(
        self, block_size: int, spare_blocks: int, speculates: bool, caching: tuple[bool, int], **arguments: Any
    ) -> None:
        """An engine that speculates has a model that repeats itself, so that drafts hold and fail often."""
        num_kv_blocks = MAX_MODEL_LEN // block_size + spare_blocks
        config = EngineConfig(
            model="mock",
            max_model_len=MAX_MODEL_LEN,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            speculative_config=EAGER if speculates else None,
            enable_prefix_caching=caching[0],
            num_host_kv_blocks=caching[1],
            **arguments,
        )
        if speculates:
            repeat_text(self.patch)
        runner = FailingRunner(config)
        self.begin(EngineCore(config, runner), runner)

    def begin(self, core: EngineCore, runner: FailingRunner | FailingDevice) -> None:
        self.core, self.runner = core, runner
        self.capacity = core.info.block_size * core.info.num_blocks
        self.lives: dict[str, list[Life]] = {}

    # --- what clients do ----------------------------------------------------------------------------------------------

    @rule(
        target=ids,
        specs=st.lists(st.tuples(prompts, sampling_params, priorities, shares, salts), min_size=1, max_size=4),
    )
    def add(self, specs: list[tuple[tuple[int, ...], SamplingParams, int, float, str]]) -> MultipleResults[str]:
        """New requests; those with a share come from an engine that died after that share of their tokens."""
        added = []
        for prompt, sampling, priority, share, salt in specs:
            request_id = f"r{len(self.lives)}"
            request = InferRequest(
                request_id=request_id, prompt_token_ids=prompt, sampling=sampling, priority=priority, cache_salt=salt
            )
            self._add(resumed(request, share, MAX_MODEL_LEN) if share else request)
            added.append(request_id)
        return multiple(*added)

    @rule(target=ids, first=st.integers(0, 255), priorities=st.lists(priorities, min_size=3, max_size=6))
    def add_crowd(self, first: int, priorities: list[int]) -> MultipleResults[str]:
        """Long requests that outgrow the pool together."""
        specs = [
            ((first, i), SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True), priority, 0.0, "")
            for i, priority in enumerate(priorities)
        ]
        return self.add(specs)

    @rule(target=ids, cause=st.sampled_from(sorted(IMPOSSIBLE)))
    def add_impossible(self, cause: str) -> str:
        """Refused by the core, or, for its logit_bias, by the runner when it gets its row."""
        request_id = f"r{len(self.lives)}"
        self._add(msgspec.structs.replace(IMPOSSIBLE[cause], request_id=request_id), cause)
        return request_id

    @rule(request_id=ids)
    def add_again(self, request_id: str) -> None:
        """A live id is refused and the live request goes on; the id of one that is over may be used again."""
        life = self.lives[request_id][-1]
        if life.is_live:
            with pytest.raises(ValueError, match="is already running"):
                self.core.add(life.request)
        else:
            self._add(life.request, life.impossible)

    @rule(request_id=ids)
    def abort(self, request_id: str) -> None:
        self.core.abort("nobody")
        self.core.abort(request_id)
        life = self.lives[request_id][-1]
        life.aborted |= life.is_live
        life.is_live = False

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    @rule(request_id=ids, error=st.sampled_from((POISONOUS, NOT_NUMBERS)))
    def break_request(self, request_id: str, error: str) -> None:
        (self.runner.poisonous if error == POISONOUS else self.runner.not_numbers).add(request_id)
        self.lives[request_id][-1].may_fail.add(error)

    @rule()
    def fail_one_execution(self) -> None:
        """The batch fails and each of its rows runs alone afterwards: no request is lost."""
        if self.runner.failures_left == 0:
            self.runner.failures_left = 1

    # --- steps --------------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.core.has_work:
                self._step()

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "core"):
            self.core.check()
            live = [life for lives in self.lives.values() for life in lives if not life.ended]
            assert self.core.has_work == bool(live or self.core._in_flight)

    def teardown(self) -> None:
        """To idle, in a bounded number of steps: then all have ended, and rows and blocks are whole."""
        try:
            if hasattr(self, "core"):
                self._come_to_rest()
        finally:
            self.patch.undo()

    def _come_to_rest(self) -> None:
        # With any preemptions, the first running request moves by a token per step, or by its chunk.
        num_lives = sum(map(len, self.lives.values()))
        for _ in range(2 * MAX_MODEL_LEN * (num_lives + 1)):
            if not self.core.has_work:
                break
            self._step()
            self.core.check()
        assert not self.core.has_work, "the engine does not come to an end"
        assert self.runner.num_rows == 0
        assert all(life.ended for lives in self.lives.values() for life in lives)

    # --- the model ----------------------------------------------------------------------------------------------------

    def _add(self, request: InferRequest, impossible: str = "") -> None:
        life = Life(request, impossible=impossible, may_fail={impossible}) if impossible else self._possible(request)
        self.core.add(request)
        life.is_live = impossible in ("", BAD_BIAS) and life.is_live
        self.lives.setdefault(request.request_id, []).append(life)

    def _possible(self, request: InferRequest) -> Life:
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        if num_tokens > self.capacity:
            return Life(request, request.output_token_ids, may_fail={TOO_LARGE}, is_live=False)
        alone = mock_generate(request, max_model_len=MAX_MODEL_LEN)
        life = Life(request, alone.token_ids, alone.finish_reason)
        # Without an output there is the prompt to compute, also where max_tokens is 0.
        life.is_live = not request.output_token_ids or alone.token_ids != request.output_token_ids
        life.has_run = life.is_live
        if len(request.prompt_token_ids) + len(alone.token_ids) > self.capacity:
            life.may_fail.add(TOO_LARGE)
        if request.request_id in self.runner.poisonous:
            life.may_fail.add(POISONOUS)
        if request.request_id in self.runner.not_numbers:
            life.may_fail.add(NOT_NUMBERS)
        return life

    def _step(self) -> None:
        result = self.core.step()
        for output in result.outputs:
            self._take_in(output)
        waiting_or_running = result.stats.num_requests_running + result.stats.num_requests_waiting
        assert waiting_or_running == sum(not life.ended for lives in self.lives.values() for life in lives)

    def _take_in(self, output: StepOutput) -> None:
        life = next((one for one in self.lives[output.request_id] if not one.ended), None)
        assert life is not None, f"{output.request_id} gave an output after its end: {output}"
        life.outcome.add(output)
        assert life.token_ids == life.expected[: len(life.token_ids)], "a token was lost, repeated or changed"
        if life.ended:
            life.is_live = False
            self._judge(life)

    def _judge(self, life: Life) -> None:
        reason, error = life.outcome.finish_reason, life.outcome.error
        if reason == "abort":
            assert life.aborted, "it was not aborted"
        elif reason == "error":
            assert any(text in error for text in life.may_fail), f"unexpected error: {error}"
        else:
            assert (life.token_ids, reason) == (life.expected, life.finish_reason)
            if life.has_run:
                assert life.outcome.prompt_logprobs == mock_prompt_logprobs(life.request)


EngineMachine.TestCase.settings = machine_settings(examples=50, steps=40)
TestEngineMachine = EngineMachine.TestCase


class OverlapMachine(EngineMachine):
    """Steps overlap: the device is fast or slow at every step, as hypothesis chooses."""

    is_fast: bool

    @initialize(
        block_size=st.integers(1, 4),
        spare_blocks=st.integers(-2, 6),
        steps_in_flight=st.sampled_from((2, 2, 1, 3)),
        max_num_seqs=st.sampled_from((5, 3, 1)),
        max_num_batched_tokens=st.sampled_from((64, 8, 3, 1)),
        speculates=st.booleans(),
        caching=st.sampled_from(CACHING),
        is_fast=st.booleans(),
    )
    def make(
        self,
        block_size: int,
        spare_blocks: int,
        steps_in_flight: int,
        speculates: bool,
        caching: tuple[bool, int],
        is_fast: bool,
        **arguments: Any,
    ) -> None:
        config = EngineConfig(
            model="mock",
            max_model_len=MAX_MODEL_LEN,
            block_size=block_size,
            num_kv_blocks=MAX_MODEL_LEN // block_size + spare_blocks,
            mock_steps_in_flight=steps_in_flight,
            speculative_config=EAGER if speculates else None,
            enable_prefix_caching=caching[0],
            num_host_kv_blocks=caching[1],
            **arguments,
        )
        if speculates:
            repeat_text(self.patch)
        device = FailingDevice(config)
        device.is_fast = lambda: self.is_fast
        self.is_fast = is_fast
        self.begin(EngineCore(config, device), device)

    @rule()
    def change_pace(self) -> None:
        self.is_fast = not self.is_fast

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if hasattr(self, "core"):
                self.core.close()


OverlapMachine.TestCase.settings = machine_settings(examples=30, steps=40)
TestOverlapMachine = OverlapMachine.TestCase
