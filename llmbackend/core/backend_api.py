"""The contract between the host and a backend: what a backend must export, and what it sees of the host.

A backend imports this module and nothing else of the host. It does not see language models, wire protocols, or how the
host is built. Source: Triton's `tritonbackend.h` (API 1.19). Names are kept: a C function `TRITONBACKEND_XDoY(x, …)` is
the method `X.do_y(…)` here.

Functions
    A backend is a Python module with the functions below. Only TRITONBACKEND_ModelInstanceExecute is required.

    TRITONBACKEND_Initialize(backend: Backend) -> None
        Once per backend, before its first model. Sets the backend's policies.
    TRITONBACKEND_GetBackendAttribute(backend: Backend, attributes: BackendAttributes) -> None
        Fills in `attributes`. If it fails, the defaults apply.
    TRITONBACKEND_Finalize(backend: Backend) -> None
        When the server stops.

    TRITONBACKEND_ModelInitialize(model: Model) -> None
        Once per model version. May call `model.set_config`.
    TRITONBACKEND_ModelFinalize(model: Model) -> None
        After the model's instances are finalised.

    TRITONBACKEND_ModelInstanceInitialize(instance: ModelInstance) -> None
        Once per instance, after ModelInitialize.
    TRITONBACKEND_ModelInstanceExecute(instance: ModelInstance, requests: Sequence[Request]) -> None
        Computes a batch, or takes it over to compute it later. Never called twice at once for one instance.
    TRITONBACKEND_ModelInstanceReady(instance: ModelInstance) -> None
        Raises TritonError when the instance is not ready. Called from any thread.
    TRITONBACKEND_ModelInstanceFinalize(instance: ModelInstance) -> None
        When no request is with the instance any more.

    Not in Triton's API:

    LLMBACKEND_ModelForecast(model: Model) -> Mapping[str, Any]
        What an instance would be and take: JSON values by name, for `llmbackend check`. Called after ModelInitialize of
        a model that gets no instances. Raises the TritonError that an instance would fail with.

    LLMBACKEND_ModelInstanceMemoryUsage(instance: ModelInstance) -> Sequence[MemoryUsage]
        What the instance holds now, for statistics: TRITONBACKEND_ModelInstanceReportMemoryUsage, asked for instead of
        reported. Called from any thread, only after ModelInstanceInitialize; it must not block.

    And for backends whose instances run in processes of their own:

    LLMBACKEND_ModelInstanceKill(instance: ModelInstance) -> int
        Kills the instance's process with SIGKILL, as a crash would, and returns its id: operators test by it what a
        crash does. Raises TritonError UNAVAILABLE when there is no process now. Called from any thread.

    Not in Triton's API, for backends that say what their instances do (core/activity/messages.py); otherwise the host
    says which requests they have:

    LLMBACKEND_ModelInstanceWatch(instance: ModelInstance, kinds: frozenset[str]) -> None
        What to report to `instance.activity` from now on ("requests", "steps", …); at first nothing. With "blocks", all
        of them are to be reported now. Called from any thread, under locks of the host: it must only take note.
    LLMBACKEND_ModelInstanceDescribe(instance: ModelInstance) -> InstanceDescription
        The instance now. Called from any thread, only after ModelInstanceInitialize.

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
    - `Response.send` does not block, so one thread can send for many requests. It does so `with responses_together():`,
      which wakes the clients' side once for all of them.
    - `ResponseFactory.send` sends a response in one call. Its outputs may be `Outputs`, plain values of which tensors
      are made only for clients that need them: together this makes a stream of small responses cheap.
    - An ensemble may take the responses of a decoupled model more slowly than the model sends them
      (`max_inflight_requests`). Responses are then held up to a limit in bytes. Beyond it that one request ends with an
      error, and is cancelled at the backend.
    - A backend that sends from a thread per request or per instance may ask to be blocked instead: see SendPolicy.
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
from .config_readers import SERVED_MODEL_NAME, config_to_json, served_names, split_names
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
    Tensor,
    element_count,
)
from .tracing.trace import Attributes, RequestTrace, SpanEvent, TraceSpan

__all__ = [
    "API_VERSION", "CONFIG_TYPE_OF_DATATYPE", "DATATYPE_OF_CONFIG_TYPE", "DATATYPE_OF_DTYPE", "JSON", "NO_TENANT",
    "NUMPY_DTYPE", "SERVED_MODEL_NAME", "Attributes", "Backend", "BackendAttributes", "ErrorCode", "ExecutionPolicy",
    "HostPolicy", "InferenceHandle", "InferenceRequest", "InferenceResponse", "InstanceActivity", "InstanceGroupKind",
    "JsonTensor", "MemoryType", "MemoryUsage", "MetricFamily", "MetricKind", "Model", "ModelConfig", "ModelInstance",
    "OutputLayout", "Outputs", "ParameterValue", "ReleaseFlag", "Request", "RequestFlag", "RequestTrace", "Response",
    "ResponseCallback", "ResponseFactory", "ResponseFlag", "Resume", "SendPolicy", "SpanEvent", "State", "Tenant",
    "Tensor", "TraceSpan", "TritonError", "cancelled", "check_api_version", "common_tenant", "config_to_json",
    "element_count", "internal", "invalid_argument", "is_final", "layout_of", "not_found", "process_memory",
    "request_tag", "responses_together", "served_names", "shown", "split_names", "unavailable", "unsupported",
]  # fmt: skip

API_VERSION = (1, 19)
"""Of this module. A backend keeps the value that it was written for as a constant of its own."""
_log = logging.getLogger(__name__)


class ExecutionPolicy(Enum):
    """On which thread Execute is called. It returns when the instance can take another call."""

    BLOCKING = "BLOCKING"
    """Each instance has its own thread."""
    DEVICE_BLOCKING = "DEVICE_BLOCKING"
    """Instances on one GPU share a thread."""


class SendPolicy(Enum):
    """What `Response.send` does when an ensemble takes responses more slowly than they are sent."""

    IMMEDIATE = "IMMEDIATE"
    """It returns at once; the response is held, up to a limit."""
    BLOCKING = "BLOCKING"
    """It blocks the calling thread until the ensemble has room, for at most 300 s."""


class InstanceGroupKind(Enum):
    AUTO = "KIND_AUTO"
    CPU = "KIND_CPU"
    GPU = "KIND_GPU"
    MODEL = "KIND_MODEL"


class ReleaseFlag(IntFlag):
    ALL = 1
    RESCHEDULE = 2


class Backend(Protocol):
    """A loaded backend."""

    state: Any
    """For the backend's own use; None at first."""
    execution_policy: ExecutionPolicy
    """To be set in Initialize; default BLOCKING."""
    send_policy: SendPolicy
    """To be set in Initialize; default IMMEDIATE."""
    resumes: bool
    """To be set in Initialize: whether it reads `Request.resume` and gives responses deltas; default false. The host
    refuses requests with deltas to other backends. Not in Triton's API."""

    @property
    def name(self) -> str: ...
    @property
    def directory(self) -> Path:
        """The directory of the backend's module."""

    @property
    def api_version(self) -> tuple[int, int]: ...
    @property
    def config(self) -> Mapping[str, str]:
        """The merged settings of `--backend-config`, those inside Triton's `{"cmdline": {...}}`."""

    def metric_family(
        self,
        kind: MetricKind,
        name: str,
        description: str,
        label_names: Sequence[str] | None = (),
        buckets: Sequence[float] | None = None,
    ) -> MetricFamily:
        """The family of that name. The first call creates it and decides its description.

        label_names: the labels of all its metrics; None = each metric names its own
        buckets: upper bounds of its histograms

        Raises TritonError ALREADY_EXISTS when it exists with another kind or other label names.
        """


