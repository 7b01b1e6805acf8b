"""vllm_backend's tensors, and how requests are read and answered.

Used for models of schema "vllm", the default. Independent of tokenizers and engines. Invariant: names, datatypes,
shapes and rules are those of vllm_backend, so that its clients work unchanged; additions by this backend are marked.
Source: vllm_backend's src/model.py and src/utils/request.py.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from llmbackend.core.backend_api import (
    DATATYPE_OF_CONFIG_TYPE,
    JSON,
    ErrorCode,
    JsonTensor,
    ModelConfig,
    Outputs,
    Request,
    Tensor,
    TritonError,
    invalid_argument,
    layout_of,
    shown,
    unsupported,
)
from llmbackend.engine.messages import TokenLogprobs

from ..limits import MAX_PARAMETERS, MAX_SAMPLING_JSON_BYTES, check_at_most
from ..text.output_assembler import Chunk
from ..text.tokenizer import REPLACEMENT, ModelTokenizer
from .prompt_description import (
    DESCRIPTION_OUTPUTS,
    MAX_MODEL_LEN,
    ONLY_DESCRIPTION_OUTPUTS,
    PROMPT_TOKENS,
    SAMPLING_PARAMETERS,
    TOKENIZER_CONFIG,
)
from .schema import (
    FLAG,
    FLOATS,
    INTS,
    PROMPT_OUTPUTS,
    SEQUENCE_INDEX,
    TEXT,
    TEXTS,
    Generation,
    LlmInputs,
    LoraError,
    OutputOptions,
    Prompt,
    Reply,
    TensorType,
    complete_unbatched_config,
    num_bytes,
    outputs_of,
    single,
    text_of,
    wanted_outputs,
)

_encode_json = msgspec.json.encode

_COUNT, _COUNTS = TensorType("TYPE_UINT32"), TensorType("TYPE_UINT32", (-1,))
INPUTS: dict[str, TensorType] = {
    "text_input": TEXT,
    "image": TEXTS,
    "stream": FLAG,
    "sampling_parameters": TEXT,
    "exclude_input_in_output": FLAG,
    "return_finish_reason": FLAG,
    "return_cumulative_logprob": FLAG,
    "return_logprobs": FLAG,
    "return_num_input_tokens": FLAG,
    "return_num_output_tokens": FLAG,
    "embedding_request": TEXT,
    # Additions by this backend: a conversation for the chat template, token ids in place of text, the generated token
    # ids, the tokens with the text that each added, and the number of prompt tokens found in the prefix cache.
    "messages": TEXT,
    "input_ids": INTS,
    "return_output_ids": FLAG,
    "return_stop_reason": FLAG,
    "return_text_tokens": FLAG,
    "return_num_cached_tokens": FLAG,
    # To which of `n` choices a response belongs; without it, and without a stream, one response contains all of them.
    "return_sequence_index": FLAG,
    "return_prompt_token_ids": FLAG,
    # The prompt as text, and the text of its first token, which `prompt_logprobs` omits.
    "return_prompt_text": FLAG,
    "return_prompt_first_token": FLAG,
    # Nothing is generated, and no engine gets the request: the answer describes the prompt, which may be empty or
    # longer than the context. Available only with it: the names of the prompt's tokens as a JSON list, the context
    # length, and the tokenizer's configuration.
    "prompt_only": FLAG,
    "return_prompt_tokens": FLAG,
    "return_max_model_len": FLAG,
    "return_tokenizer_config": FLAG,
    # The request is checked as if for a generation, and the answer contains its effective sampling parameters.
    "return_sampling_parameters": FLAG,
    # Tokens that an interrupted generation has sent; this request continues after them.
    "prior_output_ids": INTS,
    # All counts of a generation so far, in its first and last responses, so that the others contain only text.
    "return_usage": FLAG,
    # The keywords of the request's JSON schemas that are not enforced, in the first response.
    "return_not_enforced": FLAG,
    # When the generation arrived, was taken by an engine, and had its first and last tokens (ns, same clock).
    "return_times": FLAG,
}
OUTPUTS: dict[str, TensorType] = {
    "text_output": TEXTS,
    "finish_reason": TEXTS,
    "stop_reason": TEXTS,
    "cumulative_logprob": FLOATS,
    "logprobs": TEXTS,
    "num_input_tokens": _COUNT,
    "num_output_tokens": _COUNTS,
    "output_ids": INTS,
    "text_tokens": TEXTS,
    "num_cached_tokens": _COUNT,
    "sequence_index": _COUNTS,
    "prompt_token_ids": INTS,
    "prompt_logprobs": TEXT,
    "prompt_text": TEXT,
    "prompt_first_token": TEXT,
    PROMPT_TOKENS: TEXT,
    MAX_MODEL_LEN: _COUNT,
    TOKENIZER_CONFIG: TEXT,
    SAMPLING_PARAMETERS: TEXT,
    "usage": _COUNTS,
    "not_enforced": TEXTS,
    "times": TensorType("TYPE_INT64", (-1,)),
}
_JSON_OUTPUTS = ("stop_reason", "logprobs", "text_tokens", "not_enforced")
_DATATYPES = {
    name: JSON if name in _JSON_OUTPUTS else DATATYPE_OF_CONFIG_TYPE[tensor.data_type]
    for name, tensor in OUTPUTS.items()
}
_TEXTS = ("text_output", "finish_reason")
NOT_ENFORCED = "not_enforced"
USAGE = "usage"
"""Number of prompt tokens, output tokens, and prompt tokens found in the prefix cache."""
MAX_TOKENS_MUST_FIT = "triton_max_tokens_must_fit"
"""A request parameter that only the OpenAI frontend can set: vLLM's OpenAI server refuses what vllm_backend reduces."""
_SIZE_LIMIT = f"{MAX_SAMPLING_JSON_BYTES} for all sampling parameters together"
_SCANNED_BYTES, _SCANNED_KEYS = 4 << 20, 1024
"""Longer JSON texts are not searched for their largest parameter."""
VLLM_BACKEND = "vllm"
PROMPT_INPUTS = ("text_input", "messages", "input_ids")
NOT_SUPPORTED_INPUTS = ("image", "embedding_request")


