"""How the runner samples: on the device, or on the host, which waits for the logits.

For: the runner. Does not know: how logits are made, how a token is chosen. Invariant: what is sampled becomes part of
the device's rows before the next step reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ..infer_request import InferRequest
from ..sampler import Sampler
from ..step import RowTable, SampledTokens, StepPlan
from .device import Device
from .device_rows import DeviceRows

if TYPE_CHECKING:
    from .device_sampler import DeviceSampler  # needs triton


class StepSampling(Protocol):
    """One step's sampling."""

    def enqueue(self, logits: torch.Tensor, rows: DeviceRows, device: Device) -> None:
        """Device work: samples from logits [samples, vocab], and puts what it sampled into the rows."""

    def result(self) -> SampledTokens:
        """On the host, when the device has done the step."""


class Sampling(Protocol):
    @property
    def max_steps_in_flight(self) -> int:
        """1: `enqueue` waits for the device and reads the table, so that the step is over when it is launched."""

    def add_row(self, row: int, request: InferRequest) -> None:
        """Raises ValueError naming the field, its value and what was expected."""

    def remove_row(self, row: int) -> None: ...

    def begin(self, plan: StepPlan, table: RowTable) -> StepSampling:
        """Reads what it needs of the plan."""


class HostSampling:
    """The sampler of the CPU path, for devices that have none of their own."""

    max_steps_in_flight = 1

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._sampler = Sampler(max_num_seqs, vocab_size, eos_token_ids)

    def add_row(self, row: int, request: InferRequest) -> None:
        self._sampler.add_row(row, request)

    def remove_row(self, row: int) -> None:
        self._sampler.remove_row(row)

    def begin(self, plan: StepPlan, table: RowTable) -> StepSampling:
        return _HostStep(self._sampler, plan, table)


class _HostStep:
    def __init__(self, sampler: Sampler, plan: StepPlan, table: RowTable) -> None:
        self._sampler, self._plan, self._table = sampler, plan, table
        self._sampled = SampledTokens(np.empty(0, np.int32))

    def enqueue(self, logits: torch.Tensor, rows: DeviceRows, device: Device) -> None:
        self._sampled = self._sampler.sample(*self._plan.samples(self._table), logits, self._table)
        token_ids = torch.from_numpy(self._sampled.token_ids).to(logits.device)
        rows.put(*rows.samples(len(token_ids)), token_ids)

    def result(self) -> SampledTokens:
        return self._sampled


class DeviceSampling:
    """The device's own sampler: the host reads tokens when it wants to, a step behind."""

    max_steps_in_flight = 2

    def __init__(self, sampler: DeviceSampler) -> None:
        self._sampler = sampler

    def add_row(self, row: int, request: InferRequest) -> None:
        self._sampler.add_row(row, request)

    def remove_row(self, row: int) -> None:
        self._sampler.remove_row(row)

    def begin(self, plan: StepPlan, table: RowTable) -> StepSampling:
        return _DeviceStep(self._sampler, plan, table)


class _DeviceStep:
    def __init__(self, sampler: DeviceSampler, plan: StepPlan, table: RowTable) -> None:
        self._sampler = sampler
        self._where = plan.samples(table)
        self._prepared = sampler.prepare()
        self._fetched: list[torch.Tensor] = []

    def enqueue(self, logits: torch.Tensor, rows: DeviceRows, device: Device) -> None:
        where = rows.samples(len(logits))
        if logits.is_cuda and self._sampler.is_unused:
            # This is the largest step, by which memory is measured when the engine starts.
            self._sampler.compile(logits, rows.token_table, rows.num_prompt_tokens)
        samples = self._prepared.sample(logits, *where, rows.token_table, rows.num_prompt_tokens)
        rows.put(*where, samples.token_ids)
        self._fetched = [device.fetch(tensor) for tensor in samples.tensors()]

    def result(self) -> SampledTokens:
        from .device_sampler import HostSamples

        if not self._fetched:
            return SampledTokens(np.empty(0, np.int32))
        return self._sampler.result(*self._where, HostSamples.of(self._fetched))
