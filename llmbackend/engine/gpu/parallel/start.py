"""From a model's files to one runner over several ranks: every rank loads its part, then all meet and agree on memory.

For: make_runner on rank 0; the other ranks (`follow.py`). Does not know: requests, schedules, which part a rank
computes.
Invariants: no rank meets the others before all have loaded their parts, so that a failed load is reported and not
waited for; all ranks' KV memory has the same number of blocks.
"""

from __future__ import annotations

import contextlib
import logging
import time

import msgspec
import torch

from llmbackend import __version__

from ...config import EngineConfig
from ...errors import ProgramUnsupportedError
from ...model.loader import LoadedModel
from ...rank_order import RankMeeting, fingerprint_of
from ..cpu_device import CpuDevice
from ..device import CudaDevice, Memory
from ..runner import GpuRunner, Sampling
from ..start import choose, start
from ..triton_needs import naming_what_triton_needs
from . import collectives
from .collectives import LOOPBACK, Ranks
from .followers import Followers, meet_followers
from .links import RankListener
from .messages import Join
from .parts import load_part, refusal
from .place import RankPlace
from .runner import ParallelRunner
from .shared_sampling import SharedSampling

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 1 << 30
"""KV memory of a rank on a processor, unless the config says otherwise."""


def start_rank_0(config: EngineConfig, others: Followers | RankMeeting) -> ParallelRunner:
    """others: forked, or to be met. Raises ValueError or OSError with a text for the user; the followers are ended
    then."""
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
        followers.tell(Join(address, port))
        followers.watch()
        ranks.join(part.device, address, port, config.load_timeout_s, meeting)
        on_failure.callback(collectives.leave)
        runner = start_part(config, part, ranks, start_s)
        on_failure.pop_all()
    return ParallelRunner(runner, followers, config.max_num_seqs)


def start_part(config: EngineConfig, part: LoadedModel, ranks: Ranks, start_s: float) -> GpuRunner:
    """This rank's runner. All ranks call it at the same time. Raises ValueError."""
    on_cpu, in_stages = part.device.type == "cpu", ranks.place.pipeline_size > 1
    if on_cpu and config.num_kv_blocks is None and config.kv_cache_memory_bytes is None:
        config = msgspec.structs.replace(config, kv_cache_memory_bytes=CPU_KV_BYTES)
    if on_cpu or in_stages:  # graphs would hold what stages send each other
        config = msgspec.structs.replace(config, enforce_eager=True)
    device = CpuDevice() if on_cpu else _AgreedDevice(part.device, ranks)
    on_failure = contextlib.nullcontext() if on_cpu else naming_what_triton_needs()
    try:
        ops, matmul, own_sampling = choose(config, part)
        sampling: Sampling = SharedSampling(ranks, own_sampling) if in_stages else own_sampling
        with on_failure:
            return start(config, part, device, ops, matmul, sampling, start_s, ranks)
    except ProgramUnsupportedError as reason:
        raise refusal(config, str(reason)) from reason


class _AgreedDevice(CudaDevice):
    """Reports the memory of the fullest rank, so that all ranks make the same number of KV blocks."""

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        super().__init__(device)
        self._ranks = ranks

    def memory(self) -> Memory:
        return Memory(*self._ranks.least(super().memory()))
