"""Proxies for the host's objects in the process of an isolated library: backend_api's protocols over a HostLink.

Independent of the library. Invariants: changes take effect in the host in the order of the calls; a call waits for the
host only if it returns something, or if the host may refuse it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from llmbackend.backends.python.stub.host_link import HostLink
from llmbackend.backends.python.stub.pb_tensor import pack_tensor
from llmbackend.backends.python.wire_messages import (
    pack_error,
    pack_response,
    pack_tenant,
    unpack_error,
    unpack_response,
    unpack_tenant,
    unpack_tensor,
)
from llmbackend.core.backend_api import (
    API_VERSION,
    ExecutionPolicy,
    InferenceRequest,
    InferenceResponse,
    InstanceGroupKind,
    MetricKind,
    ModelConfig,
    ParameterValue,
    RawTensor,
    ReleaseFlag,
    RequestFlag,
    ResponseCallback,
    ResponseFlag,
    SendPolicy,
    Tensor,
    TritonError,
    invalid_argument,
)


class Host:
    """Asks the host. Thread-safe."""

    def __init__(self, link: HostLink) -> None:
        self.link = link

    def ask(self, verb: str, *arguments: Any) -> Any:
        """The host's answer. Raises its TritonError."""
        error, value = self.link.answer_to(verb, *arguments)
        if (refusal := unpack_error(error)) is not None:
            raise refusal
        return value


class BackendObject:
    """backend_api.Backend"""

    api_version = API_VERSION

    def __init__(self, host: Host, name: str, directory: str, config: Mapping[str, str]) -> None:
        self.state: Any = None
        self.execution_policy = ExecutionPolicy.BLOCKING
        self.send_policy = SendPolicy.IMMEDIATE
        self.resumes = False
        self.name = name
        self.directory = Path(directory)
        self.config = config
        self._host = host

    def metric_family(
        self,
        kind: MetricKind,
        name: str,
        description: str,
        label_names: Sequence[str] | None = (),
        buckets: Sequence[float] | None = None,
    ) -> MetricFamilyObject:
        self._host.ask("metric_family", kind.value, name, description)
        return MetricFamilyObject(self._host, kind.value, name, description)


class MetricFamilyObject:
    """backend_api.MetricFamily. The host removes a metric together with the last model version that created it, so that
    counts survive a restart."""

    def __init__(self, host: Host, kind: str, name: str, description: str) -> None:
        self._host = host
        self._family = (kind, name, description)
        self._numbers: dict[frozenset[tuple[str, str]], int] = {}

    def declare(self, buckets: Sequence[float] | None = None, /, **labels: str) -> None:
        self._number(labels, buckets)

    def increment(self, value: float = 1.0, /, **labels: str) -> None:
        self._change("increment", value, labels)

    def set(self, value: float, /, **labels: str) -> None:
        self._change("set", value, labels)

    def observe(self, value: float, /, **labels: str) -> None:
        self._change("observe", value, labels)

    def value(self, /, **labels: str) -> float:
        value: float = self._host.ask("metric_value", self._number(labels))
        return value

    def remove(self, /, **labels: str) -> None:
        """See the class."""

    def _change(self, action: str, value: float, labels: dict[str, str]) -> None:
        self._host.ask("metric_change", self._number(labels), action, value)

    def _number(self, labels: dict[str, str], buckets: Sequence[float] | None = None) -> int:
        """The host's id of the metric."""
        key = frozenset(labels.items())
        if key not in self._numbers:
            self._numbers[key] = self._host.ask("metric_open", *self._family, labels, buckets)
        return self._numbers[key]


