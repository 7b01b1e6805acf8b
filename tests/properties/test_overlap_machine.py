"""The engine's machine with steps that overlap: a device that is fast or slow at every step, as hypothesis chooses."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from machine_settings import machine_settings
from mock_devices import FailingDevice
from test_engine_machine import CACHING, MAX_MODEL_LEN, EngineMachine

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore


class OverlapMachine(EngineMachine):
    @initialize(
        block_size=st.integers(1, 4),
        spare_blocks=st.integers(-2, 6),
        steps_in_flight=st.sampled_from((2, 2, 1, 3)),
        max_num_seqs=st.sampled_from((5, 3, 1)),
        max_num_batched_tokens=st.sampled_from((64, 8, 3, 1)),
        caching=st.sampled_from(CACHING),
        is_fast=st.booleans(),
    )
    def make(  # type: ignore[override]
        self,
        block_size: int,
        spare_blocks: int,
        steps_in_flight: int,
        caching: tuple[bool, int],
        is_fast: bool,
        **arguments: int,
    ) -> None:
        config = EngineConfig(
            model="mock",
            max_model_len=MAX_MODEL_LEN,
            block_size=block_size,
            num_kv_blocks=MAX_MODEL_LEN // block_size + spare_blocks,
            mock_steps_in_flight=steps_in_flight,
            enable_prefix_caching=caching[0],
            num_host_kv_blocks=caching[1],
            **arguments,
        )
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