class VllmSchema:
    """The schema of vllm_backend."""

    needs_tokenizer = True
    outputs_of_prompt = frozenset({"num_input_tokens", "num_cached_tokens", NOT_ENFORCED, *PROMPT_OUTPUTS})

    def __init__(self, config: ModelConfig) -> None:
        self._decoupled = config.model_transaction_policy.decoupled
        self._is_vllm_backend = config.backend == VLLM_BACKEND
        self.has_model_defaults = not self._is_vllm_backend

    def complete(self, config: ModelConfig) -> ModelConfig:
        return complete_unbatched_config(config, INPUTS, OUTPUTS)

    def client_error(self, error: TritonError) -> TritonError:
        """vllm_backend puts this prefix before all errors except cancellations and unknown adapters."""
        if not self._is_vllm_backend or isinstance(error, LoraError) or error.code is ErrorCode.CANCELLED:
            return error
        return TritonError(f"Error generating stream: {error.message}", error.code, error.param)

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
        sampling = _read_sampling(request)
        prompt_only = _flag(request, "prompt_only")
        inputs = LlmInputs(
            options=_described(request) if prompt_only else self._read_options(request, source, sampling),
            sampling=sampling,
            text_input=text_of(tensors[source]) if source == "text_input" else None,
            messages=single(tensors[source]) if source == "messages" else None,
            parsed_messages=getattr(tensors[source], "value", None) if source == "messages" else None,
            input_ids=tensors[source].data.ravel() if source == "input_ids" else None,
            prior_output_ids=_prior_output_ids(request),
            max_tokens_must_fit=MAX_TOKENS_MUST_FIT in request.parameters,
            prompt_only=prompt_only,
        )
        return (inputs,)

    def reply(
        self, inputs: LlmInputs, prompt: Prompt, tokenizer: ModelTokenizer, not_enforced: Sequence[str] = ()
    ) -> Reply:
        return VllmReply(inputs, prompt, tokenizer, not_enforced)

    def _read_options(self, request: Request, source: str, sampling: Mapping[str, Any]) -> OutputOptions:
        stream = _flag(request, "stream")
        if stream and not self._decoupled:
            raise unsupported("'stream' is true, but this model is configured with decoupled: false")
        goes_on = _prior_output_ids(request) is not None
        if "exclude_input_in_output" in request.inputs:
            prepend = not _flag(request, "exclude_input_in_output")
        else:
            prepend = source == "text_input" and not (stream or goes_on)
        if prepend and stream:
            raise invalid_argument("When streaming, `exclude_input_in_output` = False is not allowed.")
        if prepend and goes_on:
            raise invalid_argument(
                "input 'exclude_input_in_output' is false; with 'prior_output_ids' it must be true or absent: the "
                "prompt has already been sent",
                param="exclude_input_in_output",
            )
        enabled = _requested(request) | {"text_output"}
        if needing := enabled & ONLY_DESCRIPTION_OUTPUTS:
            raise invalid_argument(f"'return_{min(needing)}' is true, expected 'prompt_only' to be true with it")
        has_choices = str(sampling.get("n") or 1) != "1"
        if has_choices and SEQUENCE_INDEX in enabled and not self._decoupled:
            raise unsupported("'return_sequence_index' with 'n' gives several responses, but this model is configured "
                              "with decoupled: false")  # fmt: skip
        if has_choices and stream:
            enabled.add(SEQUENCE_INDEX)
        if sampling.get("prompt_logprobs") is not None:
            enabled.add("prompt_logprobs")
        outputs = wanted_outputs(enabled, request)
        return OutputOptions(
            stream,
            prepend,
            outputs,
            logprobs="cumulative_logprob" in outputs,
            text_tokens="text_tokens" in outputs,
        )


