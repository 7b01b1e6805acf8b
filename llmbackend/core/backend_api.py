"""The contract between the host and a backend: what a backend exports, and what the host offers it.

A backend imports no other module of the host. Source: Triton's `tritonbackend.h` (API 1.19). A C function
`TRITONBACKEND_XDoY(x, …)` is the method `X.do_y(…)` here.

Functions
    A backend is a Python module with the functions below. Only TRITONBACKEND_ModelInstanceExecute is required.

    TRITONBACKEND_Initialize(backend: Backend) -> None
        Once per backend, before its first model. Sets the backend's policies.
    TRITONBACKEND_GetBackendAttribute(backend: Backend, attributes: BackendAttributes) -> None
        Fills in `attributes`. If it fails, the defaults are used.
    TRITONBACKEND_Finalize(backend: Backend) -> None
        When the server stops.

    TRITONBACKEND_ModelInitialize(model: Model) -> None
        Once per model version. May call `model.set_config`.
    TRITONBACKEND_ModelFinalize(model: Model) -> None
        After the model's instances are finalised.

    TRITONBACKEND_ModelInstanceInitialize(instance: ModelInstance) -> None
        Once per instance, after ModelInitialize.
    TRITONBACKEND_ModelInstanceExecute(instance: ModelInstance, requests: Sequence[Request]) -> None
        Computes a batch, or takes it over for later computation. Calls for one instance do not overlap.
    TRITONBACKEND_ModelInstanceReady(instance: ModelInstance) -> None
        Raises TritonError if the instance is not ready. Called from any thread.
    TRITONBACKEND_ModelInstanceFinalize(instance: ModelInstance) -> None
        Once the instance has no more requests.

    Not in Triton's API (LLMBACKEND_API_VERSION):

    LLMBACKEND_ModelForecast(model: Model) -> Mapping[str, Any]
        Properties and needs of an instance: JSON values by name, for `llmbackend check`. Called after ModelInitialize
        of a model that gets no instances. Raises the TritonError that an instance would fail with.
    LLMBACKEND_ModelInstanceMemoryUsage(instance: ModelInstance) -> Sequence[MemoryUsage]
        The instance's memory now, for statistics (in Triton reported by TRITONBACKEND_ModelInstanceReportMemoryUsage).
        Called from any thread, after ModelInstanceInitialize; it must not block.
    LLMBACKEND_ModelInstanceKill(instance: ModelInstance) -> int
        For instances with their own process: kills it with SIGKILL and returns its id, so that operators can test a
        crash. Raises TritonError UNAVAILABLE when there is no process now. Called from any thread.

    Not in Triton's API, for backends that report the activity of their instances (core/activity/messages.py); for
    others the host reports their requests:

    LLMBACKEND_ModelInstanceWatch(instance: ModelInstance, kinds: frozenset[str]) -> None
        What to report to `instance.activity` from now on ("requests", "steps", …); initially nothing. With "blocks",
        all blocks must be reported again. Called from any thread, under locks of the host: it must not block.
    LLMBACKEND_ModelInstanceDescribe(instance: ModelInstance) -> InstanceDescription
        The instance now. Called from any thread, after ModelInstanceInitialize.

Failure
    - A function fails by raising TritonError. Any other exception counts as INTERNAL.
    - After a failed Initialize, of a backend, a model or an instance, the matching Finalize is still called. It must
      accept a `state` that is still None.

Ownership of requests
    - Before Execute is called, the host owns the requests.
    - If Execute returns, the backend owns all of them. It must complete each request exactly once (a response or flags
      with ResponseFlag.FINAL) and release each exactly once.
    - If Execute raises, the host still owns all of them and answers each with that error. The backend must not have
      sent or released anything.
    - A request may be released as soon as its inputs are no longer needed. A ResponseFactory made before the release
      stays usable until it is closed.

Sending
    - `Response.send` does not block, so one thread can send for many requests. `with responses_together():` wakes the
      receivers once for all of them.
    - `ResponseFactory.send` sends a response in one call. Its outputs may be `Outputs`: plain values, which are
      converted to tensors only for clients that need them. Both make streams of small responses cheap.
    - An ensemble may take the responses of a decoupled model more slowly than the model sends them
      (`max_inflight_requests`). Responses are then held up to a limit in bytes; beyond it the request ends with an
      error and is cancelled at the backend. A backend that sends from a thread per request or per instance may choose
      to be blocked instead: see SendPolicy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntFlag
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.fork_server.host_policy import HostPolicy

from .activity.messages import InstanceActivity
from .config_readers import (
    ACCELERATORS_FIELD,
    ENVIRONMENT_PARAMETER,
    SERVED_MODEL_NAME,
    accelerator_names,
    config_to_json,
    served_names,
    split_names,
)
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
from .messages import (
    NO_TENANT,
    InferenceHandle,
    InferenceRequest,
    InferenceResponse,
    ParameterValue,
    RequestFlag,
    ResponseCallback,
    ResponseFlag,
    Resume,
    Tenant,
    common_tenant,
    is_final,
    responses_together,
)
from .metric_api import MemoryType, MemoryUsage, MetricFamily, MetricKind, process_memory
from .outputs import JSON, OutputLayout, Outputs, layout_of
from .tensors import (
    CONFIG_TYPE_OF_DATATYPE,
    DATATYPE_OF_CONFIG_TYPE,
    DATATYPE_OF_DTYPE,
    NUMPY_DTYPE,
    JsonTensor,
    RawTensor,
    Tensor,
    element_count,
)
from .tracing.trace import Attributes, RequestTrace, SpanEvent, TraceSpan

__all__ = [
    "ACCELERATORS_FIELD", "API_VERSION", "CONFIG_TYPE_OF_DATATYPE", "DATATYPE_OF_CONFIG_TYPE", "DATATYPE_OF_DTYPE",
    "ENVIRONMENT_PARAMETER", "JSON", "LLMBACKEND_API_VERSION", "NO_TENANT", "NUMPY_DTYPE", "SERVED_MODEL_NAME",
    "Attributes", "Backend", "BackendAttributes", "ErrorCode",
    "ExecutionPolicy", "HostPolicy", "InferenceHandle", "InferenceRequest", "InferenceResponse", "InstanceActivity",
    "InstanceGroupKind", "JsonTensor", "MemoryType", "MemoryUsage", "MetricFamily", "MetricKind", "Model",
    "ModelConfig", "ModelInstance", "OutputLayout", "Outputs", "ParameterValue", "RawTensor", "ReleaseFlag", "Request",
    "RequestFlag", "RequestTrace", "Response", "ResponseCallback", "ResponseFactory", "ResponseFlag", "Resume",
    "SendPolicy", "SpanEvent", "State", "Tenant", "Tensor", "TraceSpan", "TritonError", "accelerator_names",
    "cancelled", "check_api_version", "common_tenant", "config_to_json", "element_count", "internal",
    "invalid_argument", "is_final", "layout_of", "not_found", "process_memory", "request_tag", "responses_together",
    "served_names", "shown", "split_names", "unavailable", "unsupported",
]  # fmt: skip

API_VERSION = (1, 19)
"""The version of this module. A backend exports a constant with the version that it was written for."""
LLMBACKEND_API_VERSION = (1, 0)
"""The version of what is not in Triton's API: LLMBACKEND_* functions, and what this module describes as such. A backend
that uses any of it exports a constant LLMBACKEND_API_VERSION with the version that it was written for."""
_log = logging.getLogger(__name__)


class ExecutionPolicy(Enum):
    """The thread on which Execute is called."""

    BLOCKING = "BLOCKING"
    """Each instance has a thread of its own."""
    DEVICE_BLOCKING = "DEVICE_BLOCKING"
    """Instances on one GPU share a thread."""


class SendPolicy(Enum):
    """How `Response.send` behaves when an ensemble takes responses more slowly than they are sent."""

    IMMEDIATE = "IMMEDIATE"
    """Returns at once; the response is held, up to a limit."""
    BLOCKING = "BLOCKING"
    """Blocks until the ensemble can take the response, for at most 300 s."""


class InstanceGroupKind(Enum):
    AUTO = "KIND_AUTO"
    CPU = "KIND_CPU"
    GPU = "KIND_GPU"
    MODEL = "KIND_MODEL"


class ReleaseFlag(IntFlag):
    ALL = 1
    RESCHEDULE = 2


class Backend(Protocol):
    """A loaded backend. The policies and `resumes` may be set in Initialize.

    state: for the backend's own use; initially None
    execution_policy: default BLOCKING
    send_policy: default IMMEDIATE
    resumes: whether the backend reads `Request.resume` and sends deltas; default False; otherwise the host refuses
        requests with deltas. Not in Triton's API
    """

    state: Any
    execution_policy: ExecutionPolicy
    send_policy: SendPolicy
    resumes: bool

    @property
    def name(self) -> str: ...
    @property
    def directory(self) -> Path:
        """The directory of the backend's module."""

    @property
    def api_version(self) -> tuple[int, int]: ...
    @property
    def config(self) -> Mapping[str, str]:
        """The merged settings of `--backend-config`; Triton passes them as `{"cmdline": {...}}`."""

    def metric_family(
        self,
        kind: MetricKind,
        name: str,
        description: str,
        label_names: Sequence[str] | None = (),
        buckets: Sequence[float] | None = None,
    ) -> MetricFamily:
        """The family with that name. The first call creates it, with this description.

        label_names: the labels of all its metrics; None = each metric has its own
        buckets: upper bounds of its histograms; None = Prometheus's default ones

        Raises TritonError ALREADY_EXISTS if it exists with another kind or other label names.
        """


