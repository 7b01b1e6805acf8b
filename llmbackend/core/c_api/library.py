"""Loads compiled backends, batching strategies, response caches and repository agents, and presents them to the host as
Python objects.

Invariants: the C API's library is loaded into the process's global scope before any other, so that the calls of a
library reach it whatever that library was linked with; a C object lives from its Initialize until after its Finalize.
Independent of what C objects contain (native/). Source: TritonBackend::LoadBackendLibrary in Triton's core.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import queue
import re
import struct
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import orjson

from ..backend_api import (
    Backend,
    BackendAttributes,
    ExecutionPolicy,
    InferenceResponse,
    InstanceGroupKind,
    MemoryType,
    MemoryUsage,
    MetricFamily,
    Model,
    ModelInstance,
    Request,
    ResponseFlag,
    Tenant,
    common_tenant,
)
from ..errors import ErrorCode, internal, not_found, unsupported
from ..repoagent_api import Action, Agent, AgentModel
from ..tensors import wire_view
from . import host_calls

_log = logging.getLogger(__name__)
_KINDS: Final = (InstanceGroupKind.AUTO, InstanceGroupKind.CPU, InstanceGroupKind.GPU, InstanceGroupKind.MODEL)
"""In the order of TRITONSERVER_InstanceGroupKind."""
_POLICIES: Final = (ExecutionPolicy.BLOCKING, ExecutionPolicy.DEVICE_BLOCKING)
_ACTIONS: Final = tuple(Action)
"""In the order of TRITONREPOAGENT_ActionType."""
_SERVER_LIBRARY: Final = re.compile(rb"\0(libtritonserver[^\0/]*\.so[^\0/]*)\0")
_SERVER_SONAME: Final = "libtritonserver.so"
STRATEGY_FUNCTIONS: Final = (
    "ModelBatchIncludeRequest", "ModelBatchInitialize", "ModelBatchFinalize", "ModelBatcherInitialize",
    "ModelBatcherFinalize",
)  # fmt: skip


@cache
def api() -> Any:
    """The extension module of the C API. Raises TritonError UNSUPPORTED if it was not compiled."""
    try:
        module: Any = importlib.import_module("._triton_api", __package__)
    except ImportError as error:
        raise unsupported(f"compiled backends cannot be loaded: the C API is not compiled here ({error})") from None
    ctypes.CDLL(module.__file__, mode=ctypes.RTLD_GLOBAL)
    module.set_host(host_calls)
    return module


def load(file: Path) -> ctypes.CDLL:
    """Raises TritonError INTERNAL with the loader's message."""
    _stand_in_for_renamed_servers(file)
    try:
        return ctypes.CDLL(str(file), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise internal(f"unable to load shared library: {error}") from None


def address_of(library: ctypes.CDLL, name: str, prefix: str = "TRITONBACKEND_") -> int:
    """The address of a function; 0 if the library does not have it."""
    try:
        return ctypes.cast(getattr(library, prefix + name), ctypes.c_void_p).value or 0
    except AttributeError:
        return 0


class CompiledBackend:
    """The functions of one shared library, called with the host's objects.

    TRITONBACKEND_* functions not exported by the library are absent, except those that manage C objects.
    """

    def __init__(self, file: Path) -> None:
        """Raises TritonError: INTERNAL with the loader's message, UNSUPPORTED without the C API."""
        self._api = api()
        self._library = load(file)
        self.__file__ = str(file)
        if self._address("ModelInstanceExecute"):
            self.TRITONBACKEND_ModelInstanceExecute = self._execute
        if self._address("GetBackendAttribute"):
            self.TRITONBACKEND_GetBackendAttribute = self._attributes
        if self._address("ModelInstanceReady"):
            self.TRITONBACKEND_ModelInstanceReady = lambda instance: self._call("ModelInstanceReady", instance)

    def _address(self, name: str) -> int:
        return address_of(self._library, name)

    def _call(self, name: str, subject: Backend | Model | ModelInstance) -> None:
        """Calls a function that takes the C object of `subject` as its only argument, if the library exports it."""
        address = self._address(name)
        if address and subject.state is not None:
            self._api.set_log_levels(host_calls.log_levels())
            raise_error(self._api.call(address, subject.state.object))

    # --- life cycle ---

    def TRITONBACKEND_Initialize(self, backend: Backend) -> None:
        config = orjson.dumps({"cmdline": dict(backend.config)}).decode()
        backend.state = Handle(self._api.new_backend(backend, backend.name, str(backend.directory), config))
        host_calls.family_makers.append(backend.metric_family)
        self._call("Initialize", backend)
        backend.execution_policy = _POLICIES[self._api.execution_policy(backend.state.object)]

    def TRITONBACKEND_Finalize(self, backend: Backend) -> None:
        try:
            self._call("Finalize", backend)
        finally:
            if backend.metric_family in host_calls.family_makers:
                host_calls.family_makers.remove(backend.metric_family)
            backend.state = None

    def TRITONBACKEND_ModelInitialize(self, model: Model) -> None:
        owner = model.backend.state.object
        where, completes = str(model.directory), model.auto_complete_config
        made = self._api.new_model(model, owner, model.name, model.version, where, completes)
        model.state = ModelHandle(made, self._api.deliver)
        self._call("ModelInitialize", model)
        self._api.set_outputs(made, tuple(output.name for output in model.config.output))

    def TRITONBACKEND_ModelFinalize(self, model: Model) -> None:
        try:
            self._call("ModelFinalize", model)
        finally:
            if model.state is not None:
                model.state.deliveries.close()
            model.state = None

    def TRITONBACKEND_ModelInstanceInitialize(self, instance: ModelInstance) -> None:
        instance.state = Handle(
            self._api.new_instance(
                instance,
                instance.model.state.object,
                instance.name,
                _KINDS.index(instance.kind),
                instance.device_id,
                instance.is_passive,
                (),
                (),
                orjson.dumps({_policy_name(instance): {}}).decode(),
            )
        )
        self._call("ModelInstanceInitialize", instance)

    def TRITONBACKEND_ModelInstanceFinalize(self, instance: ModelInstance) -> None:
        try:
            self._call("ModelInstanceFinalize", instance)
        finally:
            instance.state = None

    def LLMBACKEND_ModelInstanceMemoryUsage(self, instance: ModelInstance) -> Sequence[MemoryUsage]:
        """The last report of the instance."""
        return tuple(
            MemoryUsage(MemoryType.GPU if kind == 2 else MemoryType.CPU, device, byte_size)
            for kind, device, byte_size in instance.state.memory_usage
        )

    def _attributes(self, backend: Backend, attributes: BackendAttributes) -> None:
        address = self._address("GetBackendAttribute")
        error, groups, parallel = self._api.backend_attributes(address, backend.state.object)
        raise_error(error)
        attributes.preferred_groups = [(_KINDS[kind], count) for kind, count in groups]
        attributes.parallel_instance_loading = parallel

    def _execute(self, instance: ModelInstance, requests: Sequence[Request]) -> None:
        self._api.set_log_levels(host_calls.log_levels())
        instance.model.state.tenants = frozenset(request.tenant for request in requests)
        packed = tuple(map(_packed, requests))
        raise_error(self._api.execute(self._address("ModelInstanceExecute"), instance.state.object, packed))


class CompiledStrategy:
    """The functions of a batching strategy, `batchstrategy.so`, callable like those of a Python module."""

    def __init__(self, file: Path) -> None:
        """Raises TritonError as CompiledBackend does."""
        self._api = api()
        library = load(file)
        self.__name__ = str(file)
        for name in STRATEGY_FUNCTIONS:
            if address := address_of(library, name):
                setattr(self, f"TRITONBACKEND_{name}", partial(getattr(self, name), address))

    def ModelBatcherInitialize(self, address: int, model: Model) -> int:
        """The model may have any backend, so the strategy gets a C object of its own."""
        backend = model.backend
        owner = self._api.new_backend(backend, backend.name, str(backend.directory), "{}")
        self._objects = (
            owner,
            self._api.new_model(model, owner, model.name, model.version, str(model.directory), False),
        )
        error, batcher = self._api.new_batcher(address, self._objects[1])
        raise_error(error)
        return int(batcher)

    def ModelBatcherFinalize(self, address: int, batcher: int) -> None:
        raise_error(self._api.finalize(address, batcher))
        del self._objects

    def ModelBatchInitialize(self, address: int, batcher: int) -> int:
        error, batch = self._api.new_batch(address, batcher)
        raise_error(error)
        return int(batch)

    def ModelBatchIncludeRequest(self, address: int, request: Request, batch: int) -> bool:
        error, included = self._api.batch_includes(address, _packed(request), batch)
        raise_error(error)
        return bool(included)

    def ModelBatchFinalize(self, address: int, batch: int) -> None:
        raise_error(self._api.finalize(address, batch))


class CompiledCache:
    """A response cache in a shared library, `libtritoncache_<name>.so`: a CacheStore (core/caching.py).

    Source: TRITONCACHE_* of Triton's tritoncache.h.
    """

    is_shared = False
    """A library does not tell. So no load of a model gets responses of an earlier load."""

    def __init__(self, file: Path, settings: Mapping[str, str], metric_family: Callable[..., MetricFamily]) -> None:
        """Raises TritonError NOT_FOUND if one of a cache's four functions is missing, and the error of its
        initialisation."""
        self._api = api()
        library = load(file)
        names = ("CacheInitialize", "CacheFinalize", "CacheLookup", "CacheInsert")
        initialize, self._finalize, self._lookup, self._insert = (
            address_of(library, name, "TRITONCACHE_") for name in names
        )
        if not (initialize and self._finalize and self._lookup and self._insert):
            raise not_found(f"unable to find a required entrypoint of a cache in {file}: {', '.join(names)}")
        self._metric_family = metric_family
        host_calls.family_makers.append(metric_family)
        error, self._cache = self._api.new_cache(initialize, orjson.dumps(dict(settings)).decode())
        if error is not None:
            host_calls.family_makers.remove(metric_family)
        raise_error(error)

    def lookup(self, key: bytes) -> bytes | None:
        """Triton's caches return NOT_FOUND for a missing entry."""
        error, entry = self._api.cache_lookup(self._lookup, self._cache, key.hex())
        if error is None:
            return bytes(entry)
        if (failure := host_calls.error_from(error)).code is not ErrorCode.NOT_FOUND:
            _log.error("Failed to retrieve key: %s. %s", key.hex(), failure.status)
        return None

    def insert(self, key: bytes, entry: bytes) -> None:
        raise_error(self._api.cache_insert(self._insert, self._cache, key.hex(), entry))

    def close(self) -> None:
        error = self._api.finalize(self._finalize, self._cache)
        host_calls.family_makers.remove(self._metric_family)
        raise_error(error)


class CompiledAgent:
    """A repository agent. TRITONREPOAGENT_ModelAction is absent if the library does not export it."""

    def __init__(self, file: Path) -> None:
        """Raises TritonError: INTERNAL with the loader's message, UNSUPPORTED without the C API."""
        self._api = api()
        self._library = load(file)
        if self._address("ModelAction"):
            self.TRITONREPOAGENT_ModelAction = self._act

    def TRITONREPOAGENT_Initialize(self, agent: Agent) -> None:
        agent.state = self._api.new_agent()
        self._call_agent("Initialize", agent)

    def TRITONREPOAGENT_Finalize(self, agent: Agent) -> None:
        self._call_agent("Finalize", agent)
        agent.state = None

    def TRITONREPOAGENT_ModelInitialize(self, agent: Agent, model: AgentModel) -> None:
        model.state = self._api.new_agent_model(model, tuple(sorted(model.parameters.items())))
        self._call_model("ModelInitialize", agent, model)

    def TRITONREPOAGENT_ModelFinalize(self, agent: Agent, model: AgentModel) -> None:
        self._call_model("ModelFinalize", agent, model)
        model.state = None

    def _act(self, agent: Agent, model: AgentModel, action: Action) -> None:
        self._call_model("ModelAction", agent, model, _ACTIONS.index(action))

    def _address(self, name: str) -> int:
        return address_of(self._library, name, "TRITONREPOAGENT_")

    def _call_agent(self, name: str, agent: Agent) -> None:
        if address := self._address(name):
            raise_error(self._api.call(address, agent.state))

    def _call_model(self, name: str, agent: Agent, model: AgentModel, action: int = -1) -> None:
        if (address := self._address(name)) and model.state is not None:
            raise_error(self._api.call_agent(address, agent.state, model.state, action))


class Handle:
    """The `state` of a host object: its C object, and the memory that its backend reported."""

    def __init__(self, made: Any) -> None:
        self.object = made
        self.memory_usage: tuple[tuple[int, int, int], ...] = ()


class ModelHandle(Handle):
    """The handle of a model, and what its inferences on other models need."""

    def __init__(self, made: Any, deliver: Any) -> None:
        super().__init__(made)
        self.deliveries = Deliveries(deliver)
        self.tenants: frozenset[Tenant] = frozenset()
        """The tenants of the last Execute's requests: the C API does not name the request of an inference."""

    def tenant(self) -> Tenant:
        return common_tenant(self.tenants)


class Deliveries:
    """Delivers the responses of a model's inferences to its backend, in order, on a thread that backend code may block:
    the host's own callbacks must only enqueue."""

    def __init__(self, deliver: Any) -> None:
        self._deliver = deliver
        self._queue: queue.SimpleQueue[tuple[object, InferenceResponse | None, ResponseFlag] | None]
        self._queue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, delivery: object, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="compiled-backend-responses", daemon=True)
                self._thread.start()
        self._queue.put((delivery, response, flags))

    def close(self) -> None:
        """Ends the thread after all deliveries."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._pass_on(*item)
            del item  # otherwise it would live until the next item arrives

    def _pass_on(self, delivery: object, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        if response is None:
            self._deliver(delivery, None, int(flags))
            return
        try:
            self._deliver(delivery, host_calls.unpacked_response(response), int(flags))
        except Exception as error:  # raised before the backend's callback is called
            model = response.model_name
            failure = internal(f"the response of model '{model}' cannot be passed to a compiled backend: {error}")
            _log.error("%s", failure.message)
            substitute = InferenceResponse(model, response.model_version, response.request_id, error=failure)
            self._deliver(delivery, host_calls.unpacked_response(substitute), int(flags))


def raise_error(error: host_calls.ErrorPair | None) -> None:
    """Raises the error returned by a library's function."""
    if error is not None:
        raise host_calls.error_from(error)


