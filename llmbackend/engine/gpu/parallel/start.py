"""From a model's files to one runner over several devices: every rank loads its part, meets the others, verifies it.

For: make_runner on rank 0, and the followers' processes. Does not know: requests, schedules, which part a rank
computes.
Invariants: no rank meets the others before all have loaded their parts, so that a failed load is reported and not
waited for; all ranks' runners get the same calls in the same order and sample the same tokens; a step that fails on one
rank ends the engine, because the others have done half of it or wait for the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from multiprocessing.connection import Connection
from typing import NoReturn

import msgspec
import numpy as np
import torch

from ...config import EngineConfig
from ...errors import ProgramUnsupportedError
from ...infer_request import InferRequest, ModelInfo
from ...model.loader import LoadedModel
from ...step import OverlappingRunner, RowTable, SampledTokens, StepPlan
from ...token_masks import PendingMasks, TokenMasks, num_words
from ..device import CudaDevice, Memory
from ..fake_device import FakeDevice
from ..start import choose, start
from . import collectives
from .collectives import ProcessGroup
from .followers import Followers
from .messages import Collect, Join, Masks, Message, RowAdded, RowRemoved, Step, Stop, TableSender, apply
from .sharding import load_part, refusal

logger = logging.getLogger(__name__)

_decode = msgspec.msgpack.Decoder(Message).decode


def start_rank_0(config: EngineConfig, followers: Followers) -> ParallelRunner:
    """Raises ValueError or OSError with a text for the user; the followers are ended then."""
    start_s = time.monotonic()
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(followers.reap, 0.0)
        ranks = _ranks(config, 0)
        part = load_part(config, ranks)
        followers.expect_loaded()
        meeting, port = collectives.listen()
        followers.tell(Join(port))
        followers.watch()
        collectives.join(ranks, part.device, port, config.load_timeout_s, meeting)
        on_failure.callback(collectives.leave)
        runner = _start(config, part, ranks, start_s)
        on_failure.pop_all()
    return ParallelRunner(runner, followers, config.max_num_seqs)


def follow(config: EngineConfig, rank: int, link: Connection) -> None:
    """What a follower's process does: loads its part, joins, and repeats rank 0's calls until the end."""
    start_s, ranks = time.monotonic(), _ranks(config, rank)
    try:
        part = load_part(config, ranks)
    except Exception as error:
        link.send_bytes(f"rank {rank}: {error}".encode())
        return
    link.send_bytes(b"")
    join = _decode(link.recv_bytes())
    assert isinstance(join, Join)
    collectives.join(ranks, part.device, join.port, config.load_timeout_s)
    try:
        runner = _start(config, part, ranks, start_s)
    except Exception as error:
        # Rank 0 most likely fails with the same error: it reports it and ends this process.
        link.send_bytes(f"rank {rank}: {error}".encode())
        link.recv_bytes()
        return
    _serve(runner, config, link)
    runner.close()
    collectives.leave()


def _serve(runner: OverlappingRunner, config: EngineConfig, link: Connection) -> None:
    """Repeats rank 0's calls until it says stop, or has ended."""
    table = RowTable(config.max_num_seqs, runner.info.max_model_len, runner.info.block_size)
    while True:
        try:
            message = _decode(link.recv_bytes())
        except EOFError:
            return
        match message:
            case Step():
                plan = apply(message, table)
                if message.has_masks:
                    plan = dataclasses.replace(plan, masks=_ReceivedMasks(link, runner.info.vocab_size))
                runner.launch(message.step_id, plan, table)
            case Collect():
                runner.collect()
            case RowAdded():
                runner.add_row(message.row, message.request)
            case RowRemoved():
                runner.remove_row(message.row)
            case Stop() | Join() | Masks():
                return


