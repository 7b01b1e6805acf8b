"""A server of this project in its own process, with the directories that the recordings used.

For: run.py. Does not know: transcripts. Invariant: the process is ended by its own pid, and its log is kept under the
work folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RECORDED_PORTS = {"http": "18000", "grpc": "18001", "metrics": "18002"}
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 40.0
NVIDIAS_BACKENDS = os.environ.get("LLMBACKEND_TRITON_BACKENDS")
"""A folder with NVIDIA's python backend, which then serves the models."""


@dataclass(frozen=True)
class Ports:
    http: int
    grpc: int
    metrics: int

    @classmethod
    def free(cls) -> Ports:
        sockets = [socket.socket() for _ in range(3)]
        try:
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            return cls(*(each.getsockname()[1] for each in sockets))
        finally:
            for each in sockets:
                each.close()


def make_work_folder(work: Path, models: Path) -> None:
    """$WORK as the recordings had it: repo, repo_none, repo_extra, dist/backends."""
    shutil.copytree(models / "repo", work / "repo")
    for name in ("identity", "llm"):
        shutil.copytree(models / "repo" / name, work / "repo_none" / name)
    shutil.copytree(models / "repo_extra", work / "repo_extra")
    shutil.copytree(models / "backends", work / "dist" / "backends")
    if NVIDIAS_BACKENDS:
        shutil.copytree(Path(NVIDIAS_BACKENDS) / "python", work / "dist" / "backends" / "python")


class Server:
    """Started in __enter__ and answering its health endpoint from then on; stopped with SIGTERM in __exit__."""

    def __init__(self, work: Path, log_name: str, arguments: Sequence[str]) -> None:
        self.work = work
        self.ports = Ports.free()
        self.event_log = work / "llm_events.log"
        self._log_path = work / f"{log_name}.log"
        self._arguments = [*arguments, *self._fixed_arguments()]
        self._process: subprocess.Popen[bytes] | None = None

    def _fixed_arguments(self) -> list[str]:
        arguments = ["--backend-directory", str(self.work / "dist" / "backends")]
        for protocol in ("http", "grpc", "metrics"):
            arguments += [
                f"--{protocol}-address",
                "127.0.0.1",
                f"--{protocol}-port",
                str(getattr(self.ports, protocol)),
            ]
        return arguments

    def __enter__(self) -> Server:
        command = [sys.executable, "-m", "llmbackend.cli", "serve", *self._arguments]
        environment = dict(
            os.environ, MODEL_EVENT_LOG=str(self.event_log), PYTHONUNBUFFERED="1", PYTHONDONTWRITEBYTECODE="1"
        )
        self.event_log.write_bytes(b"")
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            self._wait_until_live(self._process)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop()

    def _wait_until_live(self, process: subprocess.Popen[bytes]) -> None:
        give_up = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up:
            if process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.ports.http}/v2/health/live", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise RuntimeError(f"the server did not come up (exit code {process.poll()}); its log:\n{self.log_tail()}")

    def log_tail(self) -> str:
        return self._log_path.read_text(errors="replace")[-4000:]

    def _stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
