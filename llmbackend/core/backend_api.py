"""THE contract between the host and a backend: what a backend sees, and what it must export.

For: backend authors and the host; nothing else of the host may be imported by a backend. Does not know: LLMs, wire
protocols, how the host is built. Source: Triton's `tritonbackend.h` (API 1.19), names kept; a C function
`TRITONBACKEND_XDoY(x, …)` is the method `X.do_y(…)` here.

A backend is a Python module with these functions; only Execute is required, the others may be missing:

    TRITONBACKEND_Initialize(backend: Backend) -> None                    once per backend, before any model of it
    TRITONBACKEND_GetBackendAttribute(backend, attributes: BackendAttributes) -> None
    TRITONBACKEND_Finalize(backend) -> None                               at server teardown
    TRITONBACKEND_ModelInitialize(model: Model) -> None                   once per model version; may call
    model.set_config TRITONBACKEND_ModelFinalize(model) -> None                            after its instances
    TRITONBACKEND_ModelInstanceInitialize(instance: ModelInstance) -> None
    TRITONBACKEND_ModelInstanceExecute(instance, requests: Sequence[Request]) -> None
    TRITONBACKEND_ModelInstanceReady(instance) -> None                    raise TritonError = not ready; any thread
    TRITONBACKEND_ModelInstanceFinalize(instance) -> None

An entry point fails by raising TritonError (any other exception counts as INTERNAL). After a failed Initialize, at
each of the three levels, the matching Finalize IS still called, so it must accept a `state` that is still None.

Ownership: before Execute the host owns the requests. If Execute returns, the backend owns every one of them: it must
complete each (a response or flags with ResponseFlag.FINAL) and release each exactly once. If Execute raises, the host
still owns all of them and answers each with that error; the backend must have sent and released none. A request may
be released as soon as its inputs are no longer needed; a ResponseFactory made before the release lives on until it is
closed.

Sending: `Response.send` never waits, so that one thread can send for many requests. Where an ensemble takes the
responses of a decoupled model more slowly than it makes them (`max_inflight_requests`), they are kept up to a bound,
and past it that request alone ends with an error and is cancelled at the backend. A backend that gives each request, or
each instance, a thread of its own to send from may ask to be paused instead: see SendPolicy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntFlag
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tritonclient.grpc.model_config_pb2 import ModelConfig

from .errors import (
    ErrorCode,
    TritonError,
    cancelled,
    internal,
    invalid_argument,
    not_found,
    request_tag,
    shown,
    unavailable,
    unsupported,
)
from .tenants import NO_TENANT, Tenant, common_tenant
from .tensors import (
    CONFIG_TYPE_OF_DATATYPE,
    DATATYPE_OF_CONFIG_TYPE,
    DATATYPE_OF_DTYPE,
    NUMPY_DTYPE,
    Tensor,
    element_count,
)

__all__ = [
    "API_VERSION",
    "CONFIG_TYPE_OF_DATATYPE",
    "DATATYPE_OF_CONFIG_TYPE",
    "DATATYPE_OF_DTYPE",
    "NO_TENANT",
    "NUMPY_DTYPE",
    "Backend",
    "BackendAttributes",
    "ErrorCode",
    "ExecutionPolicy",
    "InnerCallback",
    "InnerHandle",
    "InnerRequest",
    "InnerResponse",
    "InstanceGroupKind",
    "MetricFamily",
    "MetricKind",
    "Model",
    "ModelConfig",
    "ModelInstance",
    "ParameterValue",
    "ReleaseFlag",
    "Request",
    "RequestFlag",
    "RequestTrace",
    "Response",
    "ResponseFactory",
    "ResponseFlag",
    "SendPolicy",
    "State",
    "Tenant",
    "Tensor",
    "TritonError",
    "cancelled",
    "check_api_version",
    "common_tenant",
    "element_count",
    "internal",
    "invalid_argument",
    "is_final",
    "not_found",
    "request_tag",
    "shown",
    "unavailable",
    "unsupported",
]

API_VERSION = (1, 19)
ParameterValue = str | int | bool | float


class ExecutionPolicy(Enum):
    """BLOCKING: Execute blocks until the instance can take another call. DEVICE_BLOCKING: instances of one device
    share a thread.
    """

    BLOCKING = "BLOCKING"
    DEVICE_BLOCKING = "DEVICE_BLOCKING"


class SendPolicy(Enum):
    """What `Response.send` does for a request that is ahead of its ensemble. IMMEDIATE: it returns at once ("Sending").
    BLOCKING: it blocks the calling thread until the ensemble has room, for 300 s at most.
    """

    IMMEDIATE = "IMMEDIATE"
    BLOCKING = "BLOCKING"


class InstanceGroupKind(Enum):
    AUTO = "KIND_AUTO"
    CPU = "KIND_CPU"
    GPU = "KIND_GPU"
    MODEL = "KIND_MODEL"


class RequestFlag(IntFlag):
    SEQUENCE_START = 1
    SEQUENCE_END = 2


_NO_FLAGS = RequestFlag(0)


class ReleaseFlag(IntFlag):
    ALL = 1
    RESCHEDULE = 2


class ResponseFlag(IntFlag):
    NONE = 0
    FINAL = 1


def is_final(flags: ResponseFlag) -> bool:
    """Combining flags of an enum costs a microsecond, and each response is asked several times."""
    return flags is ResponseFlag.FINAL or (flags is not ResponseFlag.NONE and bool(flags & ResponseFlag.FINAL))


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricFamily(Protocol):
    """One Prometheus family. Source: TRITONSERVER_MetricFamily and TRITONSERVER_Metric."""

    def declare(self, buckets: Sequence[float] | None = None, /, **labels: str) -> None:
        """Makes the metric with these labels, at 0, if it is not there. `buckets`: a histogram's upper bounds,
        ascending, in the place of its family's. Raises TritonError INVALID_ARG for labels or buckets that can not be.
        """

    def increment(self, value: float = 1.0, /, **labels: str) -> None: ...
    def set(self, value: float, /, **labels: str) -> None: ...
    def observe(self, value: float, /, **labels: str) -> None: ...
    def value(self, /, **labels: str) -> float:
        """What a counter or gauge holds."""

    def remove(self, /, **labels: str) -> None:
        """Forgets the metric with exactly these labels, if it exists."""


class RequestTrace(Protocol):
    """The trace of a request that is traced: TRITONSERVER_InferenceTrace."""

    @property
    def context(self) -> str:
        """The model's OpenTelemetry span as the JSON text of its headers (`traceparent`); "" in mode triton."""


