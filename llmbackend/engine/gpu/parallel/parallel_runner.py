"""The runner of rank 0, each call of which all ranks repeat; its start; sampling between stages.

Used by make_runner on rank 0, and by the other ranks (`follow.py`). Invariants: no rank joins the others before all
have loaded their parts, so a failed load is reported instead of waited for; the KV memory of all ranks has the same
number of blocks, and all runners get the same calls in the same order; a step that fails on one rank ends the engine,
because the others have done half of it or wait for the rest. In a pipeline, the last stage samples, and all ranks use
its tokens: every rank takes part in the same two exchanges, the second one only if the first says so; a step is
complete once it is enqueued, because the first stage needs its tokens for the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import NoReturn

import msgspec
import numpy as np
import torch

from llmbackend import __version__

from ...config import EngineConfig
from ...errors import ProgramUnsupportedError
from ...messages import InferRequest, ModelInfo, TokenLogprobs
from ...model.loader import LoadedModel
from ...rank_order import RankMeeting, fingerprint_of
from ...step import OverlappingRunner, RowTable, SampledTokens, StepPlan
from ...token_masks import PendingMasks, TokenMasks
from ..device import CpuDevice, CudaDevice, Device, Memory
from ..device_rows import DeviceRows
from ..gpu_runner import GpuRunner, StepSampler, StepSampling
from ..make_gpu_runner import choose, start
from ..triton_needs import naming_what_triton_needs
from . import collectives
from .collectives import LOOPBACK, RankPlace, Ranks
from .followers import Followers, meet_followers
from .links import Collect, Join, Masks, RankListener, RowAdded, RowRemoved, TableSender
from .parts import load_part, refusal

_EXECUTED = -1
"""Id of a step that is launched and collected in one call."""


class ParallelRunner:
    """Rank 0's OverlappingRunner: sends every call to the followers, then makes it on its own runner."""

    def __init__(self, runner: OverlappingRunner, followers: Followers, max_num_seqs: int) -> None:
        """runner: of this rank's part."""
        self._runner = runner
        self._followers = followers
        self._sender = TableSender(max_num_seqs)

    @property
    def info(self) -> ModelInfo:
        return self._runner.info

    @property
    def max_steps_in_flight(self) -> int:
        return self._runner.max_steps_in_flight

    @property
    def launches_drafts(self) -> bool:
        """False: the other ranks do not know a row's pending drafts."""
        return False

    def add_row(self, row: int, request: InferRequest) -> None:
        """A request refused here is not sent to the other ranks, which would refuse it too."""
        if request.sampling.prompt_logprobs is not None:  # the other ranks do not know which logprobs are missing
            raise ValueError("'prompt_logprobs' is not supported on several devices, expected null")
        self._runner.add_row(row, request)
        self._sender.forget(row)
        self._followers.send(RowAdded(row, request))

    def remove_row(self, row: int) -> None:
        self._runner.remove_row(row)
        self._followers.send(RowRemoved(row))

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        self.launch(_EXECUTED, plan, table)
        return self.collect()[1]

    def launch(self, step_id: int, plan: StepPlan, table: RowTable) -> None:
        step = self._sender.step(step_id, plan, table)
        try:
            self._followers.send(step)
            if plan.masks is not None:
                plan = dataclasses.replace(plan, masks=_SharedMasks(plan.masks, self._followers))
            self._runner.launch(step_id, plan, table)
        except Exception as error:
            self._abandon(error)

    def collect(self) -> tuple[int, SampledTokens]:
        try:
            self._followers.send(Collect())
            return self._runner.collect()
        except Exception as error:
            self._abandon(error)

    def close(self) -> None:
        self._followers.stop()
        self._runner.close()
        collectives.leave()
        self._followers.reap()

    def _abandon(self, error: Exception) -> NoReturn:
        self._followers.abandon_step(f"rank 0 failed in a step of all ranks ({type(error).__name__}: {error})")


class _SharedMasks:
    """Rank 0's masks, sent to the followers once they are available here."""

    def __init__(self, masks: PendingMasks, followers: Followers) -> None:
        self._masks, self._followers, self._is_sent = masks, followers, False

    def result(self) -> TokenMasks:
        masks = self._masks.result()
        if not self._is_sent:
            self._is_sent = True
            self._followers.send(Masks(masks.index.tobytes(), masks.words.tobytes()))
        return masks


