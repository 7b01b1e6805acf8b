"""From a model's files to a runner over several devices: every rank loads, takes its part, meets the others, is proved.

For: make_runner on rank 0, and the followers' processes. Does not know: requests, schedules. Invariants: no rank meets
the others before all have their parts, so that what cannot be loaded is said, and nobody waits in vain.
"""

from __future__ import annotations

import contextlib
import logging
import time
from multiprocessing.connection import Connection

import msgspec
import torch

from ...config import EngineConfig
from ...decoder_description import UnrecognisedError
from ...loader import LoadedModel
from ...step import OverlappingRunner, RowTable
from ..choice import choose
from ..device import CudaDevice, Memory
from ..fake_device import FakeDevice
from ..start import start
from . import collectives
from .collectives import ProcessGroup
from .followers import Followers
from .messages import Collect, Join, Message, RowAdded, RowRemoved, Step, Stop
from .parallel_runner import ParallelRunner
from .part import load_part, refusal
from .table_mirror import apply

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
    """A follower's life."""
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
        # Rank 0 most likely fails with the same: it is to say so, and ends this process then.
        link.send_bytes(f"rank {rank}: {error}".encode())
        link.recv_bytes()
        return
    _serve(runner, config, link)
    runner.close()
    collectives.leave()


def _serve(runner: OverlappingRunner, config: EngineConfig, link: Connection) -> None:
    """Until rank 0 says stop, or is gone."""
    table = RowTable(config.max_num_seqs, runner.info.max_model_len, runner.info.block_size)
    while True:
        try:
            message = _decode(link.recv_bytes())
        except EOFError:
            return
        match message:
            case Step():
                runner.launch(message.step_id, apply(message, table), table)
            case Collect():
                runner.collect()
            case RowAdded():
                runner.add_row(message.row, message.request)
            case RowRemoved():
                runner.remove_row(message.row)
            case Stop() | Join():
                return


def _ranks(config: EngineConfig, rank: int) -> ProcessGroup:
    return ProcessGroup(rank, config.tensor_parallel_size, config.batch_invariant)


def _start(config: EngineConfig, part: LoadedModel, ranks: ProcessGroup, start_s: float) -> OverlappingRunner:
    device = _AgreedDevice(part.device, ranks) if part.device.type == "cuda" else FakeDevice()
    try:
        return start(config, part, device, *choose(config, part), start_s)
    except UnrecognisedError as reason:
        raise refusal(config, str(reason)) from reason


class _AgreedDevice(CudaDevice):
    """One that says of its memory what the fullest rank says, so that all make the same number of KV blocks."""

    def __init__(self, device: torch.device, ranks: ProcessGroup) -> None:
        super().__init__(device)
        self._ranks = ranks

    def memory(self) -> Memory:
        memory = torch.tensor(super().memory(), dtype=torch.int64, device=self.torch_device)
        return Memory(*self._ranks.all_gather(memory).amin(0).tolist())
