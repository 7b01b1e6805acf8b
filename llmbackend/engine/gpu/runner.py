"""Runs steps on an accelerator beside the host: launched one behind the other, read when somebody wants to know.

For: the engine core, as its `OverlappingRunner`. Does not know: how the program, its memory and its graphs were made
(start.py), why these rows were chosen, text, clients. Invariants: all that a step needs of the host is read before
`launch` returns; a launch that raised has left nothing that a later step could see; what a step sampled is in the
device's rows before the next one reads them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from dataclasses import dataclass

import torch

from ..infer_request import InferRequest, ModelInfo
from ..lora import refuse_adapter
from ..step import KVCopies, RowTable, SampledTokens, StepPlan
from .device import Device, Event
from .device_rows import DeviceRows
from .graphs import DecodeGraphs
from .host_blocks import HostBlocks
from .program import GpuProgram
from .sampling import Sampling, StepSampling
from .step_message import StepMessage, StepMessages

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """What computes steps. graphs: None, or those that take the place of the program where a step fits one.
    host_blocks: where KV blocks go that have to make room on the device, if anywhere."""

    device: Device
    program: GpuProgram
    rows: DeviceRows
    messages: StepMessages
    graphs: DecodeGraphs
    sampling: Sampling
    host_blocks: HostBlocks | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    step_id: int
    sampling: StepSampling
    start: Event
    computed: Event
    end: Event


class GpuRunner:
    def __init__(self, engine: Engine, info: ModelInfo) -> None:
        self._engine, self._info = engine, info
        self._in_flight: deque[_Launched] = deque()

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def max_steps_in_flight(self) -> int:
        return self._engine.sampling.max_steps_in_flight

    def add_row(self, row: int, request: InferRequest) -> None:
        refuse_adapter(request.lora_name)
        self._engine.sampling.add_row(row, request)
        self._engine.messages.add(row)

    def remove_row(self, row: int) -> None:
        self._engine.sampling.remove_row(row)
        self._engine.messages.remove(row)

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        self.launch(-1, plan, table)
        return self.collect()[1]

    def launch(self, step_id: int, plan: StepPlan, table: RowTable) -> None:
        engine, graph_size = self._engine, self._engine.graphs.size_for(plan)
        sampling = engine.sampling.begin(plan, table)
        message = engine.messages.write(plan, table, graph_size)
        try:
            launched = self._enqueue(step_id, message, graph_size, plan.num_samples, sampling)
        except BaseException:
            # What was enqueued before the error may still read the message, and its memory is about to be used again.
            engine.device.synchronize()
            engine.device.trim()
            raise
        engine.messages.sent(message, launched.end)
        self._in_flight.append(launched)

    def collect(self) -> tuple[int, SampledTokens]:
        launched = self._in_flight.popleft()
        launched.end.wait()
        sampled = dataclasses.replace(
            launched.sampling.result(),
            forward_s=launched.computed.seconds_since(launched.start),
            sample_s=launched.end.seconds_since(launched.computed),
        )
        return launched.step_id, sampled

    def copy_blocks(self, copies: KVCopies) -> None:
        assert self._engine.host_blocks is not None, "there are no host blocks"
        self._engine.host_blocks.copy(copies)

    def close(self) -> None:
        """Waits for what is in flight. The memory of a device that has failed goes with the process."""
        device = self._engine.device
        del self._engine
        try:
            device.synchronize()
            device.trim()
        except RuntimeError:
            logger.warning("the device had failed before it was closed", exc_info=True)

    def _enqueue(
        self, step_id: int, message: StepMessage, graph_size: int | None, num_samples: int, sampling: StepSampling
    ) -> _Launched:
        engine, device = self._engine, self._engine.device
        logits: list[torch.Tensor] = []
        start = device.record()
        device.enqueue(lambda: logits.append(_logits(engine, message, graph_size)[:num_samples]))
        computed = device.record()
        if num_samples:
            device.enqueue(lambda: _sample(engine, sampling, logits[0]))
        end = device.record()
        if self.max_steps_in_flight == 1:
            end.wait()
        return _Launched(step_id, sampling, start, computed, end)


@torch.inference_mode()
def _logits(engine: Engine, message: StepMessage, graph_size: int | None) -> torch.Tensor:
    """Device work: the step up to its logits [samples, vocab], those of padding last."""
    engine.rows.upload(message)
    if graph_size is not None:
        return engine.graphs.replay(graph_size)
    return engine.program.forward(engine.rows.layout(message.shape), engine.rows.block_table)


@torch.inference_mode()
def _sample(engine: Engine, sampling: StepSampling, logits: torch.Tensor) -> None:
    sampling.enqueue(logits, engine.rows, engine.device)
