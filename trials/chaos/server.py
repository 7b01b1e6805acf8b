"""The server under test: a real `llmbackend serve` with the models that a set of rounds needs.

Used by every round. Independent of what is done to it. Invariant: leaving `running(...)` ends the server however the
round went, and reports whether an engine process outlived it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.server_process import ROOT, ServerProcess, start_server, write_mock_model

from .memory_limit import MemoryLimit
from .system_faults import SystemFaults

EXIT_TIMEOUT_S = 45.0


@dataclass(frozen=True)
class ModelSetup:
    """A model to serve: the mock, or a copy of the bundled demo model. `arguments`: engine arguments. `prepare`: what
    is done to the copy's version directory. `is_decoupled`: whether it may send many responses."""

    name: str
    is_demo: bool = False
    instances: int = 1
    parameters: tuple[tuple[str, str], ...] = ()
    arguments: tuple[tuple[str, Any], ...] = ()
    prepare: Callable[[Path], None] | None = None
    is_decoupled: bool = True


def mock(name: str, instances: int = 1, parameters: tuple[tuple[str, str], ...] = (), **arguments: Any) -> ModelSetup:
    return ModelSetup(name, False, instances, parameters, tuple(arguments.items()))


def demo(name: str, prepare: Callable[[Path], None] | None = None, **arguments: Any) -> ModelSetup:
    return ModelSetup(name, True, arguments=tuple(arguments.items()), prepare=prepare)


