"""The host's language models: their names, inputs and output formats.

Invariants: a model is listed while the host has a READY version that requires a prompt and no input unknown to the
frontends; only inputs that it declares are sent, in their declared rank. Formats are those named by the model's
configuration, otherwise those detected from its chat template. If the configuration names an unknown format, requests
that need it fail. The host's index, which reads directories and asks backends whether they are ready, is read on a
thread, and only for what cannot be answered without it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import orjson

from llmbackend.core.backend_api import SERVED_MODEL_NAME, split_names
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.messages import ModelIndex, ModelMetadata, TensorMetadata
from llmbackend.core.tensors import Tensor

from ..http.errors import JsonObject, OpenAIError, model_not_found
from ..inference_gate import InferenceGate
from .parsers import REASONING_FORMATS, TOOL_CALL_FORMATS, ReasoningFormat, ToolCallFormat, detect
from .request import GenerationRequest
from .tensors import INPUT_IDS, MESSAGES, OPTION_INPUTS, PROMPT_INPUTS, TEXT_INPUT, TEXT_OUTPUT

_CHAT_TEMPLATE, _TOOL_CALL_PARSER, _REASONING_PARSER = "chat_template", "tool_call_parser", "reasoning_parser"
"""Parameters of a model's configuration: the text of the template, and names of formats."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """The output formats of one model."""

    tool_calls: ToolCallFormat | None = None
    """None: unknown."""
    reasoning: ReasoningFormat | None = None
    """None: the model does not reason."""
    error: str = ""
    """Why the names in the model's configuration are invalid; "" if they are valid."""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> OutputFormats:
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
        """Raises OpenAIError 500 for an invalid configuration."""
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
"""Parameter of a model's configuration: its own sampling parameters, as a JSON object."""
MAX_MODEL_LEN_FAMILY = "llmbackend:max_model_len_tokens"
"""Metric: the length of a model's context, by the label `model`."""
LORA_NAMES = "lora_names"
"""Parameter: a model's LoRA adapters, separated by commas."""
LORA_MODELS = "lora_models"
"""Parameter: the adapters that clients can name like a model."""
_MAX_NAMED = 20
"""How many models an error message lists."""
ADAPTERS_FAMILY = "llmbackend:lora_adapters"
"""Metric: the adapters loaded at run time, by the label `lora_name`."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A model with the LLM tensor interface, as described by its metadata."""

    name: str
    """The host's name."""
    served_names: Sequence[str]
    """The clients' names of it, the canonical one first."""
    ranks: Mapping[str, int]
    """Number of dimensions of each input that the model has and the frontends can send."""
    fingerprint: str
    """OpenAI's `system_fingerprint`; "" when the host has none."""
    formats: OutputFormats = NO_FORMATS
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """The model's own values of sampling parameters that a request omits."""

    @classmethod
    def of(cls, metadata: ModelMetadata, parameters: Mapping[str, str]) -> LanguageModel | None:
        """parameters: from the configuration. Returns None for other models and for those that require an unknown
        input."""
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

    def has_input(self, name: str) -> bool:
        return name in self.ranks

    def reshaped(self, tensor: Tensor) -> Tensor:
        """Reshapes a tensor of one dimension to the rank that the model declares, as a batch of one."""
        shape = (1,) * (self.ranks[tensor.name] - 1) + tensor.shape
        if shape == tensor.shape:
            return tensor
        return dataclasses.replace(tensor, shape=shape, data=tensor.data.reshape(shape))


def _is_known(tensor: TensorMetadata) -> bool:
    """Whether the frontends can send it: its name, its datatype, and one value."""
    expected = PROMPT_INPUTS.get(tensor.name) or OPTION_INPUTS.get(tensor.name)
    sizes = tensor.shape[:-1] if expected == "INT32" else tensor.shape
    return expected == tensor.datatype and len(tensor.shape) > 0 and all(size in (-1, 1) for size in sizes)


@dataclass(frozen=True, slots=True)
class Target:
    """The model and adapter named by a request's `model`."""

    name: str
    """The host's name of the model."""
    lora_name: str
    """"" without an adapter."""
    model: LanguageModel


