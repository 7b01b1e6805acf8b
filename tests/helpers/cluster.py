"""A cluster on this machine: servers started with `--cluster`, and the processes that belong to them.

Used by tests of the cluster. Independent of what they check. Invariant: nothing of Ray is left when a cluster is
closed.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from llmbackend.cluster.model_cache import DIRECTORY
from llmbackend.cluster.ray_node import NodeRecord
from llmbackend.engine.process.served.served_order import EngineRecord
from tests.helpers.server_process import ServerProcess, start_server
from tests.helpers.waiting import eventually


@contextmanager
def run_folder() -> Iterator[Path]:
    """With a short path, as Ray's sockets need it. Whatever was started with it has ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="llmb-") as name:
        try:
            yield Path(name)
        finally:
            for pid in processes_of(Path(name)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            eventually(lambda: not processes_of(Path(name)))


def processes_of(folder: Path) -> dict[int, str]:
    """Process ids and commands of all that were started for a run folder."""
    found = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with suppress(OSError):
            environment = (process / "environ").read_bytes()
            if f"LLMBACKEND_CLUSTER_RUN_FOLDER={folder}\0".encode() in environment:
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return {pid: command for pid, command in found.items() if command}


def engines_of(folder: Path) -> list[EngineRecord]:
    return [msgspec.json.decode(file.read_bytes(), type=EngineRecord) for file in folder.glob("engine-*.json")]


def start_machine(
    folder: Path,
    secrets: Path,
    *arguments: str,
    cluster: str = "auto",
    works_in: Path | None = None,
    log: IO[str] | None = None,
    metrics_port: int = 0,
) -> ServerProcess:
    """Its copies of models are in `copies_of(folder)`."""
    own = ("--cluster", cluster, "--cluster-port", "0", "--cluster-secrets", secrets, "--cluster-run-folder", folder)
    variables = {DIRECTORY: str(folder / "copies")}
    ours = (*map(str, own), *arguments)
    return start_server(*ours, folder=works_in, variables=variables, log=log, metrics_port=metrics_port)


def copies_of(folder: Path) -> list[Path]:
    """Of models that the machine was sent."""
    return [path for path in (folder / "copies").glob("*") if path.is_dir()]


def head_of(folder: Path) -> str:
    """The address of the head of the cluster that a machine belongs to."""
    return msgspec.json.decode((folder / "node.json").read_bytes(), type=NodeRecord).address
