"""Requests that stand for slots without a request, so that each sequence keeps its row in the batch.

For: the direct strategy. Does not know: sequences. Invariant: a null request reaches no client and no counter of its
model; a backend treats it as any other, and sees by the READY control that its inputs mean nothing.
Source: InferenceRequest::CopyAsNull in Triton's core.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.messages import InferenceRequest, InferenceResponse
from llmbackend.core.requests.infer_request import InferRequest
from llmbackend.core.requests.reaper import Reaper
from llmbackend.core.requests.response_channel import ChannelOwner, ResponseChannel
from llmbackend.core.statistics import Statistics
from llmbackend.core.tensors import Tensor


class NullOwner:
    """Stands in for the model, which must not count what nobody asked for."""

    def __init__(self, model: ChannelOwner) -> None:
        self.name = model.name
        self.version = model.version
        self.statistics = Statistics()
        self._model = model

    @property
    def reaper(self) -> Reaper:
        return self._model.reaper

    @property
    def may_block_in_send(self) -> bool:
        return False  # it has no observer

    def request_done(self, channel: ResponseChannel) -> None:
        pass


class NullRequest(InferRequest):
    collects_statistics = False


def null_request(owner: NullOwner, pattern: InferRequest, controls: Mapping[str, Tensor]) -> NullRequest:
    """Inputs in the shapes of `pattern`, all zero but for `controls`; no outputs are asked for."""
    message = InferenceRequest(owner.name, _ignore)
    inputs = {**{name: _zeros_like(tensor) for name, tensor in pattern.inputs.items()}, **controls}
    request = NullRequest(message, ResponseChannel(message, owner), inputs, (), pattern.batch_size)
    request.queue_start_ns = time.monotonic_ns()
    return request


def _zeros_like(tensor: Tensor) -> Tensor:
    data = np.full_like(tensor.data, b"") if tensor.datatype == "BYTES" else np.zeros_like(tensor.data)
    return Tensor(tensor.name, tensor.datatype, tensor.shape, data)


def _ignore(response: InferenceResponse | None, flags: ResponseFlag) -> None:
    pass