class _Extras(msgspec.Struct, frozen=True, array_like=True):
    """The fields of SampledTokens other than token ids."""

    logprobs: Mapping[int, tuple[TokenLogprobs, ...]]
    errors: Mapping[int, str]
    refusals: Mapping[int, str]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Extras).decode


class SharedSampling:
    max_steps_in_flight = 1

    def __init__(self, ranks: Ranks, own: StepSampler) -> None:
        """own: the sampler of this rank. The last stage samples with it; other stages only use it to check requests."""
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
    def __init__(self, ranks: Ranks, step: StepSampling) -> None:
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
    def __init__(self, ranks: Ranks, plan: StepPlan) -> None:
        self._ranks, self._plan = ranks, plan
        self._sampled = SampledTokens(np.empty(0, np.int32))

    def complete(self) -> None:
        """Receives the masks; rank 0 sends them to the others once it has them."""
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


CPU_KV_BYTES = 1 << 30
"""KV memory of a rank on a processor, unless the config sets it."""


def start_rank_0(config: EngineConfig, others: Followers | RankMeeting) -> ParallelRunner:
    """others: forked followers, or where to meet them. Raises ValueError or OSError with a message for the user; forked
    followers have ended then, others end when this process does."""
    start_s = time.monotonic()
    with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as meanwhile:
        ranks = Ranks(RankPlace.of(config, 0))
        if isinstance(others, Followers):
            on_failure.callback(others.reap, 0.0)
            part, followers, address = load_part(config, ranks), others, LOOPBACK
            followers.expect_loaded()
        else:
            listener, address = RankListener(others), others.address
            meanwhile.callback(listener.close)
            part = load_part(config, ranks, is_alone=True)
            followers = meet_followers(config, listener, fingerprint_of(config, __version__))
            on_failure.callback(followers.reap, 0.0)
        meeting, port = collectives.listen(address)
        followers.send(Join(address, port))
        followers.watch()
        ranks.join(part.device, address, port, config.load_timeout_s, meeting)
        if part.device.type == "cpu":  # NCCL would wait for the other ranks, which wait for this one
            on_failure.callback(collectives.leave)
        runner = start_part(config, part, ranks, start_s)
        on_failure.pop_all()
    return ParallelRunner(runner, followers, config.max_num_seqs)


def start_part(config: EngineConfig, part: LoadedModel, ranks: Ranks, start_s: float) -> GpuRunner:
    """The runner of this rank. Called on all ranks at the same time. Raises ValueError."""
    on_cpu, in_stages = part.device.type == "cpu", ranks.place.pipeline_size > 1
    if on_cpu and config.num_kv_blocks is None and config.kv_cache_memory_bytes is None:
        config = msgspec.structs.replace(config, kv_cache_memory_bytes=CPU_KV_BYTES)
    if on_cpu or in_stages:  # graphs would include what stages exchange
        config = msgspec.structs.replace(config, enforce_eager=True)
    device = CpuDevice() if on_cpu else _AgreedDevice(part.device, ranks)
    on_failure = contextlib.nullcontext() if on_cpu else naming_what_triton_needs()
    try:
        ops, matmul, own_sampling = choose(config, part)
        sampling: StepSampler = SharedSampling(ranks, own_sampling) if in_stages else own_sampling
        with on_failure:
            return start(config, part, device, ops, matmul, sampling, start_s, ranks)
    except ProgramUnsupportedError as reason:
        raise refusal(config, str(reason)) from reason


class _AgreedDevice(CudaDevice):
    """Reports the memory of the fullest rank, so that all ranks create the same number of KV blocks."""

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        super().__init__(device)
        self._ranks = ranks

    def memory(self) -> Memory:
        free_bytes, total_bytes, own_bytes = super().memory()
        free_bytes, total_bytes, negative = self._ranks.min_over_ranks((free_bytes, total_bytes, -own_bytes))
        return Memory(free_bytes, total_bytes, -negative)