class ModelObject:
    """backend_api.Model"""

    def __init__(
        self,
        host: Host,
        backend: BackendObject,
        name: str,
        version: int,
        directory: str,
        version_directory: str,
        config: bytes,
        completes: bool,
    ) -> None:
        self.state: Any = None
        self.backend = backend
        self.name = name
        self.version = version
        self.directory = Path(directory)
        self.version_directory = Path(version_directory)
        self.auto_complete_config = completes
        self.known_states: set[str] = set()
        """Names that the host has accepted as states."""
        self._host = host
        self.take_config(config)

    @property
    def config(self) -> ModelConfig:
        return copy.deepcopy(self._config)

    def take_config(self, serialized: bytes) -> None:
        self._config = ModelConfig.FromString(serialized)

    def set_config(self, config: ModelConfig) -> None:
        self.take_config(self._host.ask("set_config", config.SerializeToString()))

    def is_decoupled(self, name: str, version: int = -1) -> bool:
        return bool(self._host.ask("is_decoupled", name, version))

    def is_model_ready(self, name: str, version: int = -1) -> bool:
        return bool(self._host.ask("is_model_ready", name, version))

    def load_model(self, name: str, parameters: Mapping[str, str | bytes] | None = None) -> None:
        self._host.ask("load_model", name, parameters and dict(parameters))

    def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        self._host.ask("unload_model", name, unload_dependents)

    def infer_async(self, request: InferenceRequest, callback: ResponseCallback) -> InferenceObject:
        """A refusal arrives as a response with an error, because the call does not wait for the host."""
        parts: list[Any] = []
        fields = {
            "model_name": request.model_name,
            "model_version": request.model_version,
            "id": request.id,
            "inputs": [_packed_raw(tensor, parts) for tensor in request.inputs],
            "requested_outputs": request.requested_outputs,
            "parameters": dict(request.parameters),
            "correlation_id": request.correlation_id,
            "flags": int(request.flags),
            "priority": request.priority,
            "timeout_us": request.timeout_us,
            "tenant": pack_tenant(request.tenant),
            "parent": getattr(request.trace, "request_number", 0),
        }
        link = self._host.link
        return InferenceObject(link, link.start(("infer", fields), parts, partial(_deliver, callback)))


class InferenceObject:
    """backend_api.InferenceHandle"""

    def __init__(self, link: HostLink, number: int) -> None:
        self._link = link
        self._number = number

    def cancel(self) -> None:
        self._link.post(("cancel_infer", self._number))


def _packed_raw(tensor: Any, parts: list[Any]) -> tuple[Any, ...]:
    assert isinstance(tensor, RawTensor)
    parts.append(tensor.raw)
    return tensor.name, tensor.datatype, tensor.shape, len(parts) - 1


def _deliver(callback: ResponseCallback, answer: Any, parts: Sequence[Any], is_last: bool) -> None:
    """Called on the link's reading thread."""
    response = None
    if answer is not None:
        packed, name, version, request_id = answer
        outputs, parameters, error = unpack_response(packed, parts)
        response = InferenceResponse(name, version, request_id, tuple(outputs), parameters, error)
    callback(response, ResponseFlag.FINAL if is_last else ResponseFlag.NONE)


class InstanceObject:
    """backend_api.ModelInstance"""

    def __init__(self, host: Host, model: ModelObject, name: str, kind: str, device_id: int, is_passive: bool) -> None:
        self.state: Any = None
        self.model = model
        self.name = name
        self.kind = InstanceGroupKind(kind)
        self.device_id = device_id
        self.is_passive = is_passive
        self._post = host.link.post

    def report_statistics(self, request: RequestObject, success: bool, *times_ns: int) -> None:
        self._post(("statistics", request.number, success, *times_ns))

    def report_batch_statistics(self, batch_size: int, *times_ns: int) -> None:
        self._post(("batch_statistics", batch_size, *times_ns))

    def report_response_statistics(
        self, factory: FactoryObject, start_ns: int, output_start_ns: int, end_ns: int, error: TritonError | None = None
    ) -> None:
        packed = None if error is None else pack_error(error)
        self._post(("response_statistics", factory.request.number, start_ns, output_start_ns, end_ns, packed))


class TraceObject:
    """The part of a request's trace that a library can pass on."""

    def __init__(self, request_number: int, context: str) -> None:
        self.request_number = request_number
        self.context = context


