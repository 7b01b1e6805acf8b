"""A real Triton server in a process, serving a repository with our backend installed into it.

Where it comes from: a folder that holds `dist/` (bin, backends, caches of a Triton distribution) and `venv/` (the
Python of its stubs, with numpy < 2), named by LLMBACKEND_REAL_TRITON; how to make one is in docs/inside_triton.md.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmbackend.adapter.inside_triton.install import install
from tests.helpers.ports import free_port
from tests.helpers.waiting import eventually

VARIABLE = "LLMBACKEND_REAL_TRITON"
START_S = 180.0


def why_not_here() -> str:
    """The reason to skip; "" when there is a real Triton."""
    folder = os.environ.get(VARIABLE, "")
    if not folder:
        return f"{VARIABLE} does not name a folder with a real Triton (docs/inside_triton.md)"
    server = Path(folder) / "dist" / "bin" / "tritonserver"
    return "" if server.is_file() else f"{server} is not there"


@dataclass(frozen=True)
class Addresses:
    """What a client of either server needs: host:port."""

    http: str
    grpc: str
    metrics: str

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.http}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def metrics_text(self) -> str:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    def metric(self, name: str, model: str) -> float | None:
        """The sum of a metric's samples of one model; None when there is none."""
        pattern = rf'^{re.escape(name)}\{{[^}}]*model="{model}"[^}}]*\}} (\S+)$'
        samples = re.findall(pattern, self.metrics_text(), re.MULTILINE)
        return sum(map(float, samples)) if samples else None


@dataclass(frozen=True)
class TritonServer:
    addresses: Addresses
    process: subprocess.Popen[bytes]
    log: Path

    def children(self, of: int = 0) -> dict[int, str]:
        """Stubs, and what they started: process id → command. `of`: what this process started, 0 = the server."""
        return _descendants(of or self.process.pid)


@contextlib.contextmanager
def triton_server(repository: Path, work: Path, *flags: str) -> Iterator[TritonServer]:
    """Installs the backend, starts the server and waits until it is live; stops it, and finds nothing left."""
    folder = Path(os.environ[VARIABLE])
    backends = work / "backends"
    shutil.copytree(folder / "dist" / "backends" / "python", backends / "python")
    for name in ("llm", "vllm", "tensorrtllm"):
        install(backends, name)
    with (work / "server.log").open("wb") as log:
        addresses = Addresses(*(f"127.0.0.1:{free_port()}" for _ in range(3)))
        process = subprocess.Popen(
            [str(folder / "dist" / "bin" / "tritonserver"), *_flags(folder, backends, repository, addresses), *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(folder),
        )
    server = TritonServer(addresses, process, work / "server.log")
    try:
        _wait_until_live(server)
        yield server
        children = server.children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, server.log.read_text()[-3000:]
        eventually(lambda: not [name for pid, name in children.items() if Path(f"/proc/{pid}").exists()], 10)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _flags(folder: Path, backends: Path, repository: Path, addresses: Addresses) -> list[str]:
    flags = [f"--backend-directory={backends}", f"--cache-directory={folder / 'dist' / 'caches'}"]
    flags += ["--allow-gpu-metrics=false", f"--model-repository={repository}"]
    for protocol in ("http", "grpc", "metrics"):
        host, _, port = getattr(addresses, protocol).partition(":")
        flags += [f"--{protocol}-address={host}", f"--{protocol}-port={port}"]
    return flags


def _environment(folder: Path) -> dict[str, str]:
    """The stub's Python is the first on the path; the interpreter's library lies beside that of ours."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    site = next((folder / "venv" / "lib").glob("python3.*")) / "site-packages"
    libraries = [str(site / "nvidia_pytriton.libs"), str(sysconfig.get_config_var("LIBDIR"))]
    return environment | {
        "LD_LIBRARY_PATH": ":".join(libraries),
        "PATH": f"{folder / 'venv' / 'bin'}:{environment['PATH']}",
    }


def _wait_until_live(server: TritonServer) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert server.process.poll() is None, server.log.read_text()[-3000:]
        with contextlib.suppress(OSError):
            if server.addresses.status("/v2/health/live") == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"not live after {START_S} s: {server.log.read_text()[-3000:]}")


def _descendants(pid: int) -> dict[int, str]:
    found: dict[int, str] = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                with contextlib.suppress(OSError):
                    found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    found |= _descendants(child)
    return found
