"""The functions of a backend whose instances run in their own processes.

The first process of a model version runs its ModelInitialize and then its first instance. Each further instance, and
each restart, gets another process with its own Backend and Model. Independent of what loads the library there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmbackend.backends.python import backend as python
from llmbackend.backends.python.stub_process import StubDeadError, StubProcess
from llmbackend.backends.python.stub_services import MetricUsers, ModelMetrics
from llmbackend.backends.python.stub_supervisor import Spare, StubSupervisor
from llmbackend.backends.python.wire_messages import not_healthy, unpack_error
from llmbackend.core.backend_api import (
    Backend,
    BackendAttributes,
    InstanceGroupKind,
    Model,
    ModelInstance,
    Request,
    SendPolicy,
    internal,
)
from llmbackend.fork_server.client import ForkServer, Program
from llmbackend.fork_server.host_policy import NO_POLICY, HostPolicy

from .process_services import ProcessServices, log_level

FINALIZE_TIMEOUT_S = 30.0
RESTART_TIMEOUT_S = 30.0
"""How long a batch waits while a process is being started."""
_log = logging.getLogger(__name__)


class IsolatedBackend:
    """Represents the library towards the host."""

    def __init__(self, file: Path, loader: str) -> None:
        """loader: "module:attribute", which creates an object with the TRITONBACKEND_* attributes of `file`."""
        self.__file__ = str(file)
        program = Program("compiled backends", f"{__package__}.process", (loader, str(file)), ends_children=True)
        self._fork_server = ForkServer(program, _log.info)
        self._attributes: tuple[Sequence[tuple[str, int]], bool] = ((), False)

    def TRITONBACKEND_Initialize(self, backend: Backend) -> None:
        """Starts a short-lived process to find out whether the library can be loaded, and its attributes."""
        backend.send_policy = SendPolicy.BLOCKING  # each process has its own thread for messages
        backend.state = MetricUsers()
        metrics = ModelMetrics(backend, backend.state)
        services = _launch(self._fork_server, None, metrics, backend.name)
        try:
            self._attributes = ask(services, "initialize_backend", _backend_fields(backend))
        finally:
            finalize(services)
            metrics.close()

    def TRITONBACKEND_GetBackendAttribute(self, backend: Backend, attributes: BackendAttributes) -> None:
        groups, attributes.parallel_instance_loading = self._attributes
        attributes.preferred_groups = [(InstanceGroupKind(kind), count) for kind, count in groups]

    def TRITONBACKEND_Finalize(self, backend: Backend) -> None:
        self._fork_server.close()
        backend.state = None

    def TRITONBACKEND_ModelInitialize(self, model: Model) -> None:
        model.state = ModelState(model, self._fork_server)
        model.state.initialize()

    def TRITONBACKEND_ModelInstanceInitialize(self, instance: ModelInstance) -> None:
        instance.state = InstanceState(instance, instance.model.state)
        instance.state.initialize()

    def TRITONBACKEND_ModelInstanceExecute(self, instance: ModelInstance, requests: Sequence[Request]) -> None:
        instance.state.execute(requests)

    TRITONBACKEND_ModelFinalize = staticmethod(python.TRITONBACKEND_ModelFinalize)
    TRITONBACKEND_ModelInstanceReady = staticmethod(python.TRITONBACKEND_ModelInstanceReady)
    TRITONBACKEND_ModelInstanceFinalize = staticmethod(python.TRITONBACKEND_ModelInstanceFinalize)
    LLMBACKEND_ModelInstanceKill = staticmethod(python.LLMBACKEND_ModelInstanceKill)
    LLMBACKEND_ModelInstanceMemoryUsage = staticmethod(python.LLMBACKEND_ModelInstanceMemoryUsage)


class ModelState:
    """One model version. Any thread may launch processes through it."""

    def __init__(self, model: Model, fork_server: ForkServer) -> None:
        self.model = model
        self._fork_server = fork_server
        self._metrics = ModelMetrics(model.backend, model.backend.state)
        self.spare: Spare[ProcessServices] = Spare()
        """The process that ran ModelInitialize."""

    def initialize(self) -> None:
        """Runs the library's ModelInitialize. Raises the library's error."""
        services = self.launch(self.model.name)
        self.spare.put(services)
        self.load(services, completes=self.model.auto_complete_config)

    def launch(self, name: str, policy: HostPolicy = NO_POLICY) -> ProcessServices:
        return _launch(self._fork_server, self.model, self._metrics, name, policy)

    def load(self, services: ProcessServices, *, completes: bool = False) -> None:
        """Runs ModelInitialize in a new process. completes: whether it may set the configuration."""
        if services.has_model:
            return
        ask(services, "initialize_backend", _backend_fields(self.model.backend))
        model = self.model
        ask(
            services,
            "initialize_model",
            (model.name, model.version, str(model.directory), str(model.version_directory), _config(model), completes),
        )
        services.has_model = True

    def close(self) -> None:
        if (spare := self.spare.take()) is not None:
            finalize(spare)
        self._metrics.close()


class InstanceState:
    """Execute is called on the instance's own thread, one call at a time."""

    def __init__(self, instance: ModelInstance, model_state: ModelState) -> None:
        self._instance = instance
        self._model_state = model_state
        launch = partial(model_state.launch, instance.name, instance.host_policy)
        self.supervisor = StubSupervisor(instance.name, launch, self._prepare, RESTART_TIMEOUT_S)

    def initialize(self) -> None:
        """Raises the error of the library's ModelInstanceInitialize."""
        self.supervisor.start(self._model_state.spare.take(self._instance.host_policy))

    def execute(self, requests: Sequence[Request]) -> None:
        """If it raises (the library's error, or that no process can take the requests), the host keeps the requests. If
        the process dies, they have been answered."""
        services = self.supervisor.get(requests)
        numbers, packed, parts = services.open(requests)
        try:
            error, _ = services.process.call("execute", (log_level(), packed), parts)[0]
        except StubDeadError:
            return
        except Exception:  # the requests have not reached the process
            services.give_back(numbers)
            raise
        if (failure := unpack_error(error)) is not None:
            services.give_back(numbers)
            raise failure

    def finalize(self) -> None:
        self.supervisor.close(FINALIZE_TIMEOUT_S)

    def _prepare(self, services: ProcessServices) -> None:
        self._model_state.load(services)
        instance = services.instance = self._instance
        fields = (instance.name, instance.kind.value, instance.device_id, instance.is_passive, _config(instance.model))
        services.tells_readiness = ask(services, "initialize_instance", fields)


