"""Messages between frontends, models and the host: inference requests, responses, and descriptions of models.

All are frozen.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Final, Protocol

import msgspec

from .errors import TritonError
from .outputs import Outputs
from .tensors import STRINGS_PER_CALL, RawTensor, SharedInput, SharedRange, Tensor
from .tracing.trace import RequestTrace

ParameterValue = str | int | bool | float


class RequestFlag(IntFlag):
    SEQUENCE_START = 1
    SEQUENCE_END = 2


NO_FLAGS = RequestFlag(0)


class ResponseFlag(IntFlag):
    NONE = 0
    FINAL = 1


def is_final(flags: ResponseFlag) -> bool:
    """Whether FINAL is set. (Operations on enum flags take a microsecond, and this runs several times per response.)"""
    return flags is ResponseFlag.FINAL or (flags is not ResponseFlag.NONE and bool(flags & ResponseFlag.FINAL))


@dataclass(frozen=True, slots=True)
class Tenant:
    """The client on whose behalf a request is made. Separates clients in caches, request ids and sequences.

    Clients cannot choose it. A request that a model makes on behalf of another request has the tenant of that request.

    key_name: name of the API key; "" = none
    is_operator: whether it may end the requests of others
    cache_name: requests share entries of the prefix cache and the response cache only if this is equal: the key's name,
        or "" for keys that share
    """

    key_name: str = ""
    is_operator: bool = False
    cache_name: str = ""

    def may_end(self, request_of: Tenant) -> bool:
        """Whether this tenant may stop a request of the tenant `request_of`."""
        return self.is_operator or self.key_name == request_of.key_name


NO_TENANT: Final = Tenant()
"""The tenant of requests to a server without API keys, and of requests by the host and models themselves."""


def common_tenant(tenants: frozenset[Tenant]) -> Tenant:
    """The tenant of work done for all of `tenants`. If there are several, a new one that shares no cache entries and
    may end no requests."""
    if not tenants:
        return NO_TENANT
    if len(tenants) == 1:
        return next(iter(tenants))
    return Tenant(key_name=(name := f"#{secrets.token_hex(8)}"), cache_name=name)  # key names cannot contain #


class Resume(msgspec.Struct, frozen=True):
    """Marks a request as resumable: each of its responses has a delta. If the same request is sent again with the
    deltas of all responses so far, it continues after the last of them, on any host that serves the same model.

    deltas: the deltas of the responses so far, in order; () = a new request
    replays: whether the responses described by `deltas` are sent again first
    """

    deltas: tuple[bytes, ...] = ()
    replays: bool = False


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request to a model, made by a client (InferenceServer.infer_async) or by another model (Model.infer_async).

    model_version: -1 = the highest READY version
    id: the client's id, "" = none; not unique
    inputs: a RawTensor is checked against the model's configuration before it is decoded
    requested_outputs: () = all outputs of the model
    correlation_id: the sequence's id, a number below 2^64 or a text; 0 or "" = no sequence
    flags: whether the request starts or ends its sequence
    priority: 0 = the model's default; 1 is the highest
    timeout_us: the longest time in the queue; 0 = the model's default
    raw_input: the only input, whose shape the host deduces from the configuration (Triton's raw binary request)
    shared_inputs: inputs in shared memory; set only by clients
    shared_outputs: where in shared memory to write outputs, by name; set only by clients
    classes: by output, how many of the largest elements are returned as text (classification)
    trace: set if the client's request is sampled; requests made by models inherit it
    resume: None = the request is not resumable
    command: what an operator asks of the backend instead of an inference, in the backend's format; "" = an inference.
        Set only by frontends that have checked the client's role
    """

    model_name: str
    model_version: int = -1
    id: str = ""
    inputs: tuple[Tensor | RawTensor, ...] = ()
    requested_outputs: tuple[str, ...] = ()
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    correlation_id: int | str = 0
    flags: RequestFlag = NO_FLAGS
    priority: int = 0
    timeout_us: int = 0
    raw_input: bytes | None = None
    shared_inputs: tuple[SharedInput, ...] = ()
    shared_outputs: Mapping[str, SharedRange] = field(default_factory=dict)
    classes: Mapping[str, int] = field(default_factory=dict)
    trace: RequestTrace | None = None
    tenant: Tenant = NO_TENANT
    resume: Resume | None = None
    command: str = ""