def _policy_name(instance: ModelInstance) -> str:
    return f"gpu_{instance.device_id}" if instance.kind is InstanceGroupKind.GPU else "cpu"


def _packed(request: Request) -> tuple[Any, ...]:
    """The request as `_triton_api.execute` reads it. Fixed-size data is not copied."""
    trace = request.trace
    return (
        request,
        request.id,
        request.correlation_id,
        int(request.flags),
        request.timeout_us,
        request.parameters if type(request.parameters) is dict else dict(request.parameters),
        tuple((name, tensor.datatype, tensor.shape, wire_view(tensor)) for name, tensor in request.inputs.items()),
        tuple(request.requested_outputs),
        trace,
        "" if trace is None else trace.context or "",
    )


# --- backends linked with a server library of another name ------------------------------------------------------------


def _stand_in_for_renamed_servers(file: Path) -> None:
    """Wheels rename the server library that their backends are linked with (libtritonserver-717102f0.so). An empty
    library of that name is loaded first, so that the loader neither fails nor loads the real one next to ours."""
    for name in {found.decode() for found in _SERVER_LIBRARY.findall(file.read_bytes())} - {_SERVER_SONAME}:
        _load_empty_library(name)


@cache
def _load_empty_library(soname: str) -> ctypes.CDLL:
    with tempfile.NamedTemporaryFile(prefix="llmbackend-", suffix=".so") as file:
        file.write(_empty_library(soname))
        file.flush()
        return ctypes.CDLL(file.name)