def ask(services: ProcessServices, verb: str, argument: Any) -> Any:
    """The process's answer to a call. Raises the library's TritonError, or INTERNAL if the process ends."""
    process = services.process
    try:
        (error, value), _ = process.call(verb, argument)
    except StubDeadError as failure:
        text = not_healthy(process.name, str(failure)).message
        raise internal(f"{text}\n{process.last_lines}".rstrip()) from None
    if (refusal := unpack_error(error)) is not None:
        raise refusal
    return value


def finalize(services: ProcessServices) -> None:
    """Finalises everything initialised in the process, and ends it."""
    try:
        services.process.call("finalize", None, timeout_s=FINALIZE_TIMEOUT_S)
    except (StubDeadError, TimeoutError) as error:
        _log.error("process '%s' was not finalized: %s", services.process.name, error)
        services.process.kill()
    services.process.close(FINALIZE_TIMEOUT_S)


def _launch(
    fork_server: ForkServer,
    model: Model | None,
    metrics: ModelMetrics,
    name: str,
    policy: HostPolicy = NO_POLICY,
) -> ProcessServices:
    services = ProcessServices(model, metrics)
    services.connect(StubProcess(name, fork_server, services.handle, policy))
    return services


def _backend_fields(backend: Backend) -> tuple[str, str, dict[str, str], int]:
    return backend.name, str(backend.directory), dict(backend.config), log_level()


def _config(model: Model) -> bytes:
    return bytes(model.config.SerializeToString())
