"""What a model says of a prompt without generating anything: its tokens, their number, its text.

For: endpoints that tokenise, render, or count tokens. Does not know: HTTP, the answer's form. Invariants: the prompt is
the one that a generation of the same request would have; the question goes the way of every inference, so that limits,
keys and cancellation hold for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from llmbackend.core.messages import InferenceRequest, InferenceResponse, ParameterValue
from llmbackend.core.tensors import Tensor
from llmbackend.frontends.inference_gate import InferenceGate

from .errors import OpenAIError
from .models import Target
from .tensors import MAX_TOKENS_MUST_FIT, PROMPT_ONLY, SAMPLING_PARAMETERS


def _no_tokens() -> npt.NDArray[np.int32]:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class PromptDescription:
    """What was asked for; the rest is empty."""

    num_tokens: int = 0
    max_model_len_tokens: int = 0
    token_ids: npt.NDArray[np.int32] = field(default_factory=_no_tokens)
    token_names: bytes = b"[]"
    """Of the vocabulary, as a JSON list."""
    text: str = ""
    sampling_parameters: bytes = b"{}"
    """As they would hold for a generation, as a JSON object."""


async def describe_prompt(
    gate: InferenceGate,
    target: Target,
    prompt: Tensor,
    wanted: Collection[str],
    *,
    sampling: Mapping[str, Any] | None = None,
    request_id: str = "",
    max_tokens_must_fit: bool = False,
) -> PromptDescription:
    """wanted: of the flags in tensors.py: RETURN_NUM_INPUT_TOKENS, RETURN_MAX_MODEL_LEN, RETURN_PROMPT_TOKEN_IDS,
    RETURN_PROMPT_TOKENS, RETURN_PROMPT_TEXT, and RETURN_SAMPLING_PARAMETERS, with which the request is checked as a
    generation would be. sampling: the parameters; without that flag, those that change the prompt. A client that goes
    away is the caller's to notice (`unless_disconnected`).

    Raises OpenAIError, with the host's names of inputs.
    """
    if not target.model.takes(PROMPT_ONLY):
        message = f"the model '{target.name}' has no input '{PROMPT_ONLY}': it does not tell what its prompts are"
        raise OpenAIError(message, param="model", code="unsupported_parameter")
    flags = (Tensor.of(name, np.array([True])) for name in (PROMPT_ONLY, *wanted))
    parameters = Tensor.text(SAMPLING_PARAMETERS, orjson.dumps(dict(sampling or {})))
    inputs = tuple(target.model.fitted(tensor) for tensor in (prompt, parameters, *flags))
    gate.admit(1)
    marks: dict[str, ParameterValue] = {MAX_TOKENS_MUST_FIT: True} if max_tokens_must_fit else {}
    request = InferenceRequest(model_name=target.name, id=request_id, inputs=inputs, parameters=marks)
    inference = gate.submit(request)
    try:
        (response,) = await inference.collect(1)
    finally:
        inference.close()
    if response.error is not None:
        raise OpenAIError.of(response.error)
    return _read(response)


def _read(response: InferenceResponse) -> PromptDescription:
    found: dict[str, Any] = {tensor.name: tensor.data for tensor in response.outputs}
    return PromptDescription(
        num_tokens=_single(found, "num_input_tokens", 0),
        max_model_len_tokens=_single(found, "max_model_len", 0),
        token_ids=found["prompt_token_ids"].ravel() if "prompt_token_ids" in found else _no_tokens(),
        token_names=_single(found, "prompt_tokens", b"[]"),
        text=_single(found, "prompt_text", b"").decode(),
        sampling_parameters=_single(found, "sampling_parameters", b"{}"),
    )


def _single(found: Mapping[str, Any], name: str, default: Any) -> Any:
    return found[name].item(0) if name in found else default