class ServerUnderTest:
    def __init__(
        self,
        directory: Path,
        process: ServerProcess,
        system_faults: SystemFaults | None = None,
        memory: MemoryLimit | None = None,
    ) -> None:
        self.directory = directory
        self.system_faults = system_faults
        self.memory = memory
        self.address = process
        self._process = process.process
        self._seen: set[psutil.Process] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fault_directory(self, model: str) -> Path:
        return _fault_directory(self.directory, model)

    def model_directory(self, model: str) -> Path:
        return self.directory / "models" / model

    # --- processes ----------------------------------------------------------------------------------------------------

    def engine_pids(self, model: str) -> list[int]:
        """Of the engine processes of a model that run now, oldest first."""
        return [process.pid for process, parent in self._processes_of(model) if parent != self.pid]

    def fork_server_pids(self, model: str) -> list[int]:
        """Of the processes from which a model's engines are forked, oldest first."""
        return [process.pid for process, parent in self._processes_of(model) if parent == self.pid]

    def _processes_of(self, model: str) -> list[tuple[psutil.Process, int]]:
        """With their parents' ids. Their command line holds the engine's arguments. An engine whose fork server was
        killed is no descendant of the server."""
        mark = str(self.fault_directory(model)) + '"'
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if mark in " ".join(process.cmdline()) and _is_alive(process):
                    found.append((process, process.ppid()))
                    self._seen.add(process)
        return sorted(found, key=lambda one: (one[0].create_time(), one[0].pid))

    async def engine_pid(self, model: str, timeout_s: float = 60.0) -> int:
        """The first engine process there is. Raises TimeoutError."""
        return (await self.engine_pids_other_than((), model, timeout_s))[0]

    async def engine_pids_other_than(self, old: Sequence[int], model: str, timeout_s: float = 60.0) -> list[int]:
        """Waits for engine processes beside `old`. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while True:
                if new := [pid for pid in self.engine_pids(model) if pid not in old]:
                    return new
                await asyncio.sleep(0.01)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    async def exit_code(self, timeout_s: float = EXIT_TIMEOUT_S) -> int | None:
        """None when it has not ended by then."""
        try:
            return await asyncio.to_thread(self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            return None

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    async def processes_left(self, timeout_s: float = 5.0) -> list[int]:
        """Engines and fork servers ever seen that still live `timeout_s` after the server has ended."""
        deadline_s = time.monotonic() + timeout_s
        while (left := [one.pid for one in self._seen if _is_alive(one)]) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.1)
        return left

    def remember_processes(self) -> None:
        for child in psutil.Process(self.pid).children(recursive=True):
            self._seen.add(child)

    def kill(self) -> None:
        for process in [self._process, *self._seen]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    async def get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(_request, f"http://{self.address.http}{path}", None)

    async def post(self, path: str, body: object = None) -> tuple[int, str]:
        return await asyncio.to_thread(_request, f"http://{self.address.http}{path}", json.dumps(body or {}).encode())

    async def metric(self, name: str, model: str) -> float:
        return await asyncio.to_thread(self.address.metric, name, model)

    async def index_row(self, model: str) -> dict[str, str]:
        _, text = await self.post("/v2/repository/index")
        rows: list[dict[str, str]] = json.loads(text)
        return next(row for row in rows if row["name"] == model)

    async def still_busy(self, model: str, timeout_s: float = 15.0) -> str:
        """Why the model is not idle (requests or KV blocks held) after `timeout_s`; "" when it is."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
            held = {name: value for name in names if (value := await self.metric(name, model))}
            if not held:
                return ""
            if time.monotonic() > deadline_s:
                return f"model {model} is not idle after {timeout_s:g} s: {held}"
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def running(
    *models: ModelSetup, arguments: Sequence[str] = (), has_system_faults: bool = False, memory_mib: int = 0
) -> AsyncIterator[ServerUnderTest]:
    """A server with `models` on free ports. Its directory (with the log) is kept when the round raises, and may be in
    `arguments` as {directory}. memory_mib: its limit; 0 = none."""
    directory = Path(tempfile.mkdtemp(prefix="llmbackend-chaos-"))
    for model in models:
        write_model(directory, model)
    command: tuple[str, ...] = (
        "--model-repository",
        str(directory / "models"),
        "--model-control-mode",
        "explicit",
        "--load-model=*",
    )
    command += tuple(argument.replace("{directory}", str(directory)) for argument in arguments)
    faults = SystemFaults(directory) if has_system_faults else None
    variables = faults.variables if faults is not None else {}
    memory = MemoryLimit(memory_mib) if memory_mib else None
    server: ServerUnderTest | None = None
    try:
        with (directory / "server.log").open("w") as log:
            setup = memory.setup if memory is not None else ""
            process = await asyncio.to_thread(start_server, *command, log=log, variables=variables, setup=setup)
        server = ServerUnderTest(directory, process, faults, memory)
        yield server
    except BaseException:
        print(f"the server's log: {directory / 'server.log'}")
        raise
    finally:
        if server is not None:
            server.kill()
        if memory is not None:
            memory.remove()
    shutil.rmtree(directory)


def write_model(directory: Path, model: ModelSetup) -> None:
    faults = _fault_directory(directory, model.name)
    faults.mkdir(parents=True)
    arguments = dict(model.arguments) | {"fault_directory": str(faults)}
    if model.is_demo:
        arguments |= {"num_threads": 1, "dtype": "float32"}
        version = directory / "models" / model.name / "1"
        shutil.copytree(ROOT / "model_repository" / "demo" / "1", version)
        if model.prepare is not None:
            model.prepare(version)
        (version / "model.json").write_text(json.dumps({"model": ".", **arguments}))
    else:
        write_mock_model(directory / "models", model.name, **arguments)
    config = ['backend: "llm"', f"instance_group [ {{ kind: KIND_CPU count: {model.instances} }} ]"]
    if not model.is_decoupled:
        config.append("model_transaction_policy { decoupled: false }")
    for key, value in model.parameters:
        config.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    (directory / "models" / model.name / "config.pbtxt").write_text("\n".join(config))


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _fault_directory(directory: Path, model: str) -> Path:
    return directory / "faults" / model


def _request(url: str, body: bytes | None) -> tuple[int, str]:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def nice(increment: int) -> None:
    """Lets everything else go first: called after the server was started, which must not inherit it."""
    os.nice(increment)
