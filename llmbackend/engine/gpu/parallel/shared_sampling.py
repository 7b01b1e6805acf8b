"""Sampling of a model in stages: the last stage samples, all ranks take its tokens.

For: the runner of every rank, as its `Sampling`. Does not know: how tokens are sampled, models. Invariants: every rank
takes part in the same two exchanges, the second one only where the first says so; a step is complete when it was
enqueued, because the first stage needs its tokens before the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec
import numpy as np
import torch

from ...infer_request import InferRequest, TokenLogprobs
from ...step import RowTable, SampledTokens, StepPlan
from ..device import Device
from ..device_rows import DeviceRows
from ..runner import Sampling, StepSampling


class Sampler(Protocol):
    """Ranks, of which the last stage's sample."""

    @property
    def is_last(self) -> bool: ...

    def from_sampler(self, x: torch.Tensor) -> None:
        """x of the rank that samples, in place, on all ranks."""


class _Extras(msgspec.Struct, frozen=True, array_like=True):
    """What SampledTokens holds beside token ids."""

    logprobs: Mapping[int, tuple[TokenLogprobs, ...]]
    errors: Mapping[int, str]
    refusals: Mapping[int, str]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Extras).decode


class SharedSampling:
    max_steps_in_flight = 1

    def __init__(self, ranks: Sampler, own: Sampling) -> None:
        """own: this rank's, which the last stage's ranks sample with. Others only check requests with it."""
        self._ranks = ranks
        self._own = own

    def add_row(self, row: int, request: InferRequest) -> None:
        self._own.add_row(row, request)

    def remove_row(self, row: int) -> None:
        self._own.remove_row(row)

    def begin(self, plan: StepPlan, table: RowTable) -> StepSampling:
        if self._ranks.is_last:
            return _SampledHere(self._ranks, self._own.begin(plan, table))
        return _SampledElsewhere(self._ranks, plan)


class _SampledHere:
    def __init__(self, ranks: Sampler, step: StepSampling) -> None:
        self._ranks, self._step = ranks, step
        self._sampled = SampledTokens(np.empty(0, np.int32))

    def complete(self) -> None:
        self._step.complete()

    def enqueue(self, logits: torch.Tensor, rows: DeviceRows, device: Device) -> None:
        self._step.enqueue(logits, rows, device)
        device.synchronize()
        self._sampled = sampled = self._step.result()
        extras = b""
        if sampled.logprobs or sampled.errors or sampled.refusals:
            logprobs = {row: tuple(each) for row, each in sampled.logprobs.items()}
            extras = _encode(_Extras(logprobs, sampled.errors, sampled.refusals))
        words = torch.from_numpy(np.append(sampled.token_ids, np.int32(len(extras))).astype(np.int32))
        self._ranks.from_sampler(words.to(logits.device))
        if extras:
            self._ranks.from_sampler(torch.frombuffer(bytearray(extras), dtype=torch.uint8).to(logits.device))

    def result(self) -> SampledTokens:
        return self._sampled


class _SampledElsewhere:
    def __init__(self, ranks: Sampler, plan: StepPlan) -> None:
        self._ranks, self._plan = ranks, plan
        self._sampled = SampledTokens(np.empty(0, np.int32))

    def complete(self) -> None:
        """Rank 0 sends the masks to the others when it has them; these take them off their links."""
        if self._plan.masks is not None:
            self._plan.masks.result()

    def enqueue(self, logits: torch.Tensor, rows: DeviceRows, device: Device) -> None:
        count = len(logits)
        words = torch.empty(count + 1, dtype=torch.int32, device=logits.device)
        self._ranks.from_sampler(words)
        rows.put(*rows.samples(count), words[:count])
        *token_ids, num_bytes = words.tolist()
        extras = _Extras({}, {}, {})
        if num_bytes:
            data = torch.empty(num_bytes, dtype=torch.uint8, device=logits.device)
            self._ranks.from_sampler(data)
            extras = _decode(data.cpu().numpy().tobytes())
        self._sampled = SampledTokens(np.array(token_ids, np.int32), extras.logprobs, extras.errors, extras.refusals)

    def result(self) -> SampledTokens:
        return self._sampled
