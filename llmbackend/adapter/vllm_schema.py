"""vllm_backend's tensors: what a client may send and ask for, and how a request's inputs are read.

For: models of the schema "vllm", which is the default. Does not know: tokenizers, engines. Invariant: the names,
datatypes, shapes and rules of vllm_backend's model, so that its users' clients work unchanged; ours in addition are
marked.
Source: vllm_backend's src/model.py and src/utils/request.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from tritonclient.grpc import model_config_pb2

from llmbackend.core.backend_api import (
    ErrorCode,
    ModelConfig,
    Request,
    TritonError,
    invalid_argument,
    shown,
    unsupported,
)

from .request_bounds import MAX_PARAMETERS, MAX_SAMPLING_JSON_BYTES, check_count
from .tensor_schema import (
    LlmInputs,
    LoraError,
    OutputOptions,
    Prompt,
    Reply,
    TensorType,
    complete_tensors,
    num_bytes,
    single,
    text_of,
    wanted_outputs,
)
from .text import Text
from .vllm_reply import VllmReply

logger = logging.getLogger(__name__)

_TEXT, _FLAG, _COUNT = TensorType("TYPE_STRING"), TensorType("TYPE_BOOL"), TensorType("TYPE_UINT32")
INPUTS: dict[str, TensorType] = {
    "text_input": _TEXT,
    "image": TensorType("TYPE_STRING", (-1,)),
    "stream": _FLAG,
    "sampling_parameters": _TEXT,
    "exclude_input_in_output": _FLAG,
    "return_finish_reason": _FLAG,
    "return_cumulative_logprob": _FLAG,
    "return_logprobs": _FLAG,
    "return_num_input_tokens": _FLAG,
    "return_num_output_tokens": _FLAG,
    "embedding_request": _TEXT,
    # Ours: a conversation for the model's chat template, token ids instead of text, the generated ids, and how many of
    # the prompt's tokens the prefix cache had.
    "messages": _TEXT,
    "input_ids": TensorType("TYPE_INT32", (-1,)),
    "return_output_ids": _FLAG,
    "return_num_cached_tokens": _FLAG,
}
OUTPUTS: dict[str, TensorType] = {
    "text_output": TensorType("TYPE_STRING", (-1,)),
    "finish_reason": TensorType("TYPE_STRING", (-1,)),
    "cumulative_logprob": TensorType("TYPE_FP32", (-1,)),
    "logprobs": TensorType("TYPE_STRING", (-1,)),
    "num_input_tokens": _COUNT,
    "num_output_tokens": TensorType("TYPE_UINT32", (-1,)),
    "output_ids": TensorType("TYPE_INT32", (-1,)),
    "num_cached_tokens": _COUNT,
}
MAX_TOKENS_MUST_FIT = "triton_max_tokens_must_fit"
"""A request parameter that the OpenAI frontend sets, for vLLM's rule there; clients of KServe can not."""
_SCANNED_BYTES, _SCANNED_KEYS = 4 << 20, 1024
VLLM_BACKEND = "vllm"
PROMPT_INPUTS = ("text_input", "messages", "input_ids")
NOT_SUPPORTED_INPUTS = ("image", "embedding_request")


