"""Runs steps on an accelerator: launches them in order and collects their results later, while the host continues.

The engine core's `OverlappingRunner`; make_gpu_runner.py creates the program, its memory and its graphs. Invariants:
`launch` reads everything that a step needs from the host before it returns; a launch that raised leaves nothing that a
later step could see; the tokens of a step are in the device's rows before the next step reads them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch

from ..adapter_loads import refuse_adapter
from ..messages import InferRequest, ModelInfo, TokenLogprobs
from ..sampling.sampler import PIECE_TOKENS, prompt_spans
from ..sampling.torch_sampling import TorchSampler
from ..step import BROKEN_LOGITS, Int32Array, KVCopies, RowTable, SampledTokens, StepPlan
from .device import Device, Event, noticing_loss
from .device_kv_memory import HostBlocks
from .device_rows import DeviceRows, Padded, StepMessage, StepMessages
from .graphs import StepGraphs
from .lora import DeviceAdapters
from .ops.ops import NO_ADAPTER
from .program import GpuProgram

logger = logging.getLogger(__name__)


class StepSampling(Protocol):
    def complete(self) -> None:
        """Waits for the token masks. Called after the computation of the logits was enqueued."""

    def enqueue(self, logits: torch.Tensor, rows: DeviceRows, device: Device) -> None:
        """Device work: samples from logits [samples, vocab] and adds the tokens to the rows."""

    def result(self) -> SampledTokens:
        """Called on the host after the device has finished the step."""


class StepSampler(Protocol):
    @property
    def max_steps_in_flight(self) -> int:
        """1 = `enqueue` waits for the device and reads the table, so a step is complete when `launch` returns."""

    def add_row(self, row: int, request: InferRequest) -> None:
        """Raises ValueError naming field, value and what was expected."""

    def remove_row(self, row: int) -> None: ...

    def begin(self, plan: StepPlan, table: RowTable) -> StepSampling:
        """Reads everything that the sampling of the step needs from plan and table."""


@dataclass(frozen=True, slots=True, eq=False)
class RunnerParts:
    device: Device
    program: GpuProgram
    rows: DeviceRows
    messages: StepMessages
    graphs: StepGraphs
    """Run instead of the program if a step fits one of them."""
    sampling: StepSampler
    host_blocks: HostBlocks | None = None
    adapters: DeviceAdapters | None = None
    """None = LoRA is not enabled."""


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    step_id: int
    sampling: StepSampling
    start: Event
    computed: Event
    end: Event
    prompts: list[PromptPiece]
    """Prompt tokens whose logprobs were requested."""
    draft_indices: Int32Array
    accepted: list[torch.Tensor]
    """`DeviceRows.accepted`, if the step has drafts; complete after `end`."""


class GpuRunner:
    def __init__(self, parts: RunnerParts, info: ModelInfo) -> None:
        self._parts, self._info = parts, info
        self._in_flight: deque[_Launched] = deque()

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def max_steps_in_flight(self) -> int:
        return self._parts.sampling.max_steps_in_flight

    @property
    def launches_drafts(self) -> bool:
        """False with a sampler on the host, which does not know the drafts that the device looks up."""
        return self._parts.rows.looks_up and self.max_steps_in_flight > 1

    @property
    def adapters(self) -> DeviceAdapters | None:
        return self._parts.adapters

    def add_row(self, row: int, request: InferRequest) -> None:
        slot = self._slot_of(request.lora_name)
        self._parts.sampling.add_row(row, request)
        self._parts.messages.add(row, slot)

    def remove_row(self, row: int) -> None:
        self._parts.sampling.remove_row(row)
        self._parts.messages.remove(row)

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        self.launch(-1, plan, table)
        return self.collect()[1]

    def launch(self, step_id: int, plan: StepPlan, table: RowTable) -> None:
        parts, padded = self._parts, self._parts.graphs.size_for(plan, self._parts.messages.adapts(plan))
        with noticing_loss(parts.device.synchronize):
            sampling = parts.sampling.begin(plan, table)
            message = parts.messages.write(plan, table, padded)
            prompts = prompt_pieces(plan, table, parts.device)
            try:
                launched = self._enqueue(step_id, message, padded, plan.num_samples, sampling, prompts)
            except BaseException:
                # Work enqueued before the error may still read the message, whose memory is reused.
                parts.device.synchronize()
                parts.device.trim()
                raise
        parts.messages.sent(message, launched.end)
        self._in_flight.append(launched)

    def collect(self) -> tuple[int, SampledTokens]:
        launched = self._in_flight.popleft()
        with noticing_loss(self._parts.device.synchronize):
            launched.end.wait()
            sampled = launched.sampling.result()
            prompt_logprobs, errors = entries_of(launched.prompts) if launched.prompts else ({}, {})
        sampled = dataclasses.replace(
            sampled,
            errors={**sampled.errors, **errors},
            prompt_logprobs=prompt_logprobs,
            num_accepted_tokens=launched.accepted[0].numpy()[launched.draft_indices] if launched.accepted else None,
            forward_s=launched.computed.seconds_since(launched.start),
            sample_s=launched.end.seconds_since(launched.computed),
        )
        return launched.step_id, sampled

    def copy_blocks(self, copies: KVCopies) -> None:
        assert self._parts.host_blocks is not None, "there are no host blocks"
        self._parts.host_blocks.copy(copies)

    def close(self) -> None:
        """Waits for the steps in flight. The memory of a lost device is freed when the process ends."""
        device = self._parts.device
        del self._parts
        try:
            device.synchronize()
            device.trim()
        except RuntimeError:
            logger.warning("the device was lost before the runner was closed", exc_info=True)

    def _slot_of(self, lora_name: str) -> int:
        if self._parts.adapters is not None:
            return self._parts.adapters.slot_of(lora_name)
        refuse_adapter(lora_name)
        return NO_ADAPTER

    def _enqueue(
        self,
        step_id: int,
        message: StepMessage,
        padded: Padded | None,
        num_samples: int,
        sampling: StepSampling,
        prompts: list[PromptPiece],
    ) -> _Launched:
        parts, device = self._parts, self._parts.device
        logits: list[torch.Tensor] = []
        accepted: list[torch.Tensor] = []
        start = device.record()
        device.enqueue(lambda: logits.append(_logits(parts, message, padded, num_samples)))
        computed = device.record()
        if num_samples:
            sampling.complete()
            device.enqueue(lambda: _sample(parts, sampling, logits[0]))
        if len(message.draft_indices):
            device.enqueue(lambda: accepted.append(device.fetch(parts.rows.accepted)))
        for piece in prompts:
            device.enqueue(partial(piece.enqueue, parts.program, self._info.vocab_size, device))
        end = device.record()
        if self.max_steps_in_flight == 1:
            end.wait()
        return _Launched(step_id, sampling, start, computed, end, prompts, message.draft_indices, accepted)


@torch.inference_mode()
def _logits(parts: RunnerParts, message: StepMessage, padded: Padded | None, num_samples: int) -> torch.Tensor:
    """Device work: uploads the message and computes the logits [samples, vocab]."""
    parts.rows.upload(message)
    if padded is not None:
        return parts.graphs.replay(padded, num_samples)
    return parts.program.forward(parts.rows.layout(message.shape), parts.rows.block_table)


@torch.inference_mode()
def _sample(parts: RunnerParts, sampling: StepSampling, logits: torch.Tensor) -> None:
    sampling.enqueue(logits, parts.rows, parts.device)


class HostSampling(TorchSampler):
    """The CPU path's sampler, for devices without their own."""

    max_steps_in_flight = 1

    def begin(self, plan: StepPlan, table: RowTable) -> StepSampling:
        return _HostStep(self, plan, table)