@dataclass
class BackendAttributes:
    """The attributes that TRITONBACKEND_GetBackendAttribute may set.

    preferred_groups: kind and count of the instance groups of models whose configuration has none
    parallel_instance_loading: whether instances of a model may be initialised at the same time
    read_fields: paths of fields of the configuration, such as `optimization.graph`, that the backend acts on or logs
        itself; the host logs the others that it ignores. Not in Triton's API
    """

    preferred_groups: list[tuple[InstanceGroupKind, int]] = field(default_factory=list)
    parallel_instance_loading: bool = False
    read_fields: frozenset[str] = frozenset()


class Model(Protocol):
    """One version of a model. state: for the backend's own use; initially None."""

    state: Any

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def directory(self) -> Path:
        """The model's directory, `<repository>/<model>`, which contains the version directories."""

    @property
    def version_directory(self) -> Path: ...
    @property
    def config(self) -> ModelConfig:
        """A copy of the current configuration."""

    def set_config(self, config: ModelConfig) -> None:
        """Auto-complete: takes from `config` max_batch_size, inputs, outputs, model_transaction_policy, the scheduling
        choice if none is set, and (unlike Triton) parameters that are not set. Raises TritonError UNSUPPORTED outside
        ModelInitialize."""

    @property
    def auto_complete_config(self) -> bool:
        """False with --disable-auto-complete-config; `set_config` must then not be called."""

    def infer_async(self, request: InferenceRequest, callback: ResponseCallback) -> InferenceHandle:
        """Runs an inference on another model of the host (BLS; TRITONSERVER_ServerInferAsync). Returns immediately.

        `callback` gets one response from an ordinary model, any number from a decoupled one. The request is validated,
        scheduled, counted and cancelled like a client's, keeps its model loaded, and is served even while the server
        stops. It is not cancelled together with the request on whose behalf it is made, unless `handle.cancel` is
        passed to that request's `on_cancel`.

        Raises TritonError with Triton's texts if the request is refused (unknown or unready model, invalid input, full
        queue); then `callback` is never called.
        """

    def is_decoupled(self, name: str, version: int = -1) -> bool:
        """Whether a READY model may send any number of responses. Raises the same errors as `infer_async`."""

    def is_model_ready(self, name: str, version: int = -1) -> bool:
        """False also for a model that is unknown or not loaded."""

    def load_model(self, name: str, parameters: Mapping[str, str | bytes] | None = None) -> None:
        """Loads or reloads a model of the repository, like a client's load request; blocks until done. A model must not
        load itself in its ModelInitialize.

        parameters: "config" = JSON text of a configuration, "file:<path>" = a file's content

        Raises TritonError if the load fails, and UNAVAILABLE unless the model control mode is explicit.
        """

    def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Begins to unload a model; its requests in flight are finished. Raises the same errors as `load_model`."""


class ModelInstance(Protocol):
    """One instance of a model version. state: for the backend's own use; initially None."""

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
    @property
    def host_policy(self) -> HostPolicy:
        """The resources to which the instance's threads are bound. The host binds the threads of Initialize and
        Execute; a backend must bind the processes that it starts."""

    @property
    def activity(self) -> InstanceActivity:
        """Through which the backend reports what the instance does. Not in Triton's API."""

    def report_statistics(
        self,
        request: Request,
        success: bool,
        exec_start_ns: int,
        compute_start_ns: int,
        compute_end_ns: int,
        exec_end_ns: int,
    ) -> None:
        """To be called once per request, before its release. Times are those of time.monotonic_ns(). Without success,
        the times are ignored and a failure with reason BACKEND is counted."""

    def report_batch_statistics(
        self, batch_size: int, exec_start_ns: int, compute_start_ns: int, compute_end_ns: int, exec_end_ns: int
    ) -> None:
        """To be called once per executed batch. Otherwise the model's execution_count and last_inference stay 0."""

    def report_response_statistics(
        self,
        factory: ResponseFactory,
        response_start_ns: int,
        compute_output_start_ns: int,
        response_end_ns: int,
        error: TritonError | None = None,
    ) -> None:
        """To be called once per response, in response order. compute_output_start_ns: 0 = an empty response."""


