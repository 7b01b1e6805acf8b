"""The tensors of an LLM model: what a client may send and ask for, and how a request's inputs are read.

For: the adapter's border to Triton. Does not know: tokenizers, engines. Invariant: the names, datatypes and shapes of
vllm_backend's model, so that its users' clients work unchanged; ours in addition are marked.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import model_config_pb2

from llmbackend.core.backend_api import ModelConfig, Request, Tensor, invalid_argument, shown, unsupported

logger = logging.getLogger(__name__)

INPUTS: dict[str, tuple[str, int]] = {
    "text_input": ("TYPE_STRING", 1),
    "image": ("TYPE_STRING", -1),
    "stream": ("TYPE_BOOL", 1),
    "sampling_parameters": ("TYPE_STRING", 1),
    "exclude_input_in_output": ("TYPE_BOOL", 1),
    "return_finish_reason": ("TYPE_BOOL", 1),
    "return_cumulative_logprob": ("TYPE_BOOL", 1),
    "return_logprobs": ("TYPE_BOOL", 1),
    "return_num_input_tokens": ("TYPE_BOOL", 1),
    "return_num_output_tokens": ("TYPE_BOOL", 1),
    "embedding_request": ("TYPE_STRING", 1),
    # Ours: a conversation for the model's chat template, token ids instead of text, the generated ids, and how many of
    # the prompt's tokens the prefix cache had.
    "messages": ("TYPE_STRING", 1),
    "input_ids": ("TYPE_INT32", -1),
    "return_output_ids": ("TYPE_BOOL", 1),
    "return_num_cached_tokens": ("TYPE_BOOL", 1),
}
OUTPUTS: dict[str, tuple[str, int]] = {
    "text_output": ("TYPE_STRING", -1),
    "finish_reason": ("TYPE_STRING", -1),
    "cumulative_logprob": ("TYPE_FP32", -1),
    "logprobs": ("TYPE_STRING", -1),
    "num_input_tokens": ("TYPE_UINT32", 1),
    "num_output_tokens": ("TYPE_UINT32", -1),
    "output_ids": ("TYPE_INT32", -1),
    "num_cached_tokens": ("TYPE_UINT32", 1),
}
PROMPT_INPUTS = ("text_input", "messages", "input_ids")
NOT_SUPPORTED_INPUTS = ("image", "embedding_request")


def complete_config(config: ModelConfig) -> ModelConfig:
    """A copy of `config` with the tensors above, max_batch_size 0 and, where the model does not say, decoupled
    responses.

    Raises TritonError INVALID_ARG for a declared tensor that is not one of ours or has another type or shape.
    """
    completed = model_config_pb2.ModelConfig()
    completed.CopyFrom(config)
    _complete_tensors("input", completed.input, INPUTS)
    _complete_tensors("output", completed.output, OUTPUTS)
    if completed.max_batch_size:
        logger.warning("model '%s': max_batch_size is set to 0, requests are batched inside the engine", config.name)
        completed.max_batch_size = 0
    if not completed.HasField("model_transaction_policy"):
        completed.model_transaction_policy.decoupled = True
    return completed


def _complete_tensors(kind: str, declared: Any, table: Mapping[str, tuple[str, int]]) -> None:
    for tensor in declared:
        expected = table.get(tensor.name)
        if expected is None:
            raise invalid_argument(f"{kind} '{tensor.name}' is not one of the llm backend's: {', '.join(table)}")
        found = model_config_pb2.DataType.Name(tensor.data_type)
        if (found, list(tensor.dims)) != (expected[0], [expected[1]]):
            raise invalid_argument(
                f"{kind} '{tensor.name}' is {found}{list(tensor.dims)}, expected {expected[0]}[{expected[1]}]"
            )
        if kind == "input":
            tensor.optional = True
    names = {tensor.name for tensor in declared}
    for name, (data_type, dim) in table.items():
        if name not in names:
            tensor = declared.add(name=name, data_type=model_config_pb2.DataType.Value(data_type), dims=[dim])
            if kind == "input":
                tensor.optional = True


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Which outputs a request gets, and how. `outputs` are the names that its flags enable and its client wants."""

    stream: bool
    prepend_prompt: bool
    outputs: frozenset[str]
    cumulative_logprob: bool


@dataclass(frozen=True, slots=True)
class LlmInputs:
    """A request's inputs, decoded. Exactly one of text_input, messages and input_ids is set."""

    options: OutputOptions
    sampling: Mapping[str, Any]
    text_input: str | None = None
    messages: str | None = None
    input_ids: tuple[int, ...] | None = None


def read_inputs(request: Request, *, decoupled: bool) -> LlmInputs:
    """Decodes a request's tensors and parameters.

    Raises TritonError INVALID_ARG naming the tensor, or UNSUPPORTED for one that this backend does not serve.
    """
    tensors = request.inputs
    for name in NOT_SUPPORTED_INPUTS:
        if name in tensors and tensors[name].data.size:
            raise unsupported(f"input '{name}' is not supported by this backend")
    given = [name for name in PROMPT_INPUTS if name in tensors]
    if len(given) != 1:
        raise invalid_argument(
            f"exactly one of the inputs {', '.join(PROMPT_INPUTS)} must be given, got {', '.join(given) or 'none'}"
        )
    source = given[0]
    ids = tuple(tensors[source].data.ravel().tolist()) if source == "input_ids" else None
    return LlmInputs(
        options=_read_options(request, source, decoupled),
        sampling=_read_sampling(request),
        text_input=_text(tensors[source]) if source == "text_input" else None,
        messages=_text(tensors[source]) if source == "messages" else None,
        input_ids=ids,
    )


def _read_options(request: Request, source: str, decoupled: bool) -> OutputOptions:
    stream = _flag(request, "stream")
    if stream and not decoupled:
        raise unsupported("'stream' is true, but this model is configured with decoupled: false")
    if "exclude_input_in_output" in request.inputs:
        prepend = not _flag(request, "exclude_input_in_output")
    else:
        prepend = source == "text_input" and not stream
    if prepend and stream:
        raise invalid_argument("When streaming, `exclude_input_in_output` = False is not allowed.")
    enabled = {name for name in OUTPUTS if name == "text_output" or _flag(request, f"return_{name}")}
    outputs = frozenset(enabled.intersection(request.requested_outputs))
    return OutputOptions(stream, prepend, outputs, cumulative_logprob="cumulative_logprob" in outputs)


def _read_sampling(request: Request) -> Mapping[str, Any]:
    tensor = request.inputs.get("sampling_parameters")
    if tensor is None:
        return {name: value for name, value in request.parameters.items() if not name.startswith("triton_")}
    try:
        values = json.loads(_text(tensor) or "{}")
    except (ValueError, RecursionError) as error:
        raise invalid_argument(f"input 'sampling_parameters' is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise invalid_argument(f"input 'sampling_parameters' is {shown(values)}, expected a JSON object")
    return values


def _flag(request: Request, name: str) -> bool:
    tensor = request.inputs.get(name)
    return False if tensor is None else bool(_single(tensor))


def _text(tensor: Tensor) -> str:
    value = _single(tensor)
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise invalid_argument(f"input '{tensor.name}' is not UTF-8: {error.reason} at byte {error.start}") from None


def _single(tensor: Tensor) -> Any:
    if tensor.data.size != 1:
        raise invalid_argument(f"input '{tensor.name}' has {tensor.data.size} elements, expected 1")
    return tensor.data.ravel()[0]
