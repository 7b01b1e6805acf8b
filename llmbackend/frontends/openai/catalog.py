"""Which of the host's models speak the OpenAI API.

For: the router. Does not know: what a model does with its tensors. Invariant: a model is served here exactly as long
as the host has a READY version of it, whose configuration has `text_output` and one of `messages`, `text_input`.
"""

from __future__ import annotations

import time

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import ModelMetadata

from .errors import OpenAIError, model_not_found
from .fields import JsonObject
from .tensors import INPUT_IDS, MESSAGES, TEXT_INPUT, TEXT_OUTPUT

_ENDPOINT_OF_INPUT = {MESSAGES: "/v1/chat/completions", TEXT_INPUT: "/v1/completions"}


class ModelCatalog:
    """The models a client may name."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._created_s = int(time.time())
        self._owner = "llmbackend"

    def names(self) -> list[str]:
        ready = dict.fromkeys(row.name for row in self._server.repository_index(ready_only=True))
        return [name for name in ready if self._language_model(name) is not None]

    def list(self) -> JsonObject:
        return {"object": "list", "data": [self._describe(name) for name in self.names()]}

    def get(self, name: str) -> JsonObject:
        """Raises OpenAIError 404 for a model that is not served here."""
        if self._language_model(name) is None:
            raise model_not_found(name)
        return self._describe(name)

    def require(self, name: str, prompt_input: str) -> frozenset[str]:
        """The names of the model's inputs. Raises OpenAIError: 404 for a model not served here, 503 while it loads,
        400 when it lacks `prompt_input`."""
        metadata = self._language_model(name)
        if metadata is None:
            raise self._absent(name)
        inputs = frozenset(tensor.name for tensor in metadata.inputs)
        if prompt_input in inputs:
            return inputs
        if prompt_input == INPUT_IDS:
            raise OpenAIError(f"the model '{name}' takes no token ids as prompt", param="prompt")
        endpoint = _ENDPOINT_OF_INPUT[prompt_input]
        raise OpenAIError(f"the model '{name}' has no input '{prompt_input}', which {endpoint} needs", param="model")

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
