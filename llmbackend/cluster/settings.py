"""The settings of `--cluster` and its flags."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final


class ClusterError(Exception):
    """This machine cannot join the cluster, or cannot stay in it."""


AUTO: Final = "auto"
LOOPBACK: Final = "127.0.0.1"
DEFAULT_PORT: Final = 6379
DEFAULT_SECRETS: Final = Path("~/.llmbackend/cluster")


def default_run_folder() -> Path:
    """One per user. The path is short because it contains Ray's Unix sockets."""
    return Path(tempfile.gettempdir()) / f"llmbackend-ray-{os.getuid()}"


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Raises ValueError that names the field, its value and what was expected."""

    address: str
    """AUTO = this machine's Ray node, or a new cluster with this machine as its head; host:port = the head to join."""
    bind: str = LOOPBACK
    """The address at which other machines reach this one; LOOPBACK = a cluster of this machine alone."""
    port: int = DEFAULT_PORT
    """Ray's port if this machine is the head; 0 = any."""
    secrets: Path = DEFAULT_SECRETS
    num_cpus: int | None = None
    """CPUs for engines; None: all."""
    num_gpus: int | None = None
    """GPUs for engines; None: all."""
    run_folder: Path = field(default_factory=default_run_folder)
    """Ray's files on this machine, and records of the processes that run here."""

    def __post_init__(self) -> None:
        if self.address == AUTO:
            return
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"the address is '{self.address}', expected 'auto' or HOST:PORT of the cluster's head")
        if self.bind == LOOPBACK:
            raise ValueError(
                f"this machine's address is {LOOPBACK}, expected the one at which the cluster of {self.address} "
                "reaches it"
            )
