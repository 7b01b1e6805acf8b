"""Which of the host's models are language models: their names, the inputs that each takes, the formats that it writes.

For: endpoints and inferences. Does not know: what a model does with its tensors. Invariants: a model is listed exactly
as long as the host has a READY version of it that is a language model: one where some prompt, with the other inputs
that the frontends can send, is all that it requires; only inputs that it declares are sent, each in its declared rank.
Of formats, what the model's configuration names counts, then what its chat template shows; a name that no format has is
told to the client that needs it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import orjson

from llmbackend.core.backend_api import SERVED_MODEL_NAME, split_names
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.host_protocol import Host
from llmbackend.core.messages import ModelMetadata, TensorMetadata
from llmbackend.core.tensors import Tensor

from ..http.errors import JsonObject, OpenAIError, model_not_found
from .parsers import REASONING_FORMATS, TOOL_CALL_FORMATS, ReasoningFormat, ToolCallFormat, detect
from .request import GenerationRequest
from .tensors import INPUT_IDS, MESSAGES, OPTION_INPUTS, PROMPT_INPUTS, TEXT_INPUT, TEXT_OUTPUT

_CHAT_TEMPLATE, _TOOL_CALL_PARSER, _REASONING_PARSER = "chat_template", "tool_call_parser", "reasoning_parser"
"""Parameters of a model's configuration: a template's text, and names of formats."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """Of one model."""

    tool_calls: ToolCallFormat | None = None
    """None: no format is known."""
    reasoning: ReasoningFormat | None = None
    """None: the model does not reason."""
    error: str = ""
    """What is wrong with the names in the model's configuration."""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> OutputFormats:
        """By the parameters of a model's configuration."""
        tool_calls, reasoning = parameters.get(_TOOL_CALL_PARSER, ""), parameters.get(_REASONING_PARSER, "")
        error = _unknown(_TOOL_CALL_PARSER, tool_calls, TOOL_CALL_FORMATS)
        error = error or _unknown(_REASONING_PARSER, reasoning, REASONING_FORMATS)
        shown_calls, shown_reasoning = detect(parameters.get(_CHAT_TEMPLATE, ""))
        return cls(
            TOOL_CALL_FORMATS.get(tool_calls or shown_calls),
            REASONING_FORMATS.get(reasoning or shown_reasoning),
            error,
        )

    def check(self, model: str) -> None:
        """Raises OpenAIError 500 when the model's configuration is wrong."""
        if self.error:
            message = f"the configuration of the model '{model}' is invalid: {self.error}"
            raise OpenAIError(message, param="model", status=500, kind="server_error")


NO_FORMATS = OutputFormats()


def _unknown(parameter: str, name: str, formats: Mapping[str, T]) -> str:
    if not name or name in formats:
        return ""
    return f"'{parameter}' is '{name}', expected one of: {', '.join(sorted(formats))}"


_ENDPOINT_OF_INPUT = {MESSAGES: "/v1/chat/completions", TEXT_INPUT: "/v1/completions"}
"""A model needs one of these inputs; `input_ids` is another form of a completion's prompt."""
_SAMPLING_DEFAULTS = "sampling_defaults"
"""The parameter of a model's configuration that holds its own sampling parameters, as a JSON object."""
MAX_MODEL_LEN_FAMILY = "llmbackend:max_model_len_tokens"
"""The metric in which a model reports the length of its context, with the label `model`."""
LORA_NAMES = "lora_names"
"""The parameter of a model's configuration that lists its LoRA adapters, separated by commas."""
LORA_MODELS = "lora_models"
"""The parameter that lists those of them that are models by their own names, with any separator."""
_MAX_NAMED = 20
"""Models that an error lists."""
ADAPTERS_FAMILY = "llmbackend:lora_adapters"
"""The metric in which a model reports the adapters that were loaded at run time, by the label `lora_name`."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """What a model that speaks the LLM tensor interface declares."""

    name: str
    """Of the host's model."""
    served_names: Sequence[str]
    """What clients call it, the canonical name first."""
    ranks: Mapping[str, int]
    """Number of dimensions of each input that the model takes and this frontend can send."""
    fingerprint: str
    """OpenAI's `system_fingerprint`; "" when the host has none."""
    formats: OutputFormats = NO_FORMATS
    """How it writes tool calls and reasoning."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Its own values of sampling parameters that a request leaves out."""

    @classmethod
    def of(cls, metadata: ModelMetadata, parameters: Mapping[str, str]) -> LanguageModel | None:
        """parameters: of the model's configuration. None for a model that is no language model, or that requires inputs
        which this frontend does not know."""
        outputs = {tensor.name: tensor.datatype for tensor in metadata.outputs}
        known = {tensor.name: tensor for tensor in metadata.inputs if _is_known(tensor)}
        required = {tensor.name for tensor in metadata.inputs} - metadata.optional_inputs
        prompts = [
            name for name in PROMPT_INPUTS if name in known and required - {name} <= OPTION_INPUTS.keys() & known.keys()
        ]
        if outputs.get(TEXT_OUTPUT) != "BYTES" or not any(name in prompts for name in _ENDPOINT_OF_INPUT):
            return None
        usable = {name: len(tensor.shape) for name, tensor in known.items() if name in OPTION_INPUTS or name in prompts}
        fingerprint = f"fp_{metadata.fingerprint}" if metadata.fingerprint else ""
        defaults = orjson.loads(parameters.get(_SAMPLING_DEFAULTS, "{}"))
        served_names = split_names(parameters.get(SERVED_MODEL_NAME, "")) or (metadata.name,)
        return cls(metadata.name, served_names, usable, fingerprint, OutputFormats.of(parameters), defaults)

    def takes(self, name: str) -> bool:
        return name in self.ranks

    def fitted(self, tensor: Tensor) -> Tensor:
        """`tensor`, which has one dimension, in the rank that the model declares: batches are of one."""
        shape = (1,) * (self.ranks[tensor.name] - 1) + tensor.shape
        if shape == tensor.shape:
            return tensor
        return dataclasses.replace(tensor, shape=shape, data=tensor.data.reshape(shape))