@dataclass
class BackendAttributes:
    """What TRITONBACKEND_GetBackendAttribute may fill in."""

    preferred_groups: list[tuple[InstanceGroupKind, int]] = field(default_factory=list)
    """Kind and count of the instance groups for models whose configuration has none."""
    parallel_instance_loading: bool = False
    """Whether instances of a model may be initialised at the same time."""


class Model(Protocol):
    """One version of a model."""

    state: Any
    """For the backend's own use; None at first."""

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
        """Auto-complete: takes over from `config` max_batch_size, inputs, outputs, model_transaction_policy, the
        scheduling choice unless one is set, and parameters that are not set (the last is not in Triton).

        Raises TritonError UNSUPPORTED outside of ModelInitialize.
        """

    @property
    def auto_complete_config(self) -> bool:
        """False with --disable-auto-complete-config; then `set_config` must not be called."""

    def infer_async(self, request: InferenceRequest, callback: ResponseCallback) -> InferenceHandle:
        """Runs an inference on another model of the host (BLS): TRITONSERVER_ServerInferAsync for backends.

        Returns at once. The responses come through `callback`: one from an ordinary model, any number from a decoupled
        one. The request is validated, scheduled, counted and cancelled like a client's, it keeps its model loaded, and
        it is served also while the server stops. Cancelling the request that it is made for does not cancel it; if it
        should, pass `handle.cancel` to that request's `on_cancel`.

        Raises TritonError with Triton's texts when the request is refused (unknown or unready model, invalid input,
        full queue); then `callback` is never called.
        """

    def is_decoupled(self, name: str, version: int = -1) -> bool:
        """Whether a READY model may answer with any number of responses. Raises TritonError as `infer_async` does."""

    def is_model_ready(self, name: str, version: int = -1) -> bool:
        """False also for a model that is unknown or not loaded."""

    def load_model(self, name: str, parameters: Mapping[str, str | bytes] | None = None) -> None:
        """Loads or reloads a model of the repository, as a client's load request does; blocks until done. A model must
        not load itself from its own ModelInitialize.

        parameters: "config" = JSON text of a configuration, "file:<path>" = a file's content. Raises TritonError when
        the load fails, and UNAVAILABLE unless the model control mode is explicit.
        """

    def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Begins to unload a model; its requests in flight are finished. Raises TritonError as `load_model`."""


class ModelInstance(Protocol):
    """One instance of a model version."""

    state: Any
    """For the backend's own use; None at first."""

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
        """TRITONBACKEND_ModelInstanceHostPolicy: what the instance's threads are bound to. The host binds the thread of
        Initialize and the thread of Execute; a backend that starts processes binds those."""

    @property
    def activity(self) -> InstanceActivity:
        """For those who watch the server. Not in Triton's API."""

    def report_statistics(
        self,
        request: Request,
        success: bool,
        exec_start_ns: int,
        compute_start_ns: int,
        compute_end_ns: int,
        exec_end_ns: int,
    ) -> None:
        """To be called once per request, before its release. Times are of time.monotonic_ns(). With success=False the
        times are ignored and a failure with reason BACKEND is counted."""

    def report_batch_statistics(
        self, batch_size: int, exec_start_ns: int, compute_start_ns: int, compute_end_ns: int, exec_end_ns: int
    ) -> None:
        """To be called once per executed batch; without it the model's execution_count stays 0."""

    def report_response_statistics(
        self,
        factory: ResponseFactory,
        response_start_ns: int,
        compute_output_start_ns: int,
        response_end_ns: int,
        error: TritonError | None = None,
    ) -> None:
        """To be called once per response; it counts for the response's index in `factory`. compute_output_start_ns
        0 = an empty response."""


