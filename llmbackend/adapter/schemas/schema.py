"""The interface of schemas, which translate between a model's Triton tensors and generations, and their common code.

Used by the schemas of vLLM and TensorRT-LLM, and by their callers. Independent of any schema's tensors. Invariant: a
schema reads a request completely; its tensors are not read later.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import model_config_pb2

from llmbackend.core.backend_api import (
    ErrorCode,
    JsonTensor,
    ModelConfig,
    Outputs,
    Request,
    Tensor,
    TritonError,
    invalid_argument,
    layout_of,
)
from llmbackend.engine.messages import TokenLogprobs

from ..structured_outputs.constraint import FIELDS
from ..text.output_assembler import Chunk, OutputAssembler
from ..text.token_bias import NO_BIAS, TokenBias
from ..text.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

SEQUENCE_INDEX: Final = "sequence_index"
"""The output with the index of the choice to which a response belongs."""
PROMPT_OUTPUTS: Final = ("prompt_token_ids", "prompt_logprobs", "prompt_text", "prompt_first_token")
"""Outputs that occur in only one response of a request."""
CONSTRAINT_FIELDS = frozenset(FIELDS)
GUIDE_TYPE, GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
"""TensorRT-LLM's tensors for structured output."""


@dataclass(slots=True)
class TaskTimes:
    """When each phase of a generation began or ended: time.monotonic_ns(); 0 = not yet."""

    exec_start_ns: int
    """Execute was called with its request."""
    compute_start_ns: int = 0
    """Its request had been converted."""
    taken_ns: int = 0
    """An engine took it for the first time."""
    first_token_ns: int = 0
    last_token_ns: int = 0


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The outputs of a generation, and how they are sent."""

    stream: bool
    prepend_prompt: bool
    outputs: frozenset[str]
    """Names of the outputs that are both enabled by the request's flags and requested by its client."""
    logprobs: bool = False
    """Whether an output needs the logprob of the sampled token."""
    text_tokens: bool = False
    """Whether an output needs the tokens with their text."""


@dataclass(frozen=True, slots=True)
class LlmInputs:
    """The parameters of one prompt's generations. Exactly one of text_input, messages and input_ids is set."""

    options: OutputOptions
    sampling: Mapping[str, Any]
    """Sampling parameters by name, not checked yet."""
    text_input: str | None = None
    messages: bytes | None = None
    """JSON."""
    parsed_messages: Any = None
    """The parsed messages, if the host has them; None = not parsed yet."""
    input_ids: npt.NDArray[Any] | None = None
    """Token ids: integers, one dimension."""
    prior_output_ids: npt.NDArray[Any] | None = None
    """Tokens that have already been sent and after which the generation continues; never empty."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that end the generation."""
    hides_stop_token: bool = False
    """Whether include_stop_str_in_output applies to stop strings only, not to the token that ends the generation."""
    max_tokens_must_fit: bool = False
    """Whether a max_tokens beyond the context is refused rather than reduced."""
    bias: TokenBias = NO_BIAS
    """Biases and banned words, in addition to those in `sampling`."""
    batch_index: int = 0
    """The prompt's index in its request."""
    num_sequences: int = 1
    """Generations of the prompt. A schema sets it instead of the parameter `n` if each has its own responses."""
    sequence_index: int = 0
    """The generation's index among those of its prompt."""
    prompt_only: bool = False
    """Whether nothing is generated and the outputs only describe the prompt."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A generation's prompt."""

    text: str
    """"" if the prompt was given as token ids and is not part of the output."""
    token_ids: tuple[int, ...]


class Generation(Protocol):
    """What a reply may read of its generation apart from the tokens."""

    times: TaskTimes
    kv_block_size: int
    """Tokens per block of the engines' KV cache."""
    num_draft_tokens: int
    """Draft tokens that engines proposed for it."""
    num_accepted_draft_tokens: int

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def assembler(self) -> OutputAssembler: ...