class _ReceivedMasks:
    """A follower's masks of the step that it launches: rank 0 sends them when it has computed them."""

    def __init__(self, link: Connection, vocab_size: int) -> None:
        self._link, self._vocab_size = link, vocab_size
        self._masks: TokenMasks | None = None

    def result(self) -> TokenMasks:
        if self._masks is None:
            message = _decode(self._link.recv_bytes())
            assert isinstance(message, Masks)
            words = np.frombuffer(message.words, np.uint32).reshape(-1, num_words(self._vocab_size))
            self._masks = TokenMasks(np.frombuffer(message.index, np.int32), words)
        return self._masks


class _SharedMasks:
    """Rank 0's masks, which it sends to the followers when it has them itself."""

    def __init__(self, masks: PendingMasks, followers: Followers) -> None:
        self._masks, self._followers, self._is_sent = masks, followers, False

    def result(self) -> TokenMasks:
        masks = self._masks.result()
        if not self._is_sent:
            self._is_sent = True
            self._followers.tell(Masks(masks.index.tobytes(), masks.words.tobytes()))
        return masks


def _ranks(config: EngineConfig, rank: int) -> ProcessGroup:
    return ProcessGroup(rank, config.tensor_parallel_size, config.batch_invariant)


def _start(config: EngineConfig, part: LoadedModel, ranks: ProcessGroup, start_s: float) -> OverlappingRunner:
    device = _AgreedDevice(part.device, ranks) if part.device.type == "cuda" else FakeDevice()
    try:
        return start(config, part, device, *choose(config, part), start_s)
    except ProgramUnsupportedError as reason:
        raise refusal(config, str(reason)) from reason


class _AgreedDevice(CudaDevice):
    """Reports the memory of the fullest rank, so that all ranks make the same number of KV blocks."""

    def __init__(self, device: torch.device, ranks: ProcessGroup) -> None:
        super().__init__(device)
        self._ranks = ranks

    def memory(self) -> Memory:
        memory = torch.tensor(super().memory(), dtype=torch.int64, device=self.torch_device)
        return Memory(*self._ranks.all_gather(memory).amin(0).tolist())


_EXECUTED = -1
"""The id of a step that is launched and collected at once."""


class ParallelRunner:
    """Rank 0's OverlappingRunner: passes every call on to the followers, then makes it on this rank's own runner."""

    def __init__(self, runner: OverlappingRunner, followers: Followers, max_num_seqs: int) -> None:
        """runner: this rank's part."""
        self._runner = runner
        self._followers = followers
        self._sender = TableSender(max_num_seqs)

    @property
    def info(self) -> ModelInfo:
        return self._runner.info

    @property
    def max_steps_in_flight(self) -> int:
        return self._runner.max_steps_in_flight

    def add_row(self, row: int, request: InferRequest) -> None:
        """A request that is refused here is not sent to the others, which would refuse it too."""
        if request.sampling.prompt_logprobs is not None:  # the other ranks do not know what the row still needs
            raise ValueError("'prompt_logprobs' is not supported on several devices, expected null")
        self._runner.add_row(row, request)
        self._sender.forget(row)
        self._followers.tell(RowAdded(row, request))

    def remove_row(self, row: int) -> None:
        self._runner.remove_row(row)
        self._followers.tell(RowRemoved(row))

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        self.launch(_EXECUTED, plan, table)
        return self.collect()[1]

    def launch(self, step_id: int, plan: StepPlan, table: RowTable) -> None:
        step = self._sender.step(step_id, plan, table)
        try:
            self._followers.tell(step)
            if plan.masks is not None:
                plan = dataclasses.replace(plan, masks=_SharedMasks(plan.masks, self._followers))
            self._runner.launch(step_id, plan, table)
        except Exception as error:
            self._abandon(error)

    def collect(self) -> tuple[int, SampledTokens]:
        try:
            self._followers.tell(Collect())
            return self._runner.collect()
        except Exception as error:
            self._abandon(error)

    def close(self) -> None:
        self._followers.stop()
        self._runner.close()
        collectives.leave()
        self._followers.reap()

    def _abandon(self, error: Exception) -> NoReturn:
        self._followers.abandon(f"rank 0 failed in a step of all ranks ({type(error).__name__}: {error})")