_OUTPUT_OF_FLAG: Final = {f"return_{name}": name for name in OUTPUTS}


def _requested(request: Request) -> set[str]:
    """The outputs whose flags are set."""
    flags = request.inputs.items()
    return {_OUTPUT_OF_FLAG[name] for name, tensor in flags if name in _OUTPUT_OF_FLAG and single(tensor)}


def _described(request: Request) -> OutputOptions:
    """The options of a request that generates nothing."""
    enabled = _requested(request)
    if others := enabled - DESCRIPTION_OUTPUTS:
        raise invalid_argument(f"'return_{min(others)}' is true, but 'prompt_only' generates nothing")
    if _prior_output_ids(request) is not None:
        raise invalid_argument("'prior_output_ids' is given, but 'prompt_only' generates nothing")
    return OutputOptions(stream=False, prepend_prompt=False, outputs=wanted_outputs(enabled, request))


def _read_sampling(request: Request) -> Mapping[str, Any]:
    tensor = request.inputs.get("sampling_parameters")
    if tensor is None:
        check_at_most("the request", len(request.parameters), MAX_PARAMETERS, "parameters")
        given = {name: value for name, value in request.parameters.items() if not name.startswith("triton_")}
        sizes = {name: len(value) for name, value in given.items() if isinstance(value, str)}
        if sum(sizes.values()) > MAX_SAMPLING_JSON_BYTES:
            name = max(sizes, key=sizes.__getitem__)
            raise _too_large(name, f"{sizes[name]} characters")
        return given
    if (size := num_bytes(tensor)) > MAX_SAMPLING_JSON_BYTES:
        raise _too_long(single(tensor), size)
    values = tensor.value if isinstance(tensor, JsonTensor) else _parsed(text_of(tensor))
    if not isinstance(values, dict):
        raise invalid_argument(f"input 'sampling_parameters' is {shown(values)}, expected a JSON object")
    return values


