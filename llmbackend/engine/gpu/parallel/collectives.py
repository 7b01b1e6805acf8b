"""Which part of a split model a rank has, and the collective operations of ranks.

Used by sharded weights, between two products of the program; by the program of a stage; and by sampling. Ranks are
numbered as in vLLM: stage by stage, and within a stage by their shares of its layers. Invariants: rank 0 is the
engine's process, in the first stage; the samples of the last stage go to all; every rank makes the same calls in the
same order, with the same shapes; all ranks of a stage get the same bits, so they stay identical without further
exchange; sockets listen on the address where the ranks meet.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...config import EngineConfig


@dataclass(frozen=True, slots=True)
class RankPlace:
    rank: int
    tensor_size: int = 1
    """Ranks per stage."""
    pipeline_size: int = 1
    """Stages."""

    @classmethod
    def of(cls, config: EngineConfig, rank: int) -> RankPlace:
        return cls(rank, config.tensor_parallel_size, config.pipeline_parallel_size)

    @property
    def size(self) -> int:
        return self.tensor_size * self.pipeline_size

    @property
    def share(self) -> int:
        """The share of its stage's layers, 0 .. tensor_size - 1."""
        return self.rank % self.tensor_size

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_size

    @property
    def is_first(self) -> bool:
        """Whether this rank is in the first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pipeline_size - 1

    @property
    def sampler(self) -> int:
        """The rank whose samples all ranks use: the first one of the last stage."""
        return self.size - self.tensor_size

    def layers(self, num_layers: int, stage: int | None = None) -> range:
        """The layers of a stage, by default this rank's; divided as evenly as possible."""
        stage = self.stage if stage is None else stage
        return range(stage * num_layers // self.pipeline_size, (stage + 1) * num_layers // self.pipeline_size)


LOOPBACK = "127.0.0.1"
_NETWORK_INTERFACES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
"""Variables for the interface through which ranks find each other (data between the GPUs of one host does not use it),
and what precedes its name: NCCL takes a name without = as a prefix, so that eno1 would also mean eno12."""
_SIOCGIFADDR = 0x8915


class Ranks:
    """All ranks, with the process groups that `join` makes: NCCL between GPUs, gloo between CPUs."""

    def __init__(self, place: RankPlace) -> None:
        self.place = place
        self.of_stage = StageGroup(place.share, place.tensor_size)
        self._device = torch.device("cpu")

    @property
    def is_first(self) -> bool:
        return self.place.is_first

    @property
    def is_last(self) -> bool:
        return self.place.is_last

    def receive(self, residual: torch.Tensor) -> None:
        dist.recv(residual, self.place.rank - self.place.tensor_size)

    def send(self, residual: torch.Tensor) -> None:
        dist.send(residual, self.place.rank + self.place.tensor_size)

    def from_sampler(self, x: torch.Tensor) -> None:
        """Broadcasts x from the rank that samples to all ranks, in place."""
        dist.broadcast(x, self.place.sampler)

    def min_over_ranks(self, numbers: Sequence[int]) -> list[int]:
        """The element-wise minimum of the numbers of all ranks."""
        together = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.all_reduce(together, dist.ReduceOp.MIN)
        return together.tolist()

    def max_over_stages(self, count: int) -> int:
        return -self.min_over_ranks([-count])[0]

    def join(
        self, device: torch.device, address: str, port: int, timeout_s: float, meeting: socket.socket | None = None
    ) -> None:
        """Meets the other ranks. meeting: rank 0's socket from `listen`. A process has one group of ranks until
        `leave`. Raises RuntimeError if the other ranks do not connect within timeout_s."""
        place, timeout = self.place, timedelta(seconds=timeout_s)
        own_address = address if meeting is not None else _own_address(address, port)
        if interface := _interface_of(own_address):
            for name, prefix in _NETWORK_INTERFACES.items():
                os.environ.setdefault(name, prefix + interface)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            place.size,
            is_master=meeting is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=meeting.detach() if meeting is not None else None,
        )
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
        self._device = device
        self.of_stage.group = _stage_group(place)


class StageGroup:
    """The ranks of this rank's stage, and their collective operations."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.group: Any = None

    def all_reduce(self, x: torch.Tensor) -> None:
        """x = the sum of all ranks' x, in place. x is contiguous."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x, by rank: [size, *x.shape]. x is contiguous."""
        if self.size == 1:
            return x[None]
        gathered = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(gathered.unbind()), x, group=self.group)
        return gathered


def listen(address: str) -> tuple[socket.socket, int]:
    """The socket where the ranks will meet, and its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    meeting = socket.create_server((address, 0), family=family)
    return meeting, int(meeting.getsockname()[1])


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _stage_group(place: RankPlace) -> Any:
    """Every rank creates the groups of all stages, in the same order."""
    if place.pipeline_size == 1:
        return None
    width = place.tensor_size
    groups = [dist.new_group(list(range(i * width, (i + 1) * width))) for i in range(place.pipeline_size)]
    return groups[place.stage]


def _own_address(address: str, port: int) -> str:
    """This machine's address on the route to `address`. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str:
    """The network interface with this IPv4 address; "" = torch finds one."""
    if ":" in address:
        return ""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