class Reply:
    """Builds the outputs of one generation, response by response."""

    __slots__ = ()
    waits_for_text: bool
    """Whether a stream sends nothing while all of its text is held back."""

    def add_prompt_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        """entries: those of the next prompt tokens. Does nothing if no output needs them."""

    def outputs(self, chunk: Chunk, generation: Generation) -> Sequence[Tensor]:
        """The outputs of one response."""
        raise NotImplementedError


class Schema(Protocol):
    """The tensors of one model. Read-only: any thread uses it."""

    needs_tokenizer: bool
    """False = prompts and outputs are token ids, and the model needs no tokenizer."""
    outputs_of_prompt: frozenset[str]
    """Outputs that describe the prompt; of several generations, those of the first one are sent."""
    has_model_defaults: bool
    """Whether the model's generation_config.json supplies the sampling parameters that a request omits."""

    def complete(self, config: ModelConfig) -> ModelConfig:
        """A copy of `config` with the tensors that it does not declare. Raises TritonError INVALID_ARG for a declared
        tensor that does not fit."""

    def read(self, request: Request) -> Sequence[LlmInputs]:
        """The prompts of a request, at least one. Raises TritonError INVALID_ARG naming the tensor, or UNSUPPORTED
        for a tensor that this backend does not support."""

    def reply(
        self, inputs: LlmInputs, prompt: Prompt, tokenizer: ModelTokenizer, not_enforced: Sequence[str] = ()
    ) -> Reply:
        """not_enforced: paths of the JSON schema keywords that the request's grammar does not enforce"""

    def client_error(self, error: TritonError) -> TritonError:
        """`error` with the text that clients of this schema expect."""


class LoraError(TritonError):
    """A request names an adapter that the model does not serve."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorCode.INVALID_ARG, "lora_name")


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor as a configuration declares it, without the batch dimension."""

    data_type: str
    """"" = any datatype and any dims."""
    dims: tuple[int, ...] = (1,)
    usual: str = "TYPE_FP16"
    """The datatype of a tensor for which any is accepted, if the configuration does not declare it."""

    def __str__(self) -> str:
        return f"{self.data_type}{list(self.dims)}"


TEXT, TEXTS = TensorType("TYPE_STRING"), TensorType("TYPE_STRING", (-1,))
INT, INTS = TensorType("TYPE_INT32"), TensorType("TYPE_INT32", (-1,))
LONG, LONGS = TensorType("TYPE_UINT64"), TensorType("TYPE_UINT64", (-1,))
FLOAT, FLOATS = TensorType("TYPE_FP32"), TensorType("TYPE_FP32", (-1,))
FLAG, TIME = TensorType("TYPE_BOOL"), TensorType("TYPE_INT64")


def complete_config(
    config: ModelConfig, inputs: Mapping[str, TensorType], outputs: Mapping[str, TensorType]
) -> ModelConfig:
    """A copy of `config` with the tensors that it does not declare (inputs as optional ones), and with decoupled
    responses unless it says otherwise.

    Raises TritonError INVALID_ARG for a declared tensor that is not in the table, or has a different type or shape.
    """
    completed = copy.deepcopy(config)
    _complete_tensors("input", completed.input, inputs)
    _complete_tensors("output", completed.output, outputs)
    if not completed.HasField("model_transaction_policy"):
        completed.model_transaction_policy.decoupled = True
    return completed


def complete_unbatched_config(
    config: ModelConfig, inputs: Mapping[str, TensorType], outputs: Mapping[str, TensorType]
) -> ModelConfig:
    """Like `complete_config`, with all inputs optional and max_batch_size 0."""
    completed = complete_config(config, inputs, outputs)
    for tensor in completed.input:
        tensor.optional = True
    if completed.max_batch_size:
        logger.warning("model '%s': max_batch_size is set to 0, requests are batched inside the engine", config.name)
        completed.max_batch_size = 0
    return completed