@runtime_checkable
class Request(Protocol):
    """One inference request. Its inputs may be read until it is released."""

    @property
    def id(self) -> str:
        """The client's id, "" = none. Not unique, so do not use it as a key."""

    @property
    def number(self) -> int:
        """Unique in this process; identifies the request for operators. Not in Triton's API."""

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
        """All outputs of the model if the client named none."""

    @property
    def trace(self) -> RequestTrace | None:
        """None = not traced."""

    @property
    def tenant(self) -> Tenant:
        """The client on whose behalf the request is made. Not in Triton's API; NO_TENANT inside NVIDIA's Triton."""

    @property
    def resume(self) -> Resume | None:
        """See Resume. Not in Triton's API; None inside NVIDIA's Triton."""

    @property
    def command(self) -> str:
        """See InferenceRequest. Not in Triton's API; "" inside NVIDIA's Triton."""

    @property
    def is_cancelled(self) -> bool: ...
    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the request is cancelled, on the cancelling thread, or immediately if it has
        already been cancelled. The callback must only enqueue. It stays registered after the release, until the request
        completes; a release with RESCHEDULE drops it. Not in Triton's API, where a backend can only poll."""

    def new_response(self) -> Response: ...
    def response_factory(self) -> ResponseFactory:
        """A factory that remains usable after the request's release. Raises TritonError INVALID_ARG after release."""

    def new_state(self, tensor: Tensor) -> State:
        """TRITONBACKEND_StateNew: a new value for an implicit state, identified by the state's output name. Raises
        TritonError INVALID_ARG after release, for a model without states, and for an unknown name."""

    def release(self, flags: ReleaseFlag = ReleaseFlag.ALL) -> None:
        """Returns the request to the host; its inputs must not be used afterwards. With RESCHEDULE, the host passes it
        to Execute again (iterative sequences only).

        Raises TritonError INVALID_ARG if it has already been released, and for RESCHEDULE on a model without iterative
        sequences or after the end of the sequence; the backend then still owns the request.
        """


