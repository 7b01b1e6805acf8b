"""One model version: its model.py, the environment of its processes, and the configuration that it completes.

The process that ran auto_complete_config serves the first instance; each further instance, and each restart, gets its
own process. Stubs run with the host's interpreter, or with that of EXECUTION_ENV_PATH.
Source: Triton python_backend documentation, "Creating Custom Execution Environments" (conda-pack archives and
directories).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from llmbackend.core.backend_api import (
    ENVIRONMENT_PARAMETER,
    Model,
    ModelConfig,
    config_to_json,
    internal,
    invalid_argument,
)
from llmbackend.fork_server.client import ForkServer, Program
from llmbackend.fork_server.host_policy import NO_POLICY, HostPolicy
from llmbackend.fork_server.process_resources import OwnedFolder

from .stub.packets import Message
from .stub_process import StubDeadError, StubProcess, StubRaisedError, output_log
from .stub_services import MetricUsers, ModelMetrics, StubServices
from .stub_supervisor import Spare
from .wire_messages import not_healthy

STUB_PACKAGE = ("triton_python_backend_stub", str(Path(__file__).parent / "stub"))
MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_INTERPRETERS = ("bin/python", "bin/python3")
ACTIVATE_TIMEOUT_S = 30.0
BACKEND_NAME = "python"
DEFAULT_MODEL_FILENAME = "model.py"
STUB_TIMEOUT = "stub-timeout-seconds"
DEFAULT_STUB_TIMEOUT_S = 30.0
MAX_PROCESSES = max(64, 4 * (os.cpu_count() or 1))
"""Limit per model: the number of instances may come from a client and must not exhaust the machine."""


class Environments:
    """The fork servers of stubs, one per environment, and the directories of unpacked archives, one per archive. Both
    exist as long as a model uses them; the server of the host's own environment, as long as the backend. An archive
    cannot write outside its directory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unpacked: dict[tuple[str, int, int], OwnedFolder] = {}
        self._fork_servers: dict[str, ForkServer] = {}
        self._num_users: Counter[str] = Counter()
        """Both by the path of the interpreter."""

    def acquire(self, setting: str, model_directory: Path) -> ForkServer:
        """Forks stubs in the environment EXECUTION_ENV_PATH (`setting`); "" = the host's own. `release` must follow.
        Raises TritonError INVALID_ARG if the path does not exist, INTERNAL if it contains no interpreter or cannot be
        activated."""
        with self._lock:
            try:
                fork_server = self._fork_server(*self._interpreter(setting, model_directory))
            except BaseException:
                self._remove_unused()
                raise
            self._num_users[fork_server.interpreter] += 1
            return fork_server

    def release(self, fork_server: ForkServer) -> None:
        with self._lock:
            self._num_users[fork_server.interpreter] -= 1
            self._remove_unused()

    def close(self) -> None:
        with self._lock:
            for fork_server in self._fork_servers.values():
                fork_server.close()
            self._fork_servers.clear()
            for folder in self._unpacked.values():
                folder.remove()
            self._unpacked.clear()

    def _remove_unused(self) -> None:
        for interpreter in self._fork_servers.keys() - {sys.executable}:
            if not self._num_users[interpreter]:
                self._fork_servers.pop(interpreter).close()
                del self._num_users[interpreter]
        for archive, folder in list(self._unpacked.items()):
            if not any(Path(interpreter).is_relative_to(folder.path) for interpreter in self._fork_servers):
                self._unpacked.pop(archive).remove()

    def _interpreter(self, setting: str, model_directory: Path) -> tuple[str, Path | None]:
        """Its path and its environment; None = the host's."""
        if not setting:
            return sys.executable, None
        path = self._path(setting, model_directory)
        root = path if path.is_dir() else self._unpack(path)
        for name in _INTERPRETERS:
            if os.access(root / name, os.X_OK):
                return str(root / name), root
        raise internal(f"{ENVIRONMENT_PARAMETER} '{path}' has no executable {' or '.join(_INTERPRETERS)}")

    def _fork_server(self, interpreter: str, root: Path | None) -> ForkServer:
        if interpreter not in self._fork_servers:
            variables, libraries = (dict(os.environ), "") if root is None else _activated(root)
            program = Program(
                "stubs",
                f"{STUB_PACKAGE[0]}.main",
                (libraries,),
                interpreter=interpreter,
                environment=variables,
                package=STUB_PACKAGE,
                ends_children=True,
            )
            self._fork_servers[interpreter] = ForkServer(program, _log)
        return self._fork_servers[interpreter]

    def _path(self, setting: str, model_directory: Path) -> Path:
        path = Path(setting.replace(MODEL_DIRECTORY, str(model_directory)))
        if not path.exists():
            raise invalid_argument(f"{ENVIRONMENT_PARAMETER} '{path}' does not exist")
        escapes = not path.resolve().is_relative_to(model_directory.resolve())
        if setting.startswith(MODEL_DIRECTORY) and ".." in path.parts and escapes:
            raise invalid_argument(f"{ENVIRONMENT_PARAMETER} '{path}' must not escape from the model directory")
        return path

    def _unpack(self, archive: Path) -> Path:
        facts = archive.stat()
        key = (str(archive.resolve()), facts.st_mtime_ns, facts.st_size)
        if key not in self._unpacked:
            folder = OwnedFolder("python-env")
            try:
                with tarfile.open(archive) as opened:
                    opened.extractall(folder.path, filter="tar")
            except (tarfile.TarError, OSError, EOFError) as error:
                folder.remove()
                raise internal(f"{ENVIRONMENT_PARAMETER} '{archive}' cannot be unpacked: {error}") from None
            self._unpacked[key] = folder
        return self._unpacked[key].path


