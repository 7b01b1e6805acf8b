"""The process of an isolated library: loads the library, and calls its functions on the host's behalf.

Invariant: everything initialised is finalised in reverse order, even after a failure, unless the process dies.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmbackend.backends.python.stub.host_link import HostLink
from llmbackend.backends.python.stub.packets import PacketReader, encode, socket_of
from llmbackend.backends.python.wire_messages import pack_error
from llmbackend.core.backend_api import BackendAttributes, TritonError, internal, not_found

from .children import Children
from .host_objects import BackendObject, Host, InstanceObject, ModelObject, RequestObject

_EXECUTE = "TRITONBACKEND_ModelInstanceExecute"
_log = logging.getLogger("llmbackend")


def prepare(loader: str, file: str) -> Callable[[bytes, int, int], None]:
    """Called in the fork server, once for all processes of the library `file`."""
    module, _, attribute = loader.partition(":")
    return partial(_run, partial(getattr(importlib.import_module(module), attribute), Path(file)))


def _run(load: Callable[[], Any], _order: bytes, calls_fd: int, events_fd: int) -> None:
    faulthandler.enable()
    calls, events = (socket_of(fd) for fd in (calls_fd, events_fd))
    link = HostLink(events)
    _log.handlers, _log.propagate = [_LogToHost(link)], False
    runner = _Runner(load, Host(link))
    reader = PacketReader(calls, is_trusted=True)
    while _serve_call(runner, link, reader, calls):
        pass


def _serve_call(runner: _Runner, link: HostLink, reader: PacketReader, calls: socket.socket) -> bool:
    """Answers one call; False after the last one."""
    received = reader.receive()
    if received is None:
        return False
    (verb, argument), parts = received
    answer: tuple[Any, Any]
    try:
        answer = None, getattr(runner, verb)(argument, parts)
    except TritonError as error:
        answer = pack_error(error), None
    except Exception as error:
        _log.exception("%s failed", verb)
        answer = pack_error(internal(f"{type(error).__name__}: {error}")), None
    encode(("done", answer, link.posted)).send(calls)
    return bool(verb != "finalize")


class _Runner:
    """One library with its backend, model and instance. The public methods are the host's calls."""

    def __init__(self, load: Callable[[], Any], host: Host) -> None:
        self._load = load
        self._host = host
        self._finalizers: list[Callable[[], None]] = []
        self._children: Children | None = None

    def initialize_backend(self, fields: tuple[str, str, dict[str, str], int], _parts: Sequence[Any]) -> Any:
        """Returns the attributes of the backend."""
        name, directory, config, log_level = fields
        _log.setLevel(log_level)
        self._library = self._load()
        if getattr(self._library, _EXECUTE, None) is None:
            raise not_found(f"unable to find required entrypoint '{_EXECUTE}' in backend library of '{name}'")
        backend = self._backend = BackendObject(self._host, name, directory, config)
        self._finalizers.append(partial(self._library.TRITONBACKEND_Finalize, backend))
        self._library.TRITONBACKEND_Initialize(backend)
        return self._attributes(backend)

    def initialize_model(self, fields: tuple[Any, ...], _parts: Sequence[Any]) -> None:
        model = self._model = ModelObject(self._host, self._backend, *fields)
        self._finalizers.append(partial(self._library.TRITONBACKEND_ModelFinalize, model))
        self._library.TRITONBACKEND_ModelInitialize(model)

    def initialize_instance(self, fields: tuple[Any, ...], _parts: Sequence[Any]) -> bool:
        """Returns whether the library implements a readiness check."""
        *own, config = fields
        self._model.take_config(config)
        instance = self._instance = InstanceObject(self._host, self._model, *own)
        self._finalizers.append(partial(self._library.TRITONBACKEND_ModelInstanceFinalize, instance))
        self._library.TRITONBACKEND_ModelInstanceInitialize(instance)
        self._children = Children()
        self._host.link.not_ready_reason = self._not_ready_reason
        return hasattr(self._library, "TRITONBACKEND_ModelInstanceReady")

    def execute(self, argument: tuple[int, Sequence[Any]], parts: Sequence[Any]) -> None:
        log_level, packed = argument
        if _log.level != log_level:
            _log.setLevel(log_level)
        requests = [RequestObject(self._host, self._model, one, parts) for one in packed]
        try:
            self._library.TRITONBACKEND_ModelInstanceExecute(self._instance, requests)
        except BaseException:  # the host keeps the requests and answers them
            for request in requests:
                self._host.link.cancellations.end(request.number)
            raise

    def finalize(self, _argument: None, _parts: Sequence[Any]) -> None:
        if self._children is not None:
            self._children.leave()
        for finalizer in reversed(self._finalizers):
            try:
                finalizer()
            except TritonError as error:
                _log.error("failed to finalize: %s", error.status)

    def _attributes(self, backend: BackendObject) -> tuple[list[tuple[str, int]], bool]:
        attributes = BackendAttributes()
        function = getattr(self._library, "TRITONBACKEND_GetBackendAttribute", None)
        try:
            if function is not None:
                function(backend, attributes)
        except TritonError as error:
            _log.warning("backend '%s': ignored attributes: %s", backend.name, error.status)
            attributes = BackendAttributes()
        groups = [(kind.value, count) for kind, count in attributes.preferred_groups]
        return groups, attributes.parallel_instance_loading

    def _not_ready_reason(self) -> str:
        try:
            self._library.TRITONBACKEND_ModelInstanceReady(self._instance)
        except TritonError as error:
            return error.message
        return ""


class _LogToHost(logging.Handler):
    def __init__(self, link: HostLink) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        self._link.post(("log", record.levelno, record.pathname, record.lineno, record.getMessage()))