def _empty_library(soname: str) -> bytes:
    """A shared object for this machine with the given name and no symbols. Layout: ELF header, three program headers,
    dynamic section, symbol hash table, symbol table, string table, all in one writable segment. Source: the ELF-64
    specification."""
    with open("/proc/self/exe", "rb") as own:
        machine = struct.unpack_from("<H", own.read(20), 18)[0]
    strings = b"\0" + soname.encode() + b"\0"
    dynamic_at = 64 + 3 * 56
    hash_at = dynamic_at + 7 * 16
    symbols_at = hash_at + 16
    strings_at = symbols_at + 24
    size = strings_at + len(strings)
    tags = ((14, 1), (4, hash_at), (5, strings_at), (6, symbols_at), (10, len(strings)), (11, 24), (0, 0))
    identity = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = struct.pack("<16sHHIQQQIHHHHHH", identity, 3, machine, 1, 0, 64, 0, 0, 64, 56, 3, 64, 0, 0)
    segment = struct.Struct("<IIQQQQQQ")
    load = segment.pack(1, 6, 0, 0, 0, size, size, 4096)
    dynamic = segment.pack(2, 6, dynamic_at, dynamic_at, dynamic_at, 7 * 16, 7 * 16, 8)
    stack = segment.pack(0x6474E551, 6, 0, 0, 0, 0, 0, 16)  # not executable
    table = b"".join(struct.pack("<QQ", tag, value) for tag, value in tags)
    return header + load + dynamic + stack + table + struct.pack("<4I", 1, 1, 0, 0) + bytes(24) + strings
