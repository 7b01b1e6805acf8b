"""What the ranks of one engine compute together: sums over ranks, and all ranks' rows.

For: sharded weights, which call it between two products of the program. Does not know: models, steps, processes.
Invariants: every rank makes the same calls in the same order, with the same shapes; all get the same bits, so that they
sample the same tokens without exchanging them; sockets listen on the loopback interface only.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"
_NETWORK_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The interfaces by which ranks find each other; data between the GPUs of a host do not use them."""


class Collectives(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> None:
        """x = the sum of all ranks' x, in place. x is contiguous."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x, by rank: [size, *x.shape]. x is contiguous."""


class ProcessGroup:
    """The ranks as the process group that `join` made: NCCL between GPUs, gloo between CPUs."""

    def __init__(self, rank: int, size: int, in_order: bool = False) -> None:
        """in_order: sums are computed in the order of ranks 0, 1, 2, …; with more than two ranks, a library's own order
        may depend on how many numbers there are to sum."""
        self.rank = rank
        self.size = size
        self._in_order = in_order and size > 2

    def all_reduce(self, x: torch.Tensor) -> None:
        if not self._in_order:
            dist.all_reduce(x)
            return
        first, *others = self.all_gather(x)
        for other in others:
            first += other
        x.copy_(first)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(gathered.unbind()), x)
        return gathered


def listen() -> tuple[socket.socket, int]:
    """The socket where the ranks will meet, and its port."""
    meeting = socket.create_server((LOOPBACK, 0))
    return meeting, int(meeting.getsockname()[1])


def join(
    ranks: ProcessGroup, device: torch.device, port: int, timeout_s: float, meeting: socket.socket | None = None
) -> None:
    """Meets the other ranks. meeting: rank 0's socket from `listen`. There is one group for a process, until `leave`.
    Raises RuntimeError when the other ranks do not come within timeout_s."""
    for name in _NETWORK_INTERFACES:
        os.environ.setdefault(name, "lo")
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK,
        port,
        ranks.size,
        is_master=meeting is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=meeting.detach() if meeting is not None else None,
    )
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
