"""Which of the host's models speak the OpenAI API.

For: the router. Does not know: what a model does with its tensors. Invariant: a model is served here exactly as long
as the host has a READY version of it, whose configuration has `text_output` and one of `messages`, `text_input`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import ModelMetadata

from .errors import OpenAIError, model_not_found
from .fields import JsonObject
from .tensors import INPUT_IDS, MESSAGES, TEXT_INPUT, TEXT_OUTPUT

_ENDPOINT_OF_INPUT = {MESSAGES: "/v1/chat/completions", TEXT_INPUT: "/v1/completions"}


LORA_NAMES = "lora_names"
"""The parameter of a model's configuration that lists its LoRA adapters, with commas between them."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a client's `model` means: a model of the host, one of its LoRA adapters or "", and its inputs' names."""

    name: str
    lora_name: str
    inputs: frozenset[str]


class ModelCatalog:
    """The models a client may name. lora_separator: stands between a model and its adapter; "": adapters have no names
    here. (Triton's OpenAI frontend: --lora-separator.)"""

    def __init__(self, server: InferenceServer, lora_separator: str = "") -> None:
        self._server = server
        self._separator = lora_separator
        self._created_s = int(time.time())
        self._owner = "llmbackend"

    def names(self) -> list[str]:
        ready = dict.fromkeys(row.name for row in self._server.repository_index(ready_only=True))
        served = [name for name in ready if self._language_model(name) is not None]
        return [*served, *(f"{name}{self._separator}{lora}" for name in served for lora in self._loras(name))]

    def list(self) -> JsonObject:
        return {"object": "list", "data": [self._describe(name) for name in self.names()]}

    def get(self, model: str) -> JsonObject:
        """Raises OpenAIError 404 for a model that is not served here, 400 for an adapter that it does not have."""
        name, _ = self._split(model)
        if self._language_model(name) is None:
            raise model_not_found(model)
        return self._describe(model)

    def require(self, model: str, prompt_inputs: Iterable[str]) -> Target:
        """Raises OpenAIError: 404 for a model not served here, 503 while it loads, 400 when it lacks one of
        `prompt_inputs` or the adapter."""
        name, lora_name = self._split(model)
        metadata = self._language_model(name)
        if metadata is None:
            raise self._absent(name)
        inputs = frozenset(tensor.name for tensor in metadata.inputs)
        for prompt_input in prompt_inputs:
            if prompt_input not in inputs:
                raise _lacks(name, prompt_input)
        return Target(name, lora_name, inputs)

    def _split(self, model: str) -> tuple[str, str]:
        """Model and adapter. A model whose own name holds the separator is itself."""
        name, separator, lora_name = model.partition(self._separator) if self._separator else (model, "", "")
        if not separator or self._language_model(model) is not None:
            return model, ""
        if lora_name not in self._loras(name):
            raise OpenAIError(f"Unknown LoRA: {lora_name}; for model: {name}", param="model")
        return name, lora_name

    def _loras(self, name: str) -> Sequence[str]:
        if not self._separator or self._language_model(name) is None:
            return ()
        parameters = self._server.model_parameters(name)
        return parameters[LORA_NAMES].split(",") if LORA_NAMES in parameters else ()

    def _language_model(self, name: str) -> ModelMetadata | None:
        """Its metadata, None when no version of it is READY or it is not a language model.

        One whose engine is down for the moment is still served: its requests are answered with 503, not with 404.
        """
        try:
            metadata = self._server.model_metadata(name)
        except TritonError as error:
            if error.code in (ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE, ErrorCode.INVALID_ARG):
                return None
            raise
        inputs = {tensor.name for tensor in metadata.inputs}
        outputs = {tensor.name for tensor in metadata.outputs}
        return metadata if TEXT_OUTPUT in outputs and inputs & {TEXT_INPUT, MESSAGES} else None

    def _absent(self, name: str) -> OpenAIError:
        states = {row.state for row in self._server.repository_index() if row.name == name}
        if self._server.is_exiting or "LOADING" in states:
            message = f"the model '{name}' is not ready"
            return OpenAIError(message, status=503, kind="service_unavailable_error", code="unavailable", param="model")
        return model_not_found(name)

    def _describe(self, name: str) -> JsonObject:
        return {"id": name, "object": "model", "created": self._created_s, "owned_by": self._owner}


def _lacks(name: str, prompt_input: str) -> OpenAIError:
    if prompt_input == INPUT_IDS:
        return OpenAIError(f"the model '{name}' takes no token ids as prompt", param="prompt")
    endpoint = _ENDPOINT_OF_INPUT[prompt_input]
    return OpenAIError(f"the model '{name}' has no input '{prompt_input}', which {endpoint} needs", param="model")
