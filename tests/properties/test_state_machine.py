"""The engine core over a model with windows and recurrent layers, as a state machine.

The rules and laws are those of the engine's machine; besides, no row ever reads a key or a state of another text. Its
prompts begin alike, so that prefixes hit, come as several choices, and outgrow the memory; drafts hold and fail.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import MultipleResults, initialize, rule

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.memory import state_slots
from llmbackend.engine.messages import SamplingParams
from llmbackend.engine.step import RowTable, SampledTokens, StepPlan
from tests.helpers.machine_settings import machine_settings
from tests.helpers.repeating_text import repeat_text
from tests.helpers.stateful_mock import GROUPS, StatefulRunner

from .test_engine_machine import EAGER, MAX_MODEL_LEN, EngineMachine, FailingRunner, Life

GRID_TOKENS = 6
LOST = "a state is lost"


class FailingStatefulRunner(FailingRunner, StatefulRunner):
    """Fails after keys and states are written."""

    has_failed = False

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        try:
            return super().execute(plan, table)
        except Exception as error:
            self.has_failed |= LOST not in str(error)
            raise


class StateMachine(EngineMachine):
    runner: FailingStatefulRunner

    @initialize(
        block_size=st.integers(1, 4),
        spare_blocks=st.integers(0, 6),
        max_num_seqs=st.sampled_from((5, 3, 1)),
        max_num_batched_tokens=st.sampled_from((64, 8, 3, 1)),
        speculates=st.booleans(),
        caching=st.sampled_from((True, True, False)),
    )
    def make(self, block_size: int, spare_blocks: int, speculates: bool, caching: bool, **arguments: Any) -> None:
        if not speculates:  # what is kept before drafts and on the grid is one copy for each token
            self.patch.setattr(state_slots, "GRID_TOKENS", GRID_TOKENS)
        config = EngineConfig(
            model="mock",
            max_model_len=MAX_MODEL_LEN,
            block_size=block_size,
            num_kv_blocks=GROUPS.count * -(-MAX_MODEL_LEN // block_size) + spare_blocks,
            speculative_config=EAGER if speculates else None,
            enable_prefix_caching=caching,
            **arguments,
        )
        if speculates:
            repeat_text(self.patch)
        runner = FailingStatefulRunner(config)
        self.begin(EngineCore(config, runner), runner)

    @rule(target=EngineMachine.ids, length=st.integers(1, 14), count=st.integers(2, 5))
    def add_choices(self, length: int, count: int) -> MultipleResults[str]:
        """Several of one prompt, which is the beginning of one text."""
        prompt = tuple(range(40, 40 + length))
        return self.add([(prompt, SamplingParams(max_tokens=9, seed=i), 0, 0.0, "") for i in range(count)])

    def _judge(self, life: Life) -> None:
        """After a failure a state may be lost whose keys have left the window: its request may end with that error."""
        if self.runner.has_failed:
            life.may_fail.add(LOST)
        super()._judge(life)


StateMachine.TestCase.settings = machine_settings(examples=15, steps=30)
TestStateMachine = StateMachine.TestCase
