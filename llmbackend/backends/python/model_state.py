"""One model version: where its model.py is, how its processes start, the configuration that it completes.

For: backend.py and the instances. Does not know: requests. Invariant: the process that ran auto_complete_config serves
the first instance that asks; each further instance, and each restart, gets its own process.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmbackend.core.backend_api import Model, internal, invalid_argument
from llmbackend.fork_server.host_policy import NO_POLICY, HostPolicy

from .config_json import config_from_dict, config_to_json
from .custom_metrics import MetricUsers, ModelMetrics
from .environments import PARAMETER, Environments
from .stub.packets import Message
from .stub_process import StubDeadError, StubProcess, StubRaisedError
from .stub_services import StubServices
from .wire_messages import not_healthy

BACKEND_NAME = "python"
DEFAULT_MODEL_FILENAME = "model.py"
STUB_TIMEOUT = "stub-timeout-seconds"
DEFAULT_STUB_TIMEOUT_S = 30.0
MAX_PROCESSES = max(64, 4 * (os.cpu_count() or 1))
"""Of one model: the number of instances may come from a client and must not exhaust the machine."""


@dataclass(slots=True)
class BackendState:
    """Shared by all models of one backend.

    environments  fork servers of stubs
    metric_users  model versions by metric
    """

    environments: Environments = field(default_factory=Environments)
    metric_users: MetricUsers = field(default_factory=MetricUsers)


class ModelState:
    """Owned by the host's model; instances ask it for their processes from any thread."""

    def __init__(self, model: Model) -> None:
        """Raises TritonError when there is no model.py, its environment is not usable, or too many processes are asked
        for."""
        self.model = model
        _check_process_count(model)
        self.stub_timeout_s = _timeout_s(model)
        shared: BackendState = model.backend.state
        self._metrics = ModelMetrics(model.backend, shared.metric_users)
        self._file = _file_of(model)
        parameters = model.config.parameters
        setting = parameters[PARAMETER].string_value if PARAMETER in parameters else ""
        self._fork_server = shared.environments.fork_server(setting, model.directory)
        self._lock = threading.Lock()
        self._spare: StubServices | None = None

    def auto_complete(self) -> None:
        """Lets the model's static `auto_complete_config` complete the configuration.

        Raises TritonError INTERNAL with the model's exception, or when it returns no ModelConfig.
        """
        self._spare = self.launch(self.model.name)
        self.load(self._spare)
        completed, _ = self.call(self._spare, "auto_complete", config_to_json(self.model.config))
        if completed is not None:
            self.model.set_config(config_from_dict(completed))

    def take_spare(self) -> StubServices | None:
        """A process that has loaded the model already."""
        with self._lock:
            spare, self._spare = self._spare, None
            return spare

    def launch(self, name: str, policy: HostPolicy = NO_POLICY) -> StubServices:
        """A process that has not loaded the model yet. policy: what it is bound to.

        Raises TritonError when it cannot be started.
        """
        services = StubServices(self.model, self._metrics)
        services.connect(StubProcess(name, self._fork_server, services.handle, policy))
        return services

    def load(self, stub: StubServices) -> None:
        """Raises TritonError INTERNAL with what running model.py raised. Does nothing the second time."""
        if not stub.has_model:
            self.call(stub, "hello", None, self.stub_timeout_s)
            self.call(stub, "load", (str(self._file), str(self.model.version_directory)))
            stub.has_model = True

    def call(self, stub: StubServices, verb: str, argument: Any, timeout_s: float | None = None) -> Message:
        """A call outside of execute. Raises TritonError INTERNAL with the cause."""
        try:
            return stub.process.call(verb, argument, timeout_s=timeout_s)
        except StubRaisedError as error:
            raise internal(str(error)) from None
        except StubDeadError as error:
            raise internal(
                f"{not_healthy(stub.process.name, str(error))}\n{stub.process.last_lines}".rstrip()
            ) from None
        except TimeoutError:
            stub.process.kill()
            raise internal(f"Stub process '{stub.process.name}' did not start within {timeout_s:g} s") from None

    def close(self) -> None:
        if (spare := self.take_spare()) is not None:
            spare.process.close(0.0)
        self._metrics.close()


def _check_process_count(model: Model) -> None:
    groups = model.config.instance_group
    count = sum(group.count * max(len(group.gpus), 1) for group in groups if not group.passive)
    if count > MAX_PROCESSES:
        raise invalid_argument(
            f"model '{model.name}' asks for {count} instances, each in its own process, expected at most "
            f"{MAX_PROCESSES}"
        )


def _file_of(model: Model) -> Path:
    """A python-based backend brings the model.py of all its models; otherwise each version has its own."""
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
        return float(text) if text else DEFAULT_STUB_TIMEOUT_S
    except ValueError:
        raise internal(f"backend config '{STUB_TIMEOUT}' must be a number of seconds, got '{text}'") from None