class InferenceResponse(msgspec.Struct, frozen=True):
    """One response of a model. (A Struct, because one is created per token: five times as fast as a dataclass.)

    request_id: the client's id
    outputs: a tuple, or Outputs; () if `error` is set
    delta: what a resumable request needs in order to continue after this response, in a backend-specific format; b"" if
        the request is not resumable, or its backend does not support resuming
    """

    model_name: str
    model_version: int
    request_id: str
    outputs: Sequence[Tensor] = ()
    parameters: Mapping[str, ParameterValue] = {}
    error: TritonError | None = None
    delta: bytes = b""


RESPONSE_BYTES: Final = 512
"""Memory of a response besides its tensors' elements (measured: 480 to 700 with one or two tensors)."""


def held_bytes(tensors: Sequence[Tensor]) -> int:
    """The approximate memory of a response with these tensors, in bytes."""
    if type(tensors) is Outputs:
        return RESPONSE_BYTES + tensors.num_bytes()
    size = RESPONSE_BYTES
    for tensor in tensors:
        data = tensor.data
        if tensor.datatype != "BYTES":
            size += data.nbytes
        elif data.size == 1:
            size += len(data.item())
        else:
            size += sum(
                sum(map(len, data.flat[start : start + STRINGS_PER_CALL]))
                for start in range(0, data.size, STRINGS_PER_CALL)
            )
    return size


ResponseCallback = Callable[[InferenceResponse | None, ResponseFlag], None]
"""(response, flags), as TRITONSERVER_InferenceResponseCompleteFn_t; response None = only flags. Exactly one call
carries FINAL, and it is the last. Called on any thread, under locks of the host: it must only enqueue."""


class _Waiting(threading.local):
    wakeups: dict[Callable[[], None], None] | None = None


_waiting = _Waiting()


class responses_together:  # noqa: N801  as context managers of the standard library
    """Within this context, receivers of the calling thread's responses are woken only once, at the end (even after an
    exception). A receiver woken earlier would compete for the GIL with a thread that has more responses for it. The
    thread must not block, because other threads' responses to the same receiver are delayed too."""

    __slots__ = ("_is_outermost",)

    def __enter__(self) -> None:
        self._is_outermost = _waiting.wakeups is None
        if self._is_outermost:
            _waiting.wakeups = {}

    def __exit__(self, *error: object) -> None:
        if self._is_outermost:
            wakeups, _waiting.wakeups = _waiting.wakeups, None
            for wake in wakeups or ():
                wake()


def wake_receiver(wake: Callable[[], None]) -> None:
    """Calls `wake`, which must not raise, now or at the end of `responses_together`."""
    if _waiting.wakeups is None:
        wake()
    else:
        _waiting.wakeups[wake] = None


class InferenceHandle(Protocol):
    """The result of infer_async."""

    def cancel(self) -> None:
        """Asks the request to stop. Idempotent; may be called from any thread. The callback with FINAL follows, either
        with a CANCELLED error or with whatever the backend had in flight."""


@dataclass(frozen=True, slots=True)
class ModelIndex:
    """One row of the repository index. For a model that was never loaded, all fields but the name are ""."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Triton's model metadata, and two fields that are not in the protocol: optional_inputs and fingerprint.

    versions: all READY versions, or the requested one
    inputs, outputs: shapes have a leading -1 when the model batches
    optional_inputs: names of inputs that a request may leave out
    fingerprint: short text that changes with the server's release, the model's configuration and the version's files
    """

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    optional_inputs: frozenset[str] = frozenset()
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    name: str
    version: str
    extensions: tuple[str, ...]


LoadParameters = Mapping[str, str | bytes]
"""Overrides of a load: "config" → JSON text of a ModelConfig; "file:<path>" → the file's bytes."""
