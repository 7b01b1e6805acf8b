"""The host of a server with API keys: applies the tenant, limits and token counters of a request's key.

Independent of protocols and key formats. Invariants: a client's request has its key's tenant, whatever the client
sends; a request without an identity, created by the process itself, is unchanged; a client gets only tensors that it
requested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np

from llmbackend.core.activity.hub import Viewer
from llmbackend.core.activity.messages import EventKind
from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.host_protocol import Host
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceHandle, InferenceRequest, InferenceResponse, ResponseCallback, Tenant
from llmbackend.core.outputs import Outputs
from llmbackend.core.tensors import RawTensor, Tensor

from .request_identity import REQUEST_IDENTITY, RequestIdentity

_PROMPT_TOKENS: Final = "num_input_tokens"
_GENERATED_TOKENS: Final = "num_output_tokens"
_PROMPT_ONLY: Final = "prompt_only"
"""Input of a request that only describes its prompt and generates nothing."""
_SWITCHES: Final = {f"return_{name}": name for name in (_PROMPT_TOKENS, _GENERATED_TOKENS)}


class KeyedServer(InferenceServer):
    """If `by` is not given, a method acts for the current key."""

    def infer_async(self, request: InferenceRequest, callback: ResponseCallback) -> InferenceHandle:
        """Also raises LimitReachedError if the request exceeds the key's rate limit."""
        return super().infer_async(*of_key(self, request, callback))

    def cancel_requests(
        self, model_name: str, version: int = -1, request_id: str = "", by: Tenant | None = None
    ) -> int:
        return super().cancel_requests(model_name, version, request_id, _current_tenant(by))

    def cancel_request(self, number: int, by: Tenant | None = None) -> None:
        super().cancel_request(number, _current_tenant(by))

    def watch(self, kinds: frozenset[EventKind], wake: Callable[[], None], by: Tenant | None = None) -> Viewer:
        return super().watch(kinds, wake, _current_tenant(by))


def _current_tenant(default: Tenant | None) -> Tenant | None:
    identity = REQUEST_IDENTITY.get()
    return default if identity is None else identity.account.tenant


def of_key(
    server: Host, request: InferenceRequest, callback: ResponseCallback
) -> tuple[InferenceRequest, ResponseCallback]:
    """What is sent to `server` for a request of the current identity. Raises LimitReachedError at the limit."""
    identity = REQUEST_IDENTITY.get()
    if identity is None:
        return request, callback
    description = server.model_description(request.model_name, request.model_version)
    refusal = identity.use(_prompts(request, description.batches))
    if refusal is not None:
        raise refusal.error()
    names = {tensor.name for tensor in description.inputs}
    counts_tokens = _SWITCHES.keys() <= names  # vllm_backend's interface; other models' tokens are not charged
    if request.raw_input is not None or not counts_tokens or _generates_nothing(request):
        return replace(request, tenant=identity.account.tenant), callback
    return _metered(request, callback, identity, description.batches)


def _prompts(request: InferenceRequest, batches: bool) -> int:
    """The number of prompts: the rows of the request's batch. The host refuses a wrong shape."""
    if not batches or not request.inputs:
        return 1
    shape = request.inputs[0].shape
    return max(shape[0], 1) if shape else 1


def _generates_nothing(request: InferenceRequest) -> bool:
    """Whether the request only describes its prompt; such a request is charged no tokens."""
    return any(tensor.name == _PROMPT_ONLY and _is_on(tensor) for tensor in request.inputs)


def _metered(
    request: InferenceRequest, callback: ResponseCallback, identity: RequestIdentity, batches: bool
) -> tuple[InferenceRequest, ResponseCallback]:
    """`request` for the key's tenant with both counts requested, and a callback that charges and hides them."""
    inputs = [tensor for tensor in request.inputs if not _is_false(tensor)]
    given = {tensor.name for tensor in inputs}
    hidden = frozenset(
        name
        for switch, name in _SWITCHES.items()
        if switch not in given or (request.requested_outputs and name not in request.requested_outputs)
    )
    shape = (1, 1) if batches else (1,)
    inputs += [Tensor.of(switch, np.ones(shape, np.bool_)) for switch in _SWITCHES if switch not in given]
    counts = frozenset(_SWITCHES.values())
    requested = request.requested_outputs
    outputs = requested and (*requested, *sorted(counts.difference(requested)))
    request = replace(
        request,
        inputs=tuple(inputs),
        requested_outputs=outputs,
        classes={name: count for name, count in request.classes.items() if name not in counts},  # counts stay numbers
        tenant=identity.account.tenant,
    )
    return request, _Meter(identity, callback, hidden)


def _is_on(tensor: Tensor | RawTensor) -> bool:
    if tensor.datatype != "BOOL":
        return False
    return tensor.raw == b"\1" if isinstance(tensor, RawTensor) else bool(tensor.data.all())


def _is_false(tensor: Tensor | RawTensor) -> bool:
    """Whether `tensor` is a well-formed switch that is off. The host refuses a malformed one."""
    if tensor.name not in _SWITCHES or tensor.datatype != "BOOL":
        return False
    return tensor.raw == b"\0" if isinstance(tensor, RawTensor) else not tensor.data.any()


def _counts(outputs: Sequence[Tensor]) -> tuple[int | None, int]:
    """Prompt tokens (None if the response does not say) and generated tokens."""
    if isinstance(outputs, Outputs):
        values = outputs.named()
    else:
        values = {tensor.name: tensor.data for tensor in outputs if tensor.name in (_PROMPT_TOKENS, _GENERATED_TOKENS)}
    prompt = values.get(_PROMPT_TOKENS)
    return None if prompt is None else _total(prompt), _total(values.get(_GENERATED_TOKENS, 0))


def _total(counts: Any) -> int:
    if isinstance(counts, list):
        return sum(map(_total, counts))
    return counts if isinstance(counts, int) else int(np.sum(counts))


def _without(outputs: Sequence[Tensor], names: frozenset[str]) -> Sequence[Tensor]:
    if isinstance(outputs, Outputs):
        return outputs.without(names)
    return tuple(tensor for tensor in outputs if tensor.name not in names)


class _Meter:
    """Charges the counts of every response, then calls the request's own callback. Called by one thread at a time."""

    def __init__(self, identity: RequestIdentity, callback: ResponseCallback, hidden: frozenset[str]) -> None:
        self._account = identity.account
        self._prompt_tokens, self._generated_tokens = identity.token_counters()
        self._callback = callback
        self._hidden = hidden
        self._prompt_is_charged = False

    def __call__(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        if response is not None and response.outputs:
            self._charge(*_counts(response.outputs))
            if self._hidden:
                response = msgspec.structs.replace(response, outputs=_without(response.outputs, self._hidden))
        self._callback(response, flags)

    def _charge(self, prompt: int | None, generated: int) -> None:
        """Every response repeats the prompt's count; generated tokens are those of this response."""
        if prompt is None or self._prompt_is_charged:
            prompt = 0
        else:
            self._prompt_is_charged = True
        self._account.charge(prompt + generated)
        self._prompt_tokens.inc(prompt)
        self._generated_tokens.inc(generated)
