"""What `--cluster` and its flags mean, as one frozen object."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final


class ClusterError(Exception):
    """This machine cannot be, or stay, part of the cluster."""


AUTO: Final = "auto"
LOOPBACK: Final = "127.0.0.1"
DEFAULT_PORT: Final = 6379
DEFAULT_SECRETS: Final = Path("~/.llmbackend/cluster")


def default_run_folder() -> Path:
    """Short, because Ray's Unix sockets are in it; each user's own."""
    return Path(tempfile.gettempdir()) / f"llmbackend-ray-{os.getuid()}"


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Raises ValueError naming the field, the value and what was expected."""

    address: str
    """AUTO: the Ray node of this machine, or else a new cluster with this machine as its head; host:port: the head to
    join."""
    bind: str = LOOPBACK
    """This machine's address, at which the others reach it. LOOPBACK: a cluster of this machine alone."""
    port: int = DEFAULT_PORT
    """Of the head's Ray, where this machine becomes the head; 0: any."""
    secrets: Path = DEFAULT_SECRETS
    num_cpus: int | None = None
    """What this machine gives to engines; None: all that it has."""
    num_gpus: int | None = None
    run_folder: Path = field(default_factory=default_run_folder)
    """Ray's files of this machine, and what runs on it."""

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
