"""What a schema of tensors is: the border between Triton's tensors and a generation, and what its versions share.

For: vLLM's and TensorRT-LLM's schemas, and whoever uses one without knowing which. Does not know: any tensor's name.
Invariant: what a schema reads is complete: whoever makes a generation of it looks at no tensor again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt
from tritonclient.grpc import model_config_pb2

from llmbackend.core.backend_api import ErrorCode, ModelConfig, Request, Tensor, TritonError, invalid_argument

from .output_assembler import Chunk, OutputAssembler
from .task_times import TaskTimes
from .text import Text
from .token_bias import NO_BIAS, TokenBias


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Which outputs a request gets, and how. `outputs` are the names that its flags enable and its client wants.

    logprobs: the sampled token's logprob is needed for them.
    """

    stream: bool
    prepend_prompt: bool
    outputs: frozenset[str]
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class LlmInputs:
    """What one generation was asked for. Exactly one of text_input, messages (JSON) and input_ids (integers, one
    dimension) is set.

    max_tokens_must_fit: max_tokens that pass the context are refused, where they would be cut.
    stop_sequences: token ids that end it when they were generated one after the other. bias: what it adds to logits, on
    top of `sampling`. batch_index, sequence_index:
    which of a request's generations it is.
    """

    options: OutputOptions
    sampling: Mapping[str, Any]
    text_input: str | None = None
    messages: bytes | None = None
    input_ids: npt.NDArray[Any] | None = None
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    max_tokens_must_fit: bool = False
    bias: TokenBias = NO_BIAS
    batch_index: int = 0
    sequence_index: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A generation's prompt. `text` is known where it was given as text, or must be shown."""

    text: str
    token_ids: tuple[int, ...]


class Generation(Protocol):
    """What a reply may say about its generation besides the tokens."""

    times: TaskTimes

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_kv_blocks(self) -> int:
        """Those that its tokens so far fill."""

    @property
    def num_reused_kv_blocks(self) -> int:
        """Of its prompt: found in the prefix cache."""

    @property
    def makes_drafts(self) -> bool:
        """Whether its engine speculates; how many drafts of which request held is not known."""

    @property
    def assembler(self) -> OutputAssembler: ...


class Reply(Protocol):
    """The outputs of one generation, response by response."""

    def is_due(self, generation: Generation) -> bool:
        """In a stream: is there something to show?"""

    def tensors(self, chunk: Chunk, generation: Generation) -> list[Tensor]:
        """The outputs of one response."""


class Schema(Protocol):
    """The tensors of one model. Read-only: any thread uses it."""

    needs_text: bool
    """False: prompts and outputs are token ids alone, and the model needs no tokenizer."""
    has_vllms_defaults: bool
    """Whether what a request leaves out is vLLM's, and so the model's generation_config.json counts."""

    def complete(self, config: ModelConfig) -> ModelConfig:
        """A copy of `config` with what it leaves open. Raises TritonError INVALID_ARG for a tensor that does not
        fit."""

    def read(self, request: Request) -> Sequence[LlmInputs]:
        """A request's generations, at least one. Raises TritonError INVALID_ARG naming the tensor, or UNSUPPORTED for
        one that this backend does not serve."""

    def is_stop(self, request: Request) -> bool:
        """Whether it asks for the end of the requests with its id, and for no generation."""

    def reply(self, inputs: LlmInputs, prompt: Prompt, text: Text) -> Reply: ...

    def client_error(self, error: TritonError) -> TritonError:
        """`error` in the words that clients of this schema expect."""


class LoraError(TritonError):
    """A request names an adapter that the model does not serve."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorCode.INVALID_ARG)


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor as a configuration declares it, without the batch dimension. data_type "" = any, and any dims; then
    `usual` is the one that it gets where nothing is declared."""

    data_type: str
    dims: tuple[int, ...] = (1,)
    usual: str = "TYPE_FP16"

    def __str__(self) -> str:
        return f"{self.data_type}{list(self.dims)}"


def complete_tensors(kind: str, declared: Any, table: Mapping[str, TensorType]) -> None:
    """Adds what a configuration does not declare; inputs as optional ones. Raises TritonError INVALID_ARG for a
    declared tensor that is not in `table`, or has another type or shape."""
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
    """The one string of a tensor."""
    return decoded(tensor.name, single(tensor))


def decoded(name: str, value: Any) -> str:
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise invalid_argument(f"input '{name}' is not UTF-8: {error.reason} at byte {error.start}") from None


def single(tensor: Tensor) -> Any:
    if tensor.data.size != 1:
        raise invalid_argument(f"input '{tensor.name}' has {tensor.data.size} elements, expected 1")
    return tensor.data.ravel()[0]


def num_bytes(tensor: Tensor) -> int:
    """What its elements hold; of BYTES, without what Python objects cost."""
    if tensor.datatype != "BYTES":
        return tensor.data.nbytes
    return sum(map(len, tensor.data.ravel().tolist()))


def wanted_outputs(enabled: Iterable[str], request: Request) -> frozenset[str]:
    return frozenset(enabled).intersection(request.requested_outputs)


def parameter(config: ModelConfig, name: str) -> str:
    """A parameter's text; "" when there is none. (Looking it up in the map itself would add it.)"""
    return config.parameters[name].string_value if name in config.parameters else ""