class _HostStep:
    def __init__(self, sampler: TorchSampler, plan: StepPlan, table: RowTable) -> None:
        self._sampler, self._plan, self._table = sampler, plan, table
        self._sampled = SampledTokens(np.empty(0, np.int32))

    def complete(self) -> None:
        """`enqueue` waits for the masks."""

    def enqueue(self, logits: torch.Tensor, rows: DeviceRows, device: Device) -> None:
        masks = None if self._plan.masks is None else self._plan.masks.result()
        self._sampled = self._sampler.sample(*self._plan.samples(self._table), logits, self._table, masks)
        token_ids = torch.from_numpy(self._sampled.token_ids).to(logits.device)
        rows.put(*rows.samples(len(token_ids)), token_ids)

    def result(self) -> SampledTokens:
        return self._sampled


@dataclass(slots=True, eq=False)
class PromptPiece:
    """Part of a row's prompt whose logprobs were requested: the head runs again for it. All pieces are padded to the
    same number of rows, so a token's logprobs do not depend on how many others are computed.

    token_ids  the tokens whose logprobs were requested
    places     int32 [2, PIECE_TOKENS], padded: places in the step's batch of the preceding tokens, and token_ids
    count      number of top logprobs requested
    fetched    set by `enqueue`: logprobs, ranks, and ids and logprobs of the most likely tokens
    """

    row: int
    token_ids: list[int]
    places: torch.Tensor
    count: int
    fetched: list[torch.Tensor] = field(default_factory=list)

    @torch.inference_mode()
    def enqueue(self, program: GpuProgram, vocab_size: int, device: Device) -> None:
        """Device work, after the forward pass of the step and before that of the next one."""
        behind, token_ids = self.places.to(device.torch_device, non_blocking=True)
        logits = program.logits_behind(behind)[:, :vocab_size].float()
        own = logits.gather(1, token_ids[:, None].long())
        norm = torch.logsumexp(logits.double(), dim=-1, keepdim=True)
        ranks = (logits > own).sum(-1) + 1
        parts = [(own.double() - norm)[:, 0], ranks]
        if self.count:
            top, ids = (part[:, : self.count] for part in logits.sort(dim=-1, descending=True, stable=True))
            parts += [ids, top.double() - norm]
        self.fetched = [device.fetch(part) for part in parts]

    def entries(self) -> list[TokenLogprobs]:
        """On the host, after the device has finished the step."""
        own, ranks, *likeliest = (part[: len(self.token_ids)].tolist() for part in self.fetched)
        ids, top = likeliest or ([[]] * len(own), [[]] * len(own))
        return [
            TokenLogprobs(token_id, own[i], ranks[i], tuple(zip(ids[i], top[i], strict=True)))
            for i, token_id in enumerate(self.token_ids)
        ]