def _log(line: str) -> None:
    output_log.info("python: %s", line.rstrip())


def _activated(root: Path) -> tuple[dict[str, str], str]:
    """The host's environment variables, as changed by the environment's activate script if it has one. The second value
    is a directory that was added in front of LD_LIBRARY_PATH, for the interpreter alone; "" = none."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    script = root / "bin" / "activate"
    if script.is_file():
        variables = _after(script, variables)
    binaries = root / "bin"
    if str(binaries) not in variables.get("PATH", "").split(os.pathsep):  # a moved venv names its old place
        variables["PATH"] = _before(binaries, variables.get("PATH", ""))
    if (root / "pyvenv.cfg").exists():
        variables["VIRTUAL_ENV"] = str(root)
        return variables, ""
    variables["CONDA_PREFIX"] = str(root)
    libraries = root / "lib"
    variables["LD_LIBRARY_PATH"] = _before(libraries, variables.get("LD_LIBRARY_PATH", ""))
    return variables, str(libraries)


def _after(script: Path, variables: dict[str, str]) -> dict[str, str]:
    """The environment variables after the script. Raises TritonError INTERNAL if it fails. Its output goes to files:
    processes that it leaves behind would keep pipes open."""
    command = ["bash", "-c", 'source "$0" >&2 && exec env -0', str(script)]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as messages:
        try:
            status = subprocess.run(
                command,
                timeout=ACTIVATE_TIMEOUT_S,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=messages,
            ).returncode
            cause = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            cause = f"it did not end within {ACTIVATE_TIMEOUT_S:g} s"
        except OSError as error:
            cause = str(error)
        if cause:
            messages.seek(0)
            text = f"{ENVIRONMENT_PARAMETER}: '{script}' failed: {cause}\n{messages.read().decode(errors='replace')}"
            raise internal(text.rstrip())
        output.seek(0)
        lines = os.fsdecode(output.read()).split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def _before(directory: Path, others: str) -> str:
    return f"{directory}{os.pathsep}{others}" if others else str(directory)


@dataclass(slots=True)
class BackendState:
    """Shared by all models of one backend."""

    environments: Environments = field(default_factory=Environments)
    metric_users: MetricUsers = field(default_factory=MetricUsers)


class ModelState:
    """Instances start their processes through it. Thread-safe."""

    def __init__(self, model: Model) -> None:
        """Raises TritonError if there is no model.py, its environment is unusable, or it has too many instances."""
        self.model = model
        _check_process_count(model)
        self.stub_timeout_s = _timeout_s(model)
        shared: BackendState = model.backend.state
        self._metrics = ModelMetrics(model.backend, shared.metric_users)
        self._file = _file_of(model)
        parameters = model.config.parameters
        setting = parameters[ENVIRONMENT_PARAMETER].string_value if ENVIRONMENT_PARAMETER in parameters else ""
        self._environments = shared.environments
        self._fork_server = self._environments.acquire(setting, model.directory)
        self.spare: Spare[StubServices] = Spare()
        """The process that ran auto_complete_config."""

    def auto_complete(self) -> None:
        """Calls the model's static `auto_complete_config`. Raises TritonError INTERNAL with its exception or if it
        returns no ModelConfig, INVALID_ARG for a field or value that ModelConfig does not have."""
        stub = self.launch(self.model.name)
        self.spare.put(stub)
        self.load(stub)
        completed, _ = self.call(stub, "auto_complete", config_text(self.model.config))
        if completed is not None:
            try:
                self.model.set_config(json_format.ParseDict(completed, ModelConfig()))
            except json_format.ParseError as error:
                raise invalid_argument(f"model configuration is not valid: {error}") from error

    def launch(self, name: str, policy: HostPolicy = NO_POLICY) -> StubServices:
        """A process that has not loaded the model yet, bound as specified by `policy`. Raises TritonError if that
        fails."""
        services = StubServices(self.model, self._metrics)
        services.connect(StubProcess(name, self._fork_server, services.handle, policy))
        return services

    def load(self, stub: StubServices) -> None:
        """Raises TritonError INTERNAL with the exception of model.py. Further calls do nothing."""
        if not stub.has_model:
            self.call(stub, "hello", None, self.stub_timeout_s)
            self.call(stub, "load", (str(self._file), str(self.model.version_directory)))
            stub.has_model = True

    def call(self, stub: StubServices, verb: str, argument: Any, timeout_s: float | None = None) -> Message:
        """Makes any call except execute. Raises TritonError INTERNAL with the cause."""
        try:
            return stub.process.call(verb, argument, timeout_s=timeout_s)
        except StubRaisedError as error:
            raise internal(str(error)) from None
        except StubDeadError as error:
            text = not_healthy(stub.process.name, str(error)).message
            raise internal(f"{text}\n{stub.process.last_lines}".rstrip()) from None
        except TimeoutError:
            stub.process.kill()
            raise internal(f"Stub process '{stub.process.name}' did not start within {timeout_s:g} s") from None

    def close(self) -> None:
        if (spare := self.spare.take()) is not None:
            spare.process.close(0.0)
        self._environments.release(self._fork_server)
        self._metrics.close()


def config_text(config: ModelConfig) -> str:
    return json.dumps(config_to_json(config), separators=(",", ":"))


def _check_process_count(model: Model) -> None:
    groups = model.config.instance_group
    count = sum(group.count * max(len(group.gpus), 1) for group in groups if not group.passive)
    if count > MAX_PROCESSES:
        raise invalid_argument(
            f"model '{model.name}' asks for {count} instances, each in its own process, expected at most "
            f"{MAX_PROCESSES}"
        )


def _file_of(model: Model) -> Path:
    """A Python-based backend has one model.py for all models; otherwise each version has its own."""
    if model.backend.name != BACKEND_NAME:
        file = model.backend.directory / DEFAULT_MODEL_FILENAME
    else:
        file = model.version_directory / (model.config.default_model_filename or DEFAULT_MODEL_FILENAME)
    if not file.is_file():
        raise internal(f"Failed to find the model file: {file} does not exist")
    return file


def _timeout_s(model: Model) -> float:
    text = model.backend.config.get(STUB_TIMEOUT, "")
    try:
        seconds = float(text) if text else DEFAULT_STUB_TIMEOUT_S
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise internal(f"backend config '{STUB_TIMEOUT}' must be a number of seconds above 0, got '{text}'")
    return seconds