@dataclass(frozen=True, slots=True)
class InnerRequest:
    """A request that a model makes of another model of the host (or of itself), see `Model.infer_async`. The fields
    mean what they mean in a client's request. model_version -1 = the highest READY version; no `requested_outputs` =
    all of the model's outputs. `trace` and `tenant` are those of the request it is made for: it is traced as a child of
    it, and made on behalf of the same client.
    """

    model_name: str
    inputs: Sequence[Tensor] = ()
    model_version: int = -1
    id: str = ""
    requested_outputs: Sequence[str] = ()
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    correlation_id: int | str = 0
    flags: RequestFlag = _NO_FLAGS
    priority: int = 0
    timeout_us: int = 0
    trace: RequestTrace | None = None
    tenant: Tenant = NO_TENANT


class InnerResponse(Protocol):
    """One response to an InnerRequest. With `error` set, `outputs` is empty."""

    @property
    def model_name(self) -> str: ...
    @property
    def model_version(self) -> int: ...
    @property
    def request_id(self) -> str: ...
    @property
    def outputs(self) -> Sequence[Tensor]: ...
    @property
    def parameters(self) -> Mapping[str, ParameterValue]: ...
    @property
    def error(self) -> TritonError | None: ...


InnerCallback = Callable[[InnerResponse | None, ResponseFlag], None]
"""(response, flags) as TRITONSERVER_InferenceResponseCompleteFn_t; response None is a flags-only completion. Exactly
one call carries FINAL, and none comes after it. Any thread, amid that model's work: it must only enqueue."""


class InnerHandle(Protocol):
    def cancel(self) -> None:
        """Asks that request to stop: idempotent, any thread. Its FINAL callback still comes."""