def _complete_tensors(kind: str, declared: Any, table: Mapping[str, TensorType]) -> None:
    for tensor in declared:
        _check_declared(kind, tensor, table)
    names = {tensor.name for tensor in declared}
    for name, wanted in table.items():
        if name not in names:
            data_type = model_config_pb2.DataType.Value(wanted.data_type or wanted.usual)
            tensor = declared.add(name=name, data_type=data_type, dims=wanted.dims)
            if kind == "input":
                tensor.optional = True


def _check_declared(kind: str, tensor: Any, table: Mapping[str, TensorType]) -> None:
    expected = table.get(tensor.name)
    if expected is None:
        raise invalid_argument(f"{kind} '{tensor.name}' is not one of the llm backend's: {', '.join(table)}")
    found = TensorType(model_config_pb2.DataType.Name(tensor.data_type), tuple(tensor.dims))
    if expected.data_type and found != expected:
        raise invalid_argument(f"{kind} '{tensor.name}' is {found}, expected {expected}")


def text_of(tensor: Tensor) -> str:
    """The string in a tensor with one element."""
    return decoded(tensor.name, single(tensor))


def decoded(name: str, value: Any) -> str:
    """One element of a BYTES tensor as text. Raises TritonError INVALID_ARG that names the input."""
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise invalid_argument(f"input '{name}' is not UTF-8: {error.reason} at byte {error.start}") from None


def single(tensor: Tensor) -> Any:
    """The only element of a tensor. Raises TritonError INVALID_ARG."""
    if tensor.data.size != 1:
        raise invalid_argument(f"input '{tensor.name}' has {tensor.data.size} elements, expected 1")
    return tensor.data.ravel()[0]


def num_bytes(tensor: Tensor) -> int:
    """The size of its elements; for BYTES, of their contents."""
    if tensor.datatype != "BYTES":
        return tensor.data.nbytes
    return sum(map(len, tensor.data.ravel().tolist()))


def may_have_constraint(request: Request) -> bool:
    """False if the request certainly does not ask for structured output."""
    if GUIDE_TYPE in request.inputs or not CONSTRAINT_FIELDS.isdisjoint(request.parameters):
        return True
    tensor = request.inputs.get("sampling_parameters")
    if isinstance(tensor, JsonTensor):
        return isinstance(tensor.value, dict) and not CONSTRAINT_FIELDS.isdisjoint(tensor.value)
    if tensor is None or tensor.datatype != "BYTES" or tensor.data.size != 1:
        return False
    text = tensor.data.ravel()[0]
    names = (name if isinstance(text, str) else name.encode() for name in CONSTRAINT_FIELDS)
    return any(name in text for name in names) or ("\\u" if isinstance(text, str) else b"\\u") in text


def is_stop(request: Request) -> bool:
    """Whether the request only asks to end other requests with the same id: TensorRT-LLM's input `stop`."""
    tensor = request.inputs.get("stop")
    return tensor is not None and bool(np.any(tensor.data))


def wanted_outputs(enabled: Iterable[str], request: Request) -> frozenset[str]:
    """The names in `enabled` that the client requested."""
    return frozenset(enabled).intersection(request.requested_outputs)


def outputs_of(values: Mapping[str, Any], datatypes: Mapping[str, str], *, stream: bool) -> Sequence[Tensor]:
    """The outputs with these values, by name: as plain values in a stream, which has a response per token; otherwise as
    tensors, so that the event loop need not create large ones."""
    layout = layout_of(tuple(values), tuple([datatypes[name] for name in values]))
    outputs = Outputs(layout, tuple(values.values()))
    return outputs if stream else outputs.tensors


def parameter(config: ModelConfig, name: str) -> str:
    """A parameter of config.pbtxt; "" if there is none. (Indexing the protobuf map would add it.)"""
    return config.parameters[name].string_value if name in config.parameters else ""