def prompt_pieces(plan: StepPlan, table: RowTable, device: Device) -> list[PromptPiece]:
    """The pieces for the rows of the plan."""
    pieces: list[PromptPiece] = []
    for span in prompt_spans(plan, table):
        for first, end in span.pieces():
            token_ids = table.token_ids[span.row, first:end]
            tensor = torch.from_numpy(_places(plan, table, span.row, first, token_ids))
            pinned = tensor.pin_memory() if device.torch_device.type == "cuda" else tensor
            pieces.append(PromptPiece(span.row, token_ids.tolist(), pinned, span.count))
    return pieces


def _places(plan: StepPlan, table: RowTable, row: int, first: int, token_ids: Int32Array) -> Int32Array:
    index = int(np.flatnonzero(plan.rows == row)[0])
    begin = int(plan.num_scheduled_tokens[:index].sum()) - int(table.num_computed_tokens[row])
    places = np.zeros((2, PIECE_TOKENS), np.int32)
    count = len(token_ids)
    places[0, :count] = begin + np.arange(first - 1, first - 1 + count)
    places[0, count:] = places[0, count - 1]
    places[1, :count] = token_ids
    return places


def entries_of(pieces: Sequence[PromptPiece]) -> tuple[dict[int, list[TokenLogprobs]], dict[int, str]]:
    """The entries of each row, and the errors of rows whose logits are not finite."""
    found: dict[int, list[TokenLogprobs]] = {}
    for piece in pieces:
        found.setdefault(piece.row, []).extend(piece.entries())
    broken = {row for row, entries in found.items() if not all(np.isfinite(entry.logprob) for entry in entries)}
    return {row: one for row, one in found.items() if row not in broken}, dict.fromkeys(broken, BROKEN_LOGITS)