class VllmSchema:
    needs_text = True
    has_vllms_defaults = True

    def __init__(self, config: ModelConfig) -> None:
        self._decoupled = config.model_transaction_policy.decoupled
        self._is_vllm_backend = config.backend == VLLM_BACKEND

    def complete(self, config: ModelConfig) -> ModelConfig:
        """A copy of `config` with the tensors above, all inputs optional, max_batch_size 0 and, where the model does
        not say, decoupled responses."""
        completed = model_config_pb2.ModelConfig()
        completed.CopyFrom(config)
        complete_tensors("input", completed.input, INPUTS)
        complete_tensors("output", completed.output, OUTPUTS)
        for tensor in completed.input:
            tensor.optional = True
        if completed.max_batch_size:
            logger.warning(
                "model '%s': max_batch_size is set to 0, requests are batched inside the engine", config.name
            )
            completed.max_batch_size = 0
        if not completed.HasField("model_transaction_policy"):
            completed.model_transaction_policy.decoupled = True
        return completed

    def client_error(self, error: TritonError) -> TritonError:
        """vllm_backend puts this prefix before whatever ends a generation, but for cancels and unknown adapters."""
        if not self._is_vllm_backend or isinstance(error, LoraError) or error.code is ErrorCode.CANCELLED:
            return error
        return TritonError(f"Error generating stream: {error.message}", error.code)

    def is_stop(self, request: Request) -> bool:
        return False

    def read(self, request: Request) -> Sequence[LlmInputs]:
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
        inputs = LlmInputs(
            options=self._read_options(request, source),
            sampling=_read_sampling(request),
            text_input=text_of(tensors[source]) if source == "text_input" else None,
            messages=single(tensors[source]) if source == "messages" else None,
            input_ids=tensors[source].data.ravel() if source == "input_ids" else None,
            max_tokens_must_fit=MAX_TOKENS_MUST_FIT in request.parameters,
        )
        return (inputs,)

    def reply(self, inputs: LlmInputs, prompt: Prompt, text: Text) -> Reply:
        return VllmReply(
            inputs.options,
            prompt_text=prompt.text if inputs.options.prepend_prompt else "",
            wants_logprobs=inputs.sampling.get("logprobs") is not None,
            token_text=text.token_text,
        )

    def _read_options(self, request: Request, source: str) -> OutputOptions:
        stream = _flag(request, "stream")
        if stream and not self._decoupled:
            raise unsupported("'stream' is true, but this model is configured with decoupled: false")
        if "exclude_input_in_output" in request.inputs:
            prepend = not _flag(request, "exclude_input_in_output")
        else:
            prepend = source == "text_input" and not stream
        if prepend and stream:
            raise invalid_argument("When streaming, `exclude_input_in_output` = False is not allowed.")
        enabled = {name for name in OUTPUTS if name == "text_output" or _flag(request, f"return_{name}")}
        outputs = wanted_outputs(enabled, request)
        return OutputOptions(stream, prepend, outputs, logprobs="cumulative_logprob" in outputs)


def _read_sampling(request: Request) -> Mapping[str, Any]:
    tensor = request.inputs.get("sampling_parameters")
    if tensor is None:
        check_count("the request", len(request.parameters), MAX_PARAMETERS, "parameters")
        return {name: value for name, value in request.parameters.items() if not name.startswith("triton_")}
    if (size := num_bytes(tensor)) > MAX_SAMPLING_JSON_BYTES:
        raise invalid_argument(_too_long(single(tensor), size))
    try:
        values = json.loads(text_of(tensor) or "{}")
    except (ValueError, RecursionError) as error:
        raise invalid_argument(f"input 'sampling_parameters' is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise invalid_argument(f"input 'sampling_parameters' is {shown(values)}, expected a JSON object")
    return values


def _too_long(text: bytes, size: int) -> str:
    """Names the parameter that takes the most, where finding it takes little."""
    limit = f"{MAX_SAMPLING_JSON_BYTES} for all sampling parameters together"
    if size <= _SCANNED_BYTES and text.count(b":") <= _SCANNED_KEYS:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            values = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            name, value = max(values.items(), key=lambda item: len(memoryview(item[1])), default=("", msgspec.Raw(b"")))
            size_of_one = len(memoryview(value))
            return f"sampling parameter {shown(name)} has {size_of_one} bytes of JSON, expected at most {limit}"
    return f"input 'sampling_parameters' has {size} bytes, expected at most {limit}"


def _flag(request: Request, name: str) -> bool:
    tensor = request.inputs.get(name)
    return False if tensor is None else bool(single(tensor))
