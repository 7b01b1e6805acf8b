"""The tokens of a request, charged to the key that it came with.

For: keyed_server.py. Does not know: protocols, keys. Invariant: a client sees no tensor that it did not ask for.
Source: the counts are the tensors num_input_tokens and num_output_tokens of vllm_backend's interface, asked for with
return_num_input_tokens and return_num_output_tokens. A model without them is not charged for tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

import numpy as np

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.messages import InferenceRequest, InferenceResponse, ResponseCallback
from llmbackend.core.tensors import RawTensor, Tensor

from .visit import Visit

PROMPT_TOKENS: Final = "num_input_tokens"
GENERATED_TOKENS: Final = "num_output_tokens"
_SWITCHES: Final = {f"return_{name}": name for name in (PROMPT_TOKENS, GENERATED_TOKENS)}


def counts_tokens(inputs: Collection[str]) -> bool:
    """Whether a model with these inputs can say how many tokens a request had."""
    return _SWITCHES.keys() <= set(inputs)


def counted(request: InferenceRequest, visit: Visit, batches: bool) -> InferenceRequest:
    """`request` with both counts asked for, and a callback that takes them out again where the client did not ask."""
    inputs = {tensor.name: tensor for tensor in request.inputs if not _is_false(tensor)}
    hidden = frozenset(
        name
        for switch, name in _SWITCHES.items()
        if switch not in inputs or (request.requested_outputs and name not in request.requested_outputs)
    )
    shape = (1, 1) if batches else (1,)
    for switch in _SWITCHES:
        inputs.setdefault(switch, Tensor.of(switch, np.ones(shape, np.bool_)))
    outputs = request.requested_outputs and tuple({*request.requested_outputs, *_SWITCHES.values()})
    counts = frozenset(_SWITCHES.values())
    return replace(
        request,
        inputs=tuple(inputs.values()),
        requested_outputs=outputs,
        classes={name: count for name, count in request.classes.items() if name not in counts},  # they stay numbers
        response_callback=_Meter(visit, request.response_callback, hidden),
    )


def _is_false(tensor: Tensor | RawTensor) -> bool:
    """A well-formed switch that is off. (A malformed one stays, for the host to refuse.)"""
    if tensor.name not in _SWITCHES or tensor.datatype != "BOOL":
        return False
    return tensor.raw == b"\0" if isinstance(tensor, RawTensor) else not tensor.data.any()


class _Meter:
    """Between a request and its callback: reads the counts of every response. Called by one thread at a time."""

    def __init__(self, visit: Visit, callback: ResponseCallback, hidden: frozenset[str]) -> None:
        self._account = visit.account
        self._prompt_tokens, self._generated_tokens = visit.token_counters()
        self._callback = callback
        self._hidden = hidden
        self._prompt_is_charged = False

    def __call__(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        if response is not None and response.outputs:
            self._charge(response.outputs)
            if self._hidden:
                shown = tuple(tensor for tensor in response.outputs if tensor.name not in self._hidden)
                response = replace(response, outputs=shown)
        self._callback(response, flags)

    def _charge(self, outputs: Iterable[Tensor]) -> None:
        """The prompt's count is in every response, that of generated tokens is of the response alone."""
        prompt = generated = 0
        for tensor in outputs:
            if tensor.name == GENERATED_TOKENS:
                generated = int(tensor.data.sum())
            elif tensor.name == PROMPT_TOKENS and not self._prompt_is_charged:
                prompt = int(tensor.data.sum())
                self._prompt_is_charged = True
        self._account.charge(prompt + generated)
        self._prompt_tokens.inc(prompt)
        self._generated_tokens.inc(generated)