def _parsed(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise invalid_argument(f"input 'sampling_parameters' is not JSON: {error}") from None


def _too_long(text: bytes, size: int) -> TritonError:
    """An error that names the largest parameter, unless finding it would take long."""
    if size <= _SCANNED_BYTES and text.count(b":") <= _SCANNED_KEYS:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            values = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            name, value = max(values.items(), key=lambda item: len(memoryview(item[1])), default=("", msgspec.Raw(b"")))
            return _too_large(name, f"{len(memoryview(value))} bytes of JSON")
    return invalid_argument(f"input 'sampling_parameters' has {size} bytes, expected at most {_SIZE_LIMIT}")


def _too_large(name: str, size: str) -> TritonError:
    return invalid_argument(f"sampling parameter {shown(name)} has {size}, expected at most {_SIZE_LIMIT}", param=name)


def _prior_output_ids(request: Request) -> npt.NDArray[Any] | None:
    tensor = request.inputs.get("prior_output_ids")
    return None if tensor is None or not tensor.data.size else tensor.data.ravel()


def _flag(request: Request, name: str) -> bool:
    tensor = request.inputs.get(name)
    return False if tensor is None else bool(single(tensor))


class VllmReply(Reply):
    """vllm_backend's outputs of one generation.

    In a stream every output contains only what is new, except cumulative_logprob (the sum so far) and the counts of the
    prompt (in every response).
    Source: create_response in vllm_backend's src/utils/request.py.
    """

    __slots__ = (
        "_has_prompt_outputs", "_is_first", "_not_enforced", "_outputs", "_prepended", "_prompt_logprobs",
        "_prompt_logprobs_json", "_prompt_text", "_prompt_token_ids", "_sequence_index", "_stream", "_text_layout",
        "_tokenizer", "_wants_logprobs", "waits_for_text",
    )  # fmt: skip

    def __init__(
        self, inputs: LlmInputs, prompt: Prompt, tokenizer: ModelTokenizer, not_enforced: Sequence[str]
    ) -> None:
        self._outputs = inputs.options.outputs
        self._stream = inputs.options.stream
        self.waits_for_text = "text_output" in self._outputs
        """If it is, a response's text and tokens must be sent together."""
        names = [name for name in _TEXTS if name in self._outputs]
        is_text = "text_output" in names and len(names) == len(self._outputs) and self._stream
        self._text_layout = layout_of(tuple(names), ("BYTES",) * len(names)) if is_text else None
        """For streams of nothing but text, which most are; None for others."""
        self._sequence_index = inputs.sequence_index
        self._prepended = prompt.text if inputs.options.prepend_prompt else ""
        """Prepended to the first text."""
        self._has_prompt_outputs = inputs.sequence_index == 0 and not self._outputs.isdisjoint(PROMPT_OUTPUTS)
        has_text = self._has_prompt_outputs and "prompt_text" in self._outputs
        self._prompt_text = (prompt.text or tokenizer.decode(prompt.token_ids)) if has_text else ""
        self._prompt_token_ids = prompt.token_ids
        self._prompt_logprobs: list[dict[str, dict[str, object]]] = []
        self._prompt_logprobs_json: list[bytes] = []
        self._is_first = True
        """Whether no usage has been sent yet."""
        self._not_enforced: Sequence[str] | None = not_enforced
        """None once they have been sent."""
        asked = (inputs.sampling.get(name) for name in ("logprobs", "logprob_token_ids"))
        self._wants_logprobs = any(value is not None for value in asked)
        self._tokenizer = tokenizer

    def outputs(self, chunk: Chunk, generation: Generation) -> Sequence[Tensor]:
        text, layout = "".join(chunk.text), self._text_layout
        if layout is not None:
            return Outputs(layout, (text, str(chunk.finish_reason)) if len(layout.names) == 2 else (text,))
        values: dict[str, Any] = {}
        if "text_output" in self._outputs:
            prompt, self._prepended = self._prepended, ""
            values["text_output"] = prompt + text
        if len(self._outputs) > len(values):
            values |= self._additional(chunk, generation)
        outputs = outputs_of(values, _DATATYPES, stream=self._stream)
        if self._has_prompt_outputs:
            self._has_prompt_outputs = False
            return (*outputs, *self._of_prompt())
        return outputs

    def add_prompt_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        if "prompt_logprobs" in self._outputs:
            positions = [self._position(entry) for entry in entries]
            self._prompt_logprobs += positions
            self._prompt_logprobs_json += map(_encode_json, positions)  # encoding all at once would take long

    def _of_prompt(self) -> list[Tensor]:
        """The outputs that only the first response has."""
        tensors: list[Tensor] = []
        if "prompt_token_ids" in self._outputs:
            tensors.append(Tensor.of("prompt_token_ids", np.array(self._prompt_token_ids, np.int32)))
        if "prompt_text" in self._outputs:
            tensors.append(Tensor.text("prompt_text", self._prompt_text))
        if "prompt_first_token" in self._outputs:
            tensors.append(Tensor.text("prompt_first_token", self._tokenizer.token_text(self._prompt_token_ids[0])))
        if "prompt_logprobs" in self._outputs:
            positions = (None, *self._prompt_logprobs)
            text = b"[%b]" % b",".join((b"null", *self._prompt_logprobs_json))
            tensors.append(JsonTensor.of_value("prompt_logprobs", positions, text))
        self._prompt_token_ids, self._prompt_logprobs, self._prompt_logprobs_json = (), [], []
        return tensors

    def _additional(self, chunk: Chunk, generation: Generation) -> dict[str, Any]:
        wanted = self._outputs
        values: dict[str, Any] = {}
        if "finish_reason" in wanted:
            values["finish_reason"] = str(chunk.finish_reason)
        if "stop_reason" in wanted and chunk.finish_reason is not None:
            values["stop_reason"] = chunk.stop_reason
        if "cumulative_logprob" in wanted:
            values["cumulative_logprob"] = [generation.assembler.cumulative_logprob]
        if "logprobs" in wanted:
            values["logprobs"] = [*map(self._position, chunk.logprobs)] if self._wants_logprobs else None
        if "num_input_tokens" in wanted:
            values["num_input_tokens"] = [generation.num_prompt_tokens]
        if "num_output_tokens" in wanted:
            values["num_output_tokens"] = [len(chunk.token_ids)]
        if "num_cached_tokens" in wanted:
            values["num_cached_tokens"] = [generation.num_cached_tokens]
        if "output_ids" in wanted:
            values["output_ids"] = chunk.token_ids
        if SEQUENCE_INDEX in wanted:
            values[SEQUENCE_INDEX] = [self._sequence_index]
        if USAGE in wanted and (self._is_first or chunk.finish_reason is not None):
            self._is_first = False
            values[USAGE] = [generation.num_prompt_tokens, generation.num_output_tokens, generation.num_cached_tokens]
        if NOT_ENFORCED in wanted and self._not_enforced is not None:
            values[NOT_ENFORCED], self._not_enforced = [*self._not_enforced], None
        if "text_tokens" in wanted:
            values["text_tokens"] = chunk.text_tokens
        if "times" in wanted and chunk.finish_reason is not None:
            times = generation.times
            values["times"] = [times.exec_start_ns, times.taken_ns, times.first_token_ns, times.last_token_ns]
        return values

    def _position(self, entry: TokenLogprobs) -> dict[str, dict[str, object]]:
        """The sampled token first, then the most likely ones, then those requested explicitly, which have no rank."""
        position = {str(entry.token_id): self._logprob(entry.token_id, entry.logprob, entry.rank)}
        for index, (token_id, logprob) in enumerate(entry.top):
            position.setdefault(str(token_id), self._logprob(token_id, logprob, index + 1))
        for token_id, logprob in entry.others:
            position.setdefault(str(token_id), self._logprob(token_id, logprob, None))
        return position

    def _logprob(self, token_id: int, logprob: float, rank: int | None) -> dict[str, object]:
        # JSON has no minus infinity, and clients in this process get the same as others.
        shown = logprob if logprob > -math.inf else None
        text = self._tokenizer.token_text(token_id)
        entry: dict[str, object] = {"logprob": shown, "rank": rank, "decoded_token": text}
        if REPLACEMENT in text and (data := self._tokenizer.partial_bytes(token_id)) is not None:
            entry["bytes"] = list(data)
        return entry
