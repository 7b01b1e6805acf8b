"""From a model's files to a runner over several devices: every rank loads, takes its part, meets the others, is proved.

For: make_runner on rank 0, and the followers' processes. Does not know: requests, schedules. Invariants: no rank meets
the others before all have loaded, so that what cannot be loaded is said, and nobody waits in vain; a rank keeps its
part of the weights and nothing of the others'.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import time
from multiprocessing.connection import Connection

import msgspec
import torch
from torch import nn

from ...config import EngineConfig
from ...decoder_description import UnrecognisedError
from ...loader import LoadedModel, load_model
from ...process import lean_imports
from ...step import OverlappingRunner, RowTable
from ..choice import choose
from ..device import CudaDevice, Memory
from ..fake_device import FakeDevice
from ..quantized_weights import QuantizedLinear, check_device
from ..start import start
from . import collectives
from .collectives import ProcessGroup
from .followers import Followers
from .messages import Collect, Join, Message, RowAdded, RowRemoved, Step, Stop
from .parallel_runner import ParallelRunner
from .sharding import Sharding
from .table_mirror import apply

logger = logging.getLogger(__name__)

_decode = msgspec.msgpack.Decoder(Message).decode


def start_rank_0(config: EngineConfig, followers: Followers) -> ParallelRunner:
    """Raises ValueError or OSError with a text for the user; the followers are ended then."""
    start_s = time.monotonic()
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(followers.reap, 0.0)
        loaded = _load(config, 0)
        followers.expect_loaded()
        meeting, port = collectives.listen()
        followers.tell(Join(port))
        followers.watch()
        ranks = _join(config, 0, port, meeting)
        on_failure.callback(collectives.leave)
        runner = _start_part(config, loaded, ranks, start_s)
        on_failure.pop_all()
    return ParallelRunner(runner, followers, config.max_num_seqs)


def follow(config: EngineConfig, rank: int, link: Connection) -> None:
    """A follower's life."""
    start_s = time.monotonic()
    try:
        loaded = _load(config, rank)
    except Exception as error:
        link.send_bytes(f"rank {rank}: {error}".encode())
        return
    link.send_bytes(b"")
    join = _decode(link.recv_bytes())
    assert isinstance(join, Join)
    runner = _start_part(config, loaded, _join(config, rank, join.port), start_s)
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


def _join(config: EngineConfig, rank: int, port: int, meeting: socket.socket | None = None) -> ProcessGroup:
    size, device = config.tensor_parallel_size, _device(config, rank)
    return collectives.join(rank, size, device, port, config.load_timeout_s, meeting)


def _device(config: EngineConfig, rank: int) -> torch.device:
    first = torch.device(config.device)
    return torch.device("cuda", (first.index or 0) + rank) if first.type == "cuda" else first


def _load(config: EngineConfig, rank: int) -> LoadedModel:
    """The whole model, in host memory."""
    device = _device(config, rank)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"engine argument 'tensor_parallel_size' is {config.tensor_parallel_size}, from device '{config.device}' "
            f"on, but this torch ({torch.__version__}) sees {torch.cuda.device_count()} CUDA devices"
        )
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.num_threads or max(cores // config.tensor_parallel_size, 1))
    lean = lean_imports.without_compiler() if device.type == "cpu" else contextlib.nullcontext()
    with lean:
        loaded = load_model(msgspec.structs.replace(config, device="cpu"), dense=True)
    if config.quantization is not None:
        check_device(config.quantization, device, loaded.dtype)
    return loaded


def _start_part(config: EngineConfig, loaded: LoadedModel, ranks: ProcessGroup, start_s: float) -> OverlappingRunner:
    try:
        part = _part_of(loaded, ranks, _device(config, ranks.rank))
        device = _AgreedDevice(part.device, ranks) if part.device.type == "cuda" else FakeDevice()
        return start(config, part, device, *choose(config, part), start_s)
    except UnrecognisedError as reason:
        raise _refusal(config, str(reason)) from reason


def _part_of(loaded: LoadedModel, ranks: ProcessGroup, device: torch.device) -> LoadedModel:
    """The model's modules are left without weights: they only name the layers' KV memory from now on."""
    if loaded.decoder is None:
        raise UnrecognisedError(loaded.why_modules)
    sharding = Sharding(ranks, device)
    checked = loaded.checked
    part = dataclasses.replace(
        loaded,
        decoder=sharding.decoder(loaded.decoder, loaded.layer_shapes),
        layer_shapes=sharding.layer_shapes(loaded.layer_shapes),
        device=device,
        checked=dataclasses.replace(
            checked,
            sequences=tuple(sequence.to(device) for sequence in checked.sequences),
            logits=checked.logits.to(device),
        ),
    )
    _drop_weights(loaded.model)
    return part


def _drop_weights(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            del module.quantized
    for parameter in model.parameters():
        parameter.data = torch.empty(0)


def _refusal(config: EngineConfig, why: str) -> ValueError:
    size = config.tensor_parallel_size
    return ValueError(f"engine argument 'tensor_parallel_size' is {size}, which the model does not allow: {why}")


class _AgreedDevice(CudaDevice):
    """One that says of its memory what the fullest rank says, so that all make the same number of KV blocks."""

    def __init__(self, device: torch.device, ranks: ProcessGroup) -> None:
        super().__init__(device)
        self._ranks = ranks

    def memory(self) -> Memory:
        memory = torch.tensor(super().memory(), dtype=torch.int64, device=self.torch_device)
        return Memory(*self._ranks.all_gather(memory).amin(0).tolist())