class Backend(Protocol):
    """A loaded backend. `state` is the backend's own slot, None until it sets it. Policies are set in Initialize."""

    state: Any
    execution_policy: ExecutionPolicy
    send_policy: SendPolicy

    @property
    def name(self) -> str: ...
    @property
    def directory(self) -> Path:
        """Where the backend's module was found."""

    @property
    def api_version(self) -> tuple[int, int]: ...
    @property
    def config(self) -> Mapping[str, str]:
        """The merged `--backend-config` settings (Triton's `{"cmdline": {...}}`), all strings."""

    def metric_family(
        self,
        kind: MetricKind,
        name: str,
        description: str,
        label_names: Sequence[str] | None = (),
        buckets: Sequence[float] | None = None,
    ) -> MetricFamily:
        """The family of that name, made at the first call, whose description stays. `label_names`: of all its metrics;
        None: each metric names its own.

        Raises TritonError ALREADY_EXISTS when it exists with another kind or label names.
        """


@dataclass
class BackendAttributes:
    """What TRITONBACKEND_GetBackendAttribute may fill in: instance groups for models that name none, and parallel
    loading.
    """

    preferred_groups: list[tuple[InstanceGroupKind, int]] = field(default_factory=list)
    parallel_instance_loading: bool = False


class Model(Protocol):
    """One version of a model. `state` is the backend's own slot."""

    state: Any

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def directory(self) -> Path:
        """The model's directory, `<repository>/<model>`; versions live under it."""

    @property
    def version_directory(self) -> Path: ...
    @property
    def config(self) -> ModelConfig:
        """A copy of the configuration as it stands."""

    def set_config(self, config: ModelConfig) -> None:
        """Auto-complete: takes max_batch_size, input, output, the scheduling choice (if none is set),
        model_transaction_policy and (ours) parameters that are not set from `config`. Only valid inside
        ModelInitialize; UNSUPPORTED elsewhere."""

    @property
    def auto_complete_config(self) -> bool:
        """False under --disable-auto-complete-config: then set_config must not be called."""

    def infer_async(self, request: InnerRequest, callback: InnerCallback) -> InnerHandle:
        """Runs an inference on another model inside the host (BLS): TRITONSERVER_ServerInferAsync for backends.

        Returns at once; the responses come through `callback`, from one for an ordinary model to any number for a
        decoupled one. The request is validated, scheduled, counted and cancelled like a client's, and its model is
        not unloaded before it ended. It is served while the server stops, too. Cancelling the request that it is made
        for does not cancel it: register `handle.cancel` with Request.on_cancel where that is wanted.

        Raises TritonError when it is refused (unknown or unready model, bad input, full queue, with Triton's texts);
        then `callback` is never called.
        """

    def is_decoupled(self, name: str, version: int = -1) -> bool:
        """Whether a READY model may answer with any number of responses. Raises TritonError as `infer_async` does."""

    def is_model_ready(self, name: str, version: int = -1) -> bool:
        """False also for a model that is unknown or not loaded."""

    def load_model(self, name: str, parameters: Mapping[str, str | bytes] | None = None) -> None:
        """Loads or reloads a model of the repository, as a client's load request does; blocks until done. For the
        parameters see LoadParameters ("config", "file:<path>"). Raises TritonError when that fails, and UNAVAILABLE
        where the model control mode is not explicit. A model must not load itself from its own ModelInitialize."""

    def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Begins to unload a model; its requests in flight run to their end. Raises TritonError as `load_model`."""


class ModelInstance(Protocol):
    """One instance: Execute is never called twice at once for it. `state` is the backend's own slot."""

    state: Any

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> Model: ...
    @property
    def kind(self) -> InstanceGroupKind: ...
    @property
    def device_id(self) -> int: ...
    @property
    def is_passive(self) -> bool: ...
    def report_statistics(
        self,
        request: Request,
        success: bool,
        exec_start_ns: int,
        compute_start_ns: int,
        compute_end_ns: int,
        exec_end_ns: int,
    ) -> None:
        """Once per request, BEFORE its release; times are time.monotonic_ns(). With success=False they are ignored
        and a failure with reason BACKEND is counted."""

    def report_batch_statistics(
        self, batch_size: int, exec_start_ns: int, compute_start_ns: int, compute_end_ns: int, exec_end_ns: int
    ) -> None:
        """Once per executed batch; without it the model's execution_count stays 0."""

    def report_response_statistics(
        self,
        factory: ResponseFactory,
        response_start_ns: int,
        compute_output_start_ns: int,
        response_end_ns: int,
        error: TritonError | None = None,
    ) -> None:
        """Once per response, keyed by its running index in `factory`. compute_output_start_ns 0 = an empty response."""