class ModelCatalog:
    """The models that clients may name. Used on one event loop."""

    def __init__(self, gate: InferenceGate, lora_separator: str = "", fingerprint: str | None = None) -> None:
        """lora_separator: separates the names of model and adapter (Triton's --lora-separator); "": no such names.
        fingerprint: replaces the models' own fingerprints"""
        self._server = gate.server
        self._readiness = gate.readiness
        self._fingerprint = fingerprint
        self._separator = lora_separator
        self._created_s = int(time.time())
        self._known: dict[str, tuple[object, LanguageModel | None]] = {}
        self._models: Sequence[LanguageModel] = ()
        """Those of the latest index, in its order."""

    async def list(self) -> JsonObject:
        await self._index()
        lengths = self._context_lengths()
        return {"object": "list", "data": [self._described(*named, lengths) for named in self._names()]}

    async def get(self, model: str) -> JsonObject:
        """Raises OpenAIError as `require`."""
        return self._described(model, await self._target(model), self._context_lengths())

    async def require(self, model: str, prompt_input: str) -> Target:
        """Raises OpenAIError: 404 for an unknown model, 503 while it is loading or if loading failed, 400 if it does
        not have `prompt_input` or the adapter."""
        target = await self._target(model)
        if not target.model.has_input(prompt_input):
            raise _lacks(target.name, prompt_input)
        return target

    async def with_model(self, request: GenerationRequest) -> GenerationRequest:
        """Raises OpenAIError as `named`."""
        return request if request.model else dataclasses.replace(request, model=await self.named(None))

    async def named(self, model: str | None) -> str:
        """`model`; for None, the only one that is served. Raises OpenAIError if there are several or none."""
        if model is not None:
            return model
        await self._index()
        served = [model.served_names[0] for model in self._models]
        if len(served) == 1:
            return served[0]
        known = f"this server has {len(served)} models{': ' if served else ''}{', '.join(served[:_MAX_NAMED])}"
        raise OpenAIError(f"missing required field 'model': {known}", param="model", code="missing_required_parameter")

    async def _index(self) -> Sequence[ModelIndex]:
        """Reads the index, and which of its models are language models."""
        index = await self._readiness.repository_index(ready_only=False)
        names = dict.fromkeys(row.name for row in index)
        self._models = [found for name in names if (found := self._language_model(name)) is not None]
        return index

    def _names(self) -> Iterator[tuple[str, Target]]:
        """Each name that clients may use, and what it means."""
        for model in self._models:
            yield from ((name, Target(model.name, "", model)) for name in model.served_names)
        for model in self._models:
            bare = self._listed(model.name, LORA_MODELS)
            for lora_name in self._loras(model.name):
                if lora_name not in bare:
                    name = f"{model.served_names[0]}{self._separator}{lora_name}"
                    yield name, Target(model.name, lora_name, model)
        by_name = {model.name: model for model in self._models}
        for lora_name, name in self._adapters().items():
            if name in by_name:
                yield lora_name, Target(name, lora_name, by_name[name])

    async def _target(self, model: str) -> Target:
        """What clients mean by `model`. Raises OpenAIError as `require`."""
        if (target := self._known_target(model)) is not None:
            return target
        index = await self._index()
        if (target := self._known_target(model)) is not None:
            return target
        base, (name, separator, lora_name) = self._adapters().get(model), self._split(model)
        if separator and base is None:
            raise OpenAIError(f"Unknown LoRA: {lora_name}; for model: {name}", param="model")
        raise self._absent(base or model, index)

    def _known_target(self, model: str) -> Target | None:
        """A model whose own name contains the separator takes precedence, then an adapter that is named like a model.
        None: not known yet; the index may list it."""
        if (found := self._language_model(model)) is not None:
            return Target(found.name, "", found)
        name, lora_name = self._adapters().get(model), model
        if name is None:
            name, _, lora_name = self._split(model)
            if lora_name not in self._loras(name):
                return None
        found = self._language_model(name)
        return None if found is None else Target(found.name, lora_name, found)

    def _split(self, model: str) -> tuple[str, str, str]:
        """(name of a model, the separator, name of its adapter); the last two are "" without a separator."""
        return model.partition(self._separator) if self._separator else (model, "", "")

    def model_of_adapter(self, lora_name: str) -> str:
        """The model of an adapter that was loaded at run time. Raises OpenAIError 404."""
        model = self._loaded().get(lora_name)
        if model is None:
            text = f"The lora adapter '{lora_name}' cannot be found."
            raise OpenAIError(text, param="lora_name", status=404, code="not_found")
        return model

    async def check_adapter_name(self, lora_name: str, model: str) -> None:
        """Raises OpenAIError if the name is already taken, or there is no such model."""
        index = await self._index()
        if self._language_model(model) is None:
            raise self._absent(model, index)
        if self._language_model(lora_name) is not None:
            text = f"The lora adapter name '{lora_name}' conflicts with a served base model."
            raise OpenAIError(text, param="lora_name", code="invalid_value")
        if (other := self._adapters().get(lora_name, model)) != model:
            text = f"The lora adapter '{lora_name}' has already been loaded for the model '{other}'."
            raise OpenAIError(text, param="lora_name", code="invalid_value")

    def _adapters(self) -> dict[str, str]:
        """Adapter → model, for adapters that clients can name like a model; if two have the same name, the first."""
        found: dict[str, str] = {}
        for model in self._models:
            for lora_name in self._listed(model.name, LORA_MODELS):
                found.setdefault(lora_name, model.name)
        return self._loaded() | found

    def _loaded(self) -> dict[str, str]:
        """Adapter → model, for adapters that were loaded at run time."""
        samples = self._server.metric_samples(ADAPTERS_FAMILY)
        return {sample.labels["lora_name"]: sample.labels["model"] for sample in samples}

    def _loras(self, name: str) -> Sequence[str]:
        """The adapters of a model's configuration, if names have a separator."""
        return self._listed(name, LORA_NAMES) if self._separator else ()

    def _listed(self, name: str, parameter: str) -> Sequence[str]:
        if self._language_model(name) is None:
            return ()
        parameters = self._server.model_parameters(name)
        return parameters[parameter].split(",") if parameter in parameters else ()

    def _language_model(self, name: str) -> LanguageModel | None:
        """None if no version is READY or it is not a language model. While its engine is down, it is listed and answers
        503."""
        try:
            metadata = self._server.model_metadata(name)
        except TritonError as error:
            if error.code in (ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE, ErrorCode.INVALID_ARG):
                self._known.pop(name, None)
                return None
            raise
        read_from, found = self._known.get(name, (None, None))
        if read_from is not metadata.inputs:  # created once per load
            found = LanguageModel.of(metadata, self._server.model_parameters(name))
            if found is not None and self._fingerprint is not None:
                found = dataclasses.replace(found, fingerprint=self._fingerprint)
            self._known[name] = metadata.inputs, found
        return found

    def _absent(self, name: str, index: Sequence[ModelIndex]) -> OpenAIError:
        """The error for a model that is unknown, is loading, or could not be loaded."""
        rows = [row for row in index if row.name == name]
        reasons = [row.reason for row in rows if row.state == "UNAVAILABLE" and row.reason not in ("", "unloaded")]
        if not self._server.is_exiting and reasons:
            return _not_now(f"the model '{name}' could not be loaded: {'; '.join(dict.fromkeys(reasons))}")
        if self._server.is_exiting or any(row.state == "LOADING" for row in rows):
            return _not_now(f"the model '{name}' is not ready")
        absent = model_not_found(name)
        if any(row.state == "READY" for row in rows):
            absent.message += (
                f" for this API, which serves models with the output '{TEXT_OUTPUT}', an input "
                f"{' or '.join(map(repr, _ENDPOINT_OF_INPUT))}, and no required input that it cannot set"
            )
        return absent

    def _context_lengths(self) -> dict[str, int]:
        """The context length in tokens of each model that reports it."""
        samples = self._server.metric_samples(MAX_MODEL_LEN_FAMILY)
        return {sample.labels.get("model", ""): int(sample.value) for sample in samples}

    def _described(self, name: str, target: Target, context_lengths: Mapping[str, int]) -> JsonObject:
        """An adapter's `root` and `parent` are its model."""
        canonical = target.model.served_names[0]
        return {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "llmbackend",
            "root": canonical,
            "parent": canonical if target.lora_name else None,
            "max_model_len": context_lengths.get(target.name),
        }


def _not_now(message: str) -> OpenAIError:
    return OpenAIError(message, status=503, kind="service_unavailable_error", code="unavailable", param="model")


def _lacks(name: str, prompt_input: str) -> OpenAIError:
    if prompt_input == INPUT_IDS:
        return OpenAIError(f"the model '{name}' does not accept token ids as prompt", param="prompt")
    endpoint = _ENDPOINT_OF_INPUT[prompt_input]
    return OpenAIError(f"the model '{name}' has no input '{prompt_input}', which {endpoint} needs", param="model")
