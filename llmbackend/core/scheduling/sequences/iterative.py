"""Whose sequence a request is: the client's, by its correlation id, or one that the host makes of a single request.

For: SequenceBatcher. Does not know: slots, batches. Invariant: a sequence that the host makes never meets a client's,
whatever number the client chose. Source: Sequencer and IterativeSequencer of Triton's sequence_utils (iterative
sequences: the backend releases a request with RESCHEDULE to get it again, until it releases it with ALL).
"""

from __future__ import annotations

import itertools

from llmbackend.core.backend_api import RequestFlag
from llmbackend.core.errors import invalid_argument
from llmbackend.core.requests.infer_request import InferRequest
from llmbackend.core.tenants import Tenant

from .sequence import SequenceKey

_UINT64 = (1 << 64) - 1


class Sequencer:
    """Every request must say to which sequence it belongs."""

    is_iterative = False

    def key(self, request: InferRequest, model: str) -> SequenceKey:
        """Raises TritonError INVALID_ARG for a request without a correlation id."""
        if not request.correlation_id:
            raise invalid_argument(
                f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID"
            )
        return _client_key(request)


class IterativeSequencer(Sequencer):
    """A request without a correlation id is a sequence of its own."""

    is_iterative = True

    def __init__(self) -> None:
        self._next_id = itertools.count(1)

    def key(self, request: InferRequest, model: str) -> SequenceKey:
        if request.correlation_id:
            return _client_key(request)
        request.correlation_id = next(self._next_id)
        request.flags = RequestFlag.SEQUENCE_START
        return ("iterative", request.correlation_id)


def _client_key(request: InferRequest) -> SequenceKey:
    if isinstance(request.correlation_id, int):
        request.correlation_id &= _UINT64  # gRPC carries it as a signed integer
    return client_key(request.correlation_id, request.tenant)


def client_key(correlation_id: int | str, tenant: Tenant) -> SequenceKey:
    """A client's id names a sequence of its own tenant alone."""
    return ("of", tenant.key_name, correlation_id) if tenant.key_name else correlation_id