@runtime_checkable
class Request(Protocol):
    """One inference request. Inputs may be read until release."""

    @property
    def id(self) -> str:
        """The client's id, "" when it gave none. NOT unique: key nothing by it."""

    @property
    def correlation_id(self) -> int | str: ...
    @property
    def flags(self) -> RequestFlag: ...
    @property
    def priority(self) -> int: ...
    @property
    def timeout_us(self) -> int: ...
    @property
    def parameters(self) -> Mapping[str, ParameterValue]: ...
    @property
    def inputs(self) -> Mapping[str, Tensor]: ...
    @property
    def requested_outputs(self) -> Sequence[str]:
        """Names of the outputs the client wants; all outputs of the model when it named none."""

    @property
    def trace(self) -> RequestTrace | None:
        """None for a request that is not traced: most are not."""

    @property
    def tenant(self) -> Tenant:
        """On whose behalf it is made. Ours; inside NVIDIA's Triton, which knows no clients, always NO_TENANT."""

    @property
    def is_cancelled(self) -> bool: ...
    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once, on the canceller's thread, when the request is cancelled (at once if it already is).
        It must only enqueue. It outlives release, and is dropped when the request completes. Ours, not in Triton's
        header, where a backend can only poll."""

    def new_response(self) -> Response: ...
    def response_factory(self) -> ResponseFactory:
        """A factory that outlives the request's release. INVALID_ARG after release."""

    def new_state(self, tensor: Tensor) -> State:
        """TRITONBACKEND_StateNew: a new value of an implicit state, by the state's output name. INVALID_ARG after
        release, for a model without states, or for a name that is none of them."""

    def release(self, flags: ReleaseFlag = ReleaseFlag.ALL) -> None:
        """Gives the request back; its inputs must not be touched afterwards. With RESCHEDULE the host gives it to
        Execute again (iterative sequences only). INVALID_ARG when released twice, or for RESCHEDULE on a model without
        iterative sequences or after its sequence ended (the request then stays with the backend)."""


class State(Protocol):
    """A new value of an implicit state, not yet seen by anybody."""

    def update(self) -> None:
        """TRITONBACKEND_StateUpdate: the next request of the sequence gets it as its input."""


class Response(Protocol):
    """One response under construction; `send` ends its life, also when sending fails."""

    def add_output(self, tensor: Tensor) -> None: ...
    def set_parameter(self, name: str, value: ParameterValue) -> None: ...
    def send(self, flags: ResponseFlag = ResponseFlag.NONE, error: TritonError | None = None) -> None:
        """Hands it to the client. Blocks only under SendPolicy.BLOCKING."""


class ResponseFactory(Protocol):
    """Makes the responses of one request after it was released."""

    @property
    def is_cancelled(self) -> bool: ...
    def new_response(self) -> Response: ...
    def send_flags(self, flags: ResponseFlag) -> None:
        """A flags-only completion: `send_flags(ResponseFlag.FINAL)` ends a stream without one more response."""

    def close(self) -> None:
        """TRITONBACKEND_ResponseFactoryDelete: idempotent. An open factory keeps its model from unloading."""


def check_api_version(backend: Backend, built_for: tuple[int, int] = API_VERSION) -> None:
    """The rule every backend applies in Initialize: equal major, host minor at least the one built for.

    Raises TritonError UNSUPPORTED otherwise.
    """
    major, minor = backend.api_version
    if major != built_for[0] or minor < built_for[1]:
        raise unsupported("triton backend API version does not support this backend")