@runtime_checkable
class Request(Protocol):
    """One inference request. Its inputs may be read until it is released."""

    @property
    def id(self) -> str:
        """The client's id, "" = none. Not unique: do not use it as a key."""

    @property
    def number(self) -> int:
        """Unique in the server's life; operators name the request by it. Not in Triton's API."""

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
        """Names of the outputs to return; all outputs of the model when the client named none."""

    @property
    def trace(self) -> RequestTrace | None:
        """None for a request that is not traced."""

    @property
    def tenant(self) -> Tenant:
        """The client that the request is made for. Not in Triton's API; inside NVIDIA's Triton always NO_TENANT."""

    @property
    def resume(self) -> Resume | None:
        """Whether and where the request continues. Not in Triton's API; inside NVIDIA's Triton always None."""

    @property
    def is_cancelled(self) -> bool: ...
    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the request is cancelled, on the thread that cancels; at once if it already is
        cancelled. The callback must only enqueue. It stays registered after release, until the request completes. Not
        in Triton's API, where a backend can only poll."""

    def new_response(self) -> Response: ...
    def response_factory(self) -> ResponseFactory:
        """A factory that stays usable after the request's release. Raises TritonError INVALID_ARG after release."""

    def new_state(self, tensor: Tensor) -> State:
        """TRITONBACKEND_StateNew: a new value of an implicit state, by the state's output name.

        Raises TritonError INVALID_ARG after release, for a model without states, and for an unknown name.
        """

    def release(self, flags: ReleaseFlag = ReleaseFlag.ALL) -> None:
        """Gives the request back; its inputs must not be used afterwards. With RESCHEDULE the host passes it to Execute
        again (iterative sequences only).

        Raises TritonError INVALID_ARG when it was released before, and for RESCHEDULE on a model without iterative
        sequences or after the sequence ended; the backend then still owns the request.
        """