class RequestObject:
    """backend_api.Request. Once it is released and its factories are closed, the host forgets it."""

    def __init__(self, host: Host, model: ModelObject, packed: Any, parts: Sequence[Any]) -> None:
        self.number, self.requested_outputs, fields = packed
        self.id, self.correlation_id, flags, self.timeout_us, self.parameters, inputs, context, tenant = fields
        self.flags = RequestFlag(flags)
        self.tenant = unpack_tenant(tenant)
        tensors = [unpack_tensor(tensor, parts) for tensor in inputs]
        self.inputs: Mapping[str, Tensor] = {tensor.name: tensor for tensor in tensors}
        self.trace = None if context is None else TraceObject(self.number, context)
        self.link = host.link
        self._host = host
        self._model = model
        self._lock = threading.Lock()
        self._is_released = False
        self._num_factories = 0
        host.link.cancellations.begin(self.number)

    @property
    def is_cancelled(self) -> bool:
        return self.link.cancellations.is_requested(self.number)

    def new_response(self) -> ResponseObject:
        return ResponseObject(self)

    def response_factory(self) -> FactoryObject:
        self._check_owned("make a response factory")
        with self._lock:
            self._num_factories += 1
        return FactoryObject(self)

    def new_state(self, tensor: Tensor) -> StateObject:
        self._check_owned("make a state")
        if tensor.name not in self._model.known_states:
            self._host.ask("check_state", self.number, tensor.name)
            self._model.known_states.add(tensor.name)
        return StateObject(self, tensor)

    def release(self, flags: ReleaseFlag = ReleaseFlag.ALL) -> None:
        self._check_owned("release it again")
        if flags & ReleaseFlag.RESCHEDULE:
            self._host.ask("reschedule", self.number)
            self._is_released = True
            self.link.cancellations.end(self.number)
            return
        with self._lock:
            self._is_released = True
            self.link.post(("release", self.number, self._num_factories > 0))
            self._close_if_done()

    def factory_closed(self) -> None:
        with self._lock:
            self._num_factories -= 1
            self._close_if_done()

    def _close_if_done(self) -> None:
        """Holds the lock."""
        if self._is_released and not self._num_factories:
            self.link.post(("closed", self.number))
            self.link.cancellations.end(self.number)

    def _check_owned(self, action: str) -> None:
        if self._is_released:
            raise invalid_argument(f"the request was released: cannot {action}")


class FactoryObject:
    """backend_api.ResponseFactory"""

    def __init__(self, request: RequestObject) -> None:
        self.request = request
        self._is_closed = False

    @property
    def is_cancelled(self) -> bool:
        return self.request.is_cancelled

    def new_response(self) -> ResponseObject:
        return ResponseObject(self.request)

    def send_flags(self, flags: ResponseFlag) -> None:
        self.request.link.post(("flags", self.request.number, int(flags)))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.request.factory_closed()


class ResponseObject:
    """backend_api.Response"""

    def __init__(self, request: RequestObject) -> None:
        self._request = request
        self._outputs: list[Tensor] = []
        self._parameters: dict[str, ParameterValue] = {}

    def add_output(self, tensor: Tensor) -> None:
        self._outputs.append(tensor)

    def set_parameter(self, name: str, value: ParameterValue) -> None:
        self._parameters[name] = value

    def send(
        self, flags: ResponseFlag = ResponseFlag.NONE, error: TritonError | None = None, delta: bytes = b""
    ) -> None:
        parts: list[Any] = []
        response = InferenceResponse("", 0, "", tuple(self._outputs), self._parameters, error)
        packed = pack_response(response, parts)
        self._request.link.post(("response", self._request.number, packed, int(flags)), parts)


class StateObject:
    """backend_api.State"""

    def __init__(self, request: RequestObject, tensor: Tensor) -> None:
        self._request = request
        self._tensor = tensor

    def update(self) -> None:
        parts: list[Any] = []
        tensor = self._tensor
        packed = pack_tensor(tensor.name, tensor.datatype, tensor.data, parts)
        self._request.link.post(("state", self._request.number, packed), parts)
