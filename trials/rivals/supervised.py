"""A server, given by its command line, under the same supervisor as every other server here.

Used by the trials. Independent of faults and of the server. Invariants: when the server's first process ends, all its
processes are ended and it is restarted, like a container; when its liveness probe has failed three times in a row at
ten-second intervals, it is killed, as by Kubernetes with its defaults; leaving `supervised(...)` ends everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

START_TIMEOUT_S = 600.0
DISK_MIB = 512
LIVENESS_PERIOD_S = 10.0
LIVENESS_TIMEOUT_S = 5.0
LIVENESS_FAILURES = 3


@dataclass(frozen=True)
class Rival:
    """command: `{port}` and `{folder}` are replaced. model: in requests; "" = the first of `/v1/models`. health: the
    path that its documentation names for a probe of liveness."""

    name: str
    command: tuple[str, ...]
    port: int
    model: str = ""
    health: str = "/health"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


class Supervised:
    """One server and its restarts. Owner: the trial's event loop."""

    def __init__(self, rival: Rival, folder: Path) -> None:
        self.rival = rival
        self.folder = folder
        self.model = rival.model
        self.restarts = 0
        self.ready_s = 0.0
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> None:
        """In the folder, which is also that of temporary files and of the log."""
        command = [word.format(port=self.rival.port, folder=self.folder) for word in self.rival.command]
        environment = os.environ | {"TMPDIR": str(self.folder)}
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, env=environment, start_new_session=True
            )
        self._was_ready = False

    def kill(self) -> None:
        """All of its processes."""
        tree = self.processes()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()

    def processes(self) -> list[psutil.Process]:
        """Its first process, and all below it."""
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(self.pid)
            return [first, *first.children(recursive=True)]
        return []

    async def until_ready(self) -> None:
        """Raises RuntimeError where it does not come up."""
        began_s = time.monotonic()
        async with httpx.AsyncClient(trust_env=False, timeout=5) as http:
            while time.monotonic() < began_s + START_TIMEOUT_S:
                if self._process.poll() is not None:
                    raise RuntimeError(f"the server ended with exit code {self._process.returncode}")
                with contextlib.suppress(httpx.HTTPError):
                    answer = await http.get(f"http://{self.rival.address}/v1/models")
                    if answer.status_code == 200:
                        self.model = self.model or answer.json()["data"][0]["id"]
                        self.ready_s = time.monotonic() - began_s
                        return
                await asyncio.sleep(0.1)
        raise RuntimeError(f"the server is not ready after {START_TIMEOUT_S:g} s")

    async def supervise(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._restart())
            group.create_task(self._check_liveness())

    async def _restart(self) -> None:
        while True:
            if self._process.poll() is not None:
                self.kill()
                self._start()
                self.restarts += 1
            await asyncio.sleep(0.1)

    async def _check_liveness(self) -> None:
        """A server that has not been ready since its start is not checked, as with a startup probe."""
        failures = 0
        async with httpx.AsyncClient(trust_env=False, timeout=LIVENESS_TIMEOUT_S) as http:
            while True:
                is_live = await _is_live(http, f"http://{self.rival.address}{self.rival.health}")
                self._was_ready |= is_live
                failures = failures + 1 if self._was_ready and not is_live else 0
                if failures == LIVENESS_FAILURES:
                    self.kill()
                    failures = 0
                await asyncio.sleep(LIVENESS_PERIOD_S)


async def _is_live(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(url)).is_success
    except httpx.HTTPError:
        return False


@contextlib.asynccontextmanager
async def supervised(rival: Rival) -> AsyncIterator[Supervised]:
    """Ready. Its log is kept where the trial raises."""
    with _small_disk() as folder:
        server = Supervised(rival, folder)
        supervisor: asyncio.Task[None] | None = None
        try:
            await server.until_ready()
            supervisor = asyncio.create_task(server.supervise())
            yield server
        except BaseException:
            kept = shutil.copy(folder / "server.log", Path(tempfile.gettempdir()) / f"{rival.name.split()[0]}.log")
            print(f"the server's log: {kept}")
            raise
        finally:
            if supervisor is not None:
                supervisor.cancel()
                await asyncio.wait([supervisor])
            server.kill()


@contextlib.contextmanager
def _small_disk() -> Iterator[Path]:
    """A file system of its own where we may mount one, else a folder, which `fill` does not fill."""
    folder = Path(tempfile.mkdtemp(prefix="rival-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "rival", str(folder)]
    is_mounted = subprocess.run(mount, stderr=subprocess.DEVNULL, check=False).returncode == 0
    try:
        yield folder
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


def command_of(words: Sequence[str]) -> tuple[str, ...]:
    """Without the `--` before it."""
    return tuple(words[1:] if words[:1] == ["--"] else words)