def _is_known(tensor: TensorMetadata) -> bool:
    """Whether this frontend has an input of this name and datatype, and the model takes one value of it."""
    expected = PROMPT_INPUTS.get(tensor.name) or OPTION_INPUTS.get(tensor.name)
    sizes = tensor.shape[:-1] if expected == "INT32" else tensor.shape
    return expected == tensor.datatype and len(tensor.shape) > 0 and all(size in (-1, 1) for size in sizes)


@dataclass(frozen=True, slots=True)
class Target:
    """What a request's `model` names."""

    name: str
    """The host's model."""
    lora_name: str
    """One of its LoRA adapters, or ""."""
    model: LanguageModel


class ModelCatalog:
    """The models that clients may name."""

    def __init__(self, server: Host, lora_separator: str = "", fingerprint: str | None = None) -> None:
        """lora_separator: stands between a model and its adapter (Triton's --lora-separator); "": adapters have no such
        name. fingerprint: of all models, instead of their own."""
        self._server = server
        self._fingerprint = fingerprint
        self._separator = lora_separator
        self._created_s = int(time.time())
        self._known: dict[str, tuple[object, LanguageModel | None]] = {}
        self._owner = "llmbackend"

    def names(self) -> list[str]:
        ready = dict.fromkeys(row.name for row in self._server.repository_index(ready_only=True))
        models = [found for name in ready if (found := self._language_model(name)) is not None]
        served = [served for model in models for served in model.served_names]
        separated = (
            f"{model.served_names[0]}{self._separator}{lora}"
            for model in models
            for lora in self._loras(model.name)
            if lora not in self._listed(model.name, LORA_MODELS)
        )
        known = {model.name for model in models}
        return [*served, *separated, *(lora for lora, name in self._adapters().items() if name in known)]

    def list(self) -> JsonObject:
        lengths = self._context_lengths()
        return {"object": "list", "data": [self._describe(name, lengths) for name in self.names()]}

    def get(self, model: str) -> JsonObject:
        """Raises OpenAIError as `require`."""
        name, _ = self._split(model)
        if self._language_model(name) is None:
            raise self._absent(name)
        return self._describe(model, self._context_lengths())

    def require(self, model: str, prompt_input: str) -> Target:
        """Raises OpenAIError: 404 for a model not served here, 503 while it loads or when it could not be loaded, 400
        when it lacks `prompt_input` or the adapter."""
        name, lora_name = self._split(model)
        found = self._language_model(name)
        if found is None:
            raise self._absent(name)
        if not found.takes(prompt_input):
            raise _lacks(name, prompt_input)
        return Target(found.name, lora_name, found)

    def with_model(self, request: GenerationRequest) -> GenerationRequest:
        """`request`, which may name no model, with the one that it means. Raises OpenAIError as `named`."""
        return request if request.model else dataclasses.replace(request, model=self.named(None))

    def named(self, model: str | None) -> str:
        """The model that a request means: without a name, the only one that is served. Raises OpenAIError."""
        if model is not None:
            return model
        ready = dict.fromkeys(row.name for row in self._server.repository_index(ready_only=True))
        served = [found.served_names[0] for name in ready if (found := self._language_model(name)) is not None]
        if len(served) == 1:
            return served[0]
        known = f"this server has {len(served)} models{': ' if served else ''}{', '.join(served[:_MAX_NAMED])}"
        raise OpenAIError(f"missing required field 'model': {known}", param="model", code="missing_required_parameter")

    def _split(self, model: str) -> tuple[str, str]:
        """Model and adapter. A model whose own name holds the separator is itself."""
        name, separator, lora_name = model.partition(self._separator) if self._separator else (model, "", "")
        if (found := self._language_model(model)) is not None:
            return found.name, ""
        if (base := self._adapters().get(model)) is not None:
            return base, model
        if not separator:
            return model, ""
        if lora_name not in self._loras(name):
            raise OpenAIError(f"Unknown LoRA: {lora_name}; for model: {name}", param="model")
        found = self._language_model(name)
        return name if found is None else found.name, lora_name

    def model_of_adapter(self, lora_name: str) -> str:
        """The model that has an adapter that was loaded at run time. Raises OpenAIError 404."""
        model = self._loaded().get(lora_name)
        if model is None:
            text = f"The lora adapter '{lora_name}' cannot be found."
            raise OpenAIError(text, param="lora_name", status=404, code="not_found")
        return model

    def check_adapter_name(self, lora_name: str, model: str) -> None:
        """Raises OpenAIError where the name of an adapter of `model` would also mean something else, and where there is
        no such model."""
        if self._language_model(model) is None:
            raise self._absent(model)
        if self._language_model(lora_name) is not None:
            text = f"The lora adapter name '{lora_name}' conflicts with a served base model."
            raise OpenAIError(text, param="lora_name", code="invalid_value")
        if (other := self._adapters().get(lora_name, model)) != model:
            text = f"The lora adapter '{lora_name}' has already been loaded for the model '{other}'."
            raise OpenAIError(text, param="lora_name", code="invalid_value")

    def _adapters(self) -> dict[str, str]:
        """Adapters that are models by their own names, each with its model; of two with one name, the first."""
        found: dict[str, str] = {}
        for row in self._server.repository_index(ready_only=True):
            for lora_name in self._listed(row.name, LORA_MODELS):
                found.setdefault(lora_name, row.name)
        return self._loaded() | found

    def _loaded(self) -> dict[str, str]:
        """Adapters that were loaded at run time, each with its model."""
        samples = self._server.metric_samples(ADAPTERS_FAMILY)
        return {sample.labels["lora_name"]: sample.labels["model"] for sample in samples}

    def _loras(self, name: str) -> Sequence[str]:
        """The adapters that a model has from its start, where they have names with a separator."""
        return self._listed(name, LORA_NAMES) if self._separator else ()

    def _listed(self, name: str, parameter: str) -> Sequence[str]:
        if self._language_model(name) is None:
            return ()
        parameters = self._server.model_parameters(name)
        return parameters[parameter].split(",") if parameter in parameters else ()

    def _language_model(self, name: str) -> LanguageModel | None:
        """None when no version of it is READY or it is not a language model.

        One whose engine is down for the moment is still served: its requests are answered with 503, not with 404.
        """
        try:
            metadata = self._server.model_metadata(name)
        except TritonError as error:
            if error.code in (ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE, ErrorCode.INVALID_ARG):
                self._known.pop(name, None)
                return None
            raise
        read_from, found = self._known.get(name, (None, None))
        if read_from is not metadata.inputs:  # made once per load
            found = LanguageModel.of(metadata, self._server.model_parameters(name))
            if found is not None and self._fingerprint is not None:
                found = dataclasses.replace(found, fingerprint=self._fingerprint)
            self._known[name] = metadata.inputs, found
        return found

    def _absent(self, name: str) -> OpenAIError:
        """Why there is no such model: it is unknown, it loads, or it could not be loaded, with the reason."""
        rows = [row for row in self._server.repository_index() if row.name == name]
        reasons = [row.reason for row in rows if row.state == "UNAVAILABLE" and row.reason not in ("", "unloaded")]
        if not self._server.is_exiting and reasons:
            return _not_now(f"the model '{name}' could not be loaded: {'; '.join(dict.fromkeys(reasons))}")
        if self._server.is_exiting or any(row.state == "LOADING" for row in rows):
            return _not_now(f"the model '{name}' is not ready")
        return model_not_found(name)

    def _context_lengths(self) -> dict[str, int]:
        """Of the models that report theirs, the number of tokens that prompt and answer may have together."""
        samples = self._server.metric_samples(MAX_MODEL_LEN_FAMILY)
        return {sample.labels.get("model", ""): int(sample.value) for sample in samples}

    def _describe(self, model: str, context_lengths: Mapping[str, int]) -> JsonObject:
        """`root` is the model that computes: an adapter's is its parent."""
        name, lora_name = self._split(model)
        found = self._language_model(name)
        canonical = name if found is None else found.served_names[0]
        return {
            "id": model,
            "object": "model",
            "created": self._created_s,
            "owned_by": self._owner,
            "root": canonical,
            "parent": canonical if lora_name else None,
            "max_model_len": context_lengths.get(name),
        }


def _not_now(message: str) -> OpenAIError:
    return OpenAIError(message, status=503, kind="service_unavailable_error", code="unavailable", param="model")


def _lacks(name: str, prompt_input: str) -> OpenAIError:
    if prompt_input == INPUT_IDS:
        return OpenAIError(f"the model '{name}' does not accept token ids as prompt", param="prompt")
    endpoint = _ENDPOINT_OF_INPUT[prompt_input]
    return OpenAIError(f"the model '{name}' has no input '{prompt_input}', which {endpoint} needs", param="model")
