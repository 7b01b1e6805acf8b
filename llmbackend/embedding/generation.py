"""Converts prompts to requests, and responses to plain objects without tensors."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from llmbackend.core.messages import InferenceRequest, InferenceResponse
from llmbackend.core.outputs import Outputs
from llmbackend.core.tensors import JsonTensor, Tensor

from .sampling_params import SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A text; token ids; a conversation's messages, for the model's chat template; or an object with `messages`, `tools`
and other template variables (docs/llm_backend.md, input `messages`)."""

MODEL: Final = "model"
"""The name under which an engine serves its model."""
_ASKED: Final = ("finish_reason", "stop_reason", "output_ids", "usage", "sequence_index")
_TRUE: Final = np.array([True])
_MAX_INT32: Final = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float | None
    """None = minus infinity."""
    rank: int | None
    """From 1; None for a token of `logprob_token_ids`."""
    decoded_token: str
    bytes: Sequence[int] | None = None
    """The token's bytes, if it is only part of a character."""


Position = Mapping[int, Logprob]
"""By token id: the token itself first, then the most likely ones."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    """So far."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One output of a prompt; in a stream, its new part."""

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    """Which of the `n` outputs."""
    finish_reason: str | None = None
    """"stop" or "length"; None = more follows."""
    stop_reason: str | int | None = None
    """The requested stop text or stop token that ended the output."""
    usage: Usage | None = None
    """In a stream, only in the first and the last part."""
    logprobs: tuple[Position, ...] = ()
    """One per token, if requested."""
    prompt_logprobs: tuple[Position | None, ...] = ()
    """One per prompt token, if requested, in the first part; None for the first token."""


@dataclass(frozen=True, slots=True)
class Generation:
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """Text of the first output; the two below likewise."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason


def request_of(prompt: Prompt, sampling: SamplingParams, *, stream: bool) -> InferenceRequest:
    """Raises TypeError if the object is not a Prompt or cannot be encoded as JSON."""
    flags = {f"return_{name}": True for name in _ASKED}
    wants_logprobs = sampling.logprobs is not None or sampling.logprob_token_ids is not None
    flags |= {"stream": stream, "exclude_input_in_output": True, "return_logprobs": wants_logprobs}
    return InferenceRequest(
        MODEL,
        inputs=(
            _prompt_tensor(prompt),
            Tensor.text("sampling_parameters", msgspec.json.encode(sampling)),
            *(Tensor.of(name, _TRUE) for name, value in flags.items() if value),
        ),
    )


def _prompt_tensor(prompt: Prompt) -> Tensor:
    if isinstance(prompt, str):
        return Tensor.text("text_input", prompt)
    if isinstance(prompt, Mapping) or (isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping)):
        return Tensor.text("messages", msgspec.json.encode(prompt))
    if isinstance(prompt, Sequence) and all(isinstance(one, int) and 0 <= one <= _MAX_INT32 for one in prompt):
        return Tensor.of("input_ids", np.array(prompt, np.int32))
    raise TypeError(f"a prompt is {reprlib.repr(prompt)}, expected a text, token ids, or messages")


def completion_of(response: InferenceResponse) -> Completion:
    """Raises the response's TritonError."""
    if response.error is not None:
        raise response.error
    values = _values(response.outputs)
    reason = _string(values["finish_reason"])
    usage = values.get("usage")
    return Completion(
        text=_string(values["text_output"]),
        token_ids=tuple(values["output_ids"]),
        index=values["sequence_index"][0],
        finish_reason=None if reason == "None" else reason,
        stop_reason=values.get("stop_reason"),
        usage=None if usage is None else Usage(*usage),
        logprobs=tuple(_position(position) for position in values.get("logprobs") or ()),
        prompt_logprobs=tuple(position and _position(position) for position in values.get("prompt_logprobs") or ()),
    )


def generation_of(completions: Iterable[Completion]) -> Generation:
    """completions: complete outputs, in any order."""
    return Generation(tuple(sorted(completions, key=lambda completion: completion.index)))


def _values(outputs: Sequence[Tensor]) -> dict[str, Any]:
    """By output name: JSON values, lists or texts."""
    if isinstance(outputs, Outputs):
        return outputs.named()
    return {tensor.name: tensor.value if isinstance(tensor, JsonTensor) else tensor.data.tolist() for tensor in outputs}


def _string(value: str | Sequence[bytes]) -> str:
    return value if isinstance(value, str) else value[0].decode()


def _position(position: Mapping[str, Mapping[str, Any]]) -> Position:
    return {int(token_id): Logprob(**logprob) for token_id, logprob in position.items()}