class State(Protocol):
    """A new value of an implicit state, not visible until `update`."""

    def update(self) -> None:
        """TRITONBACKEND_StateUpdate: makes it the input of the sequence's next request."""


class Response(Protocol):
    """A response under construction. It must not be used after `send`, even if sending failed."""

    def add_output(self, tensor: Tensor) -> None: ...
    def set_parameter(self, name: str, value: ParameterValue) -> None: ...
    def send(
        self, flags: ResponseFlag = ResponseFlag.NONE, error: TritonError | None = None, delta: bytes = b""
    ) -> None:
        """Sends it to the client. Blocks only with SendPolicy.BLOCKING. delta: see InferenceResponse."""


class ResponseFactory(Protocol):
    """Makes responses of one request, also after its release."""

    @property
    def is_cancelled(self) -> bool: ...
    def new_response(self) -> Response: ...
    def send(self, outputs: Sequence[Tensor], flags: ResponseFlag = ResponseFlag.NONE, delta: bytes = b"") -> None:
        """As `new_response`, `add_output` for each output, and `Response.send`."""

    def send_flags(self, flags: ResponseFlag) -> None:
        """Sends flags without a response: `send_flags(ResponseFlag.FINAL)` ends a stream."""

    def close(self) -> None:
        """TRITONBACKEND_ResponseFactoryDelete. Idempotent. An open factory keeps its model loaded."""


def check_api_version(backend: Backend, built_for: tuple[int, int]) -> None:
    """For Initialize: logs both versions of this interface, as Triton's backends do.

    built_for: API_VERSION as it was when the backend was written: a constant of the backend, not this module's value

    Raises TritonError UNSUPPORTED unless the host's major version equals that of `built_for`, and its minor version is
    at least as high.
    """
    (host_major, host_minor), (major, minor) = backend.api_version, built_for
    _log.info("Triton TRITONBACKEND API version: %d.%d", host_major, host_minor)
    _log.info("'%s' TRITONBACKEND API version: %d.%d", backend.name, major, minor)
    if host_major != major or host_minor < minor:
        raise unsupported(
            f"triton backend API version does not support this backend: '{backend.name}' was written for version "
            f"{major}.{minor}, this server has {host_major}.{host_minor}"
        )