class State(Protocol):
    """A new value of an implicit state, not visible until `update`."""

    def update(self) -> None:
        """TRITONBACKEND_StateUpdate: makes it the input of the sequence's next request."""


class Response(Protocol):
    """A response under construction. It must not be used after `send`, even if that failed."""

    def add_output(self, tensor: Tensor) -> None: ...
    def set_parameter(self, name: str, value: ParameterValue) -> None: ...
    def send(
        self, flags: ResponseFlag = ResponseFlag.NONE, error: TritonError | None = None, delta: bytes = b""
    ) -> None:
        """Blocks only with SendPolicy.BLOCKING. delta: see InferenceResponse."""


class ResponseFactory(Protocol):
    """Makes the responses of one request, even after its release."""

    @property
    def is_cancelled(self) -> bool: ...
    def new_response(self) -> Response: ...
    def send(self, outputs: Sequence[Tensor], flags: ResponseFlag = ResponseFlag.NONE, delta: bytes = b"") -> None:
        """Equivalent to `new_response`, `add_output` for each output, and `Response.send`."""

    def send_flags(self, flags: ResponseFlag) -> None:
        """Sends flags without a response: `send_flags(ResponseFlag.FINAL)` ends a stream."""

    def close(self) -> None:
        """TRITONBACKEND_ResponseFactoryDelete. Idempotent. An open factory keeps its model loaded."""


def check_api_version(backend: Backend, built_for: tuple[int, int]) -> None:
    """To be called in Initialize. Logs both versions of this interface, as Triton's backends do. built_for: the
    backend's constant.

    Raises TritonError UNSUPPORTED unless the host has the same major version and at least that minor version.
    """
    (host_major, host_minor), (major, minor) = backend.api_version, built_for
    _log.info("Triton TRITONBACKEND API version: %d.%d", host_major, host_minor)
    _log.info("'%s' TRITONBACKEND API version: %d.%d", backend.name, major, minor)
    if host_major != major or host_minor < minor:
        raise unsupported(
            f"triton backend API version does not support this backend: '{backend.name}' was written for version "
            f"{major}.{minor}, this server has {host_major}.{host_minor}"
        )
