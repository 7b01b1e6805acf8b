"""Reads and answers requests with TensorRT-LLM's tensors, in its text form and in that of its core model.

Used for models of the schemas "tensorrtllm" and "tensorrtllm_core". Independent of tokenizers and engines. Invariant:
TensorRT-LLM's rules and defaults apply, not vLLM's.
Source: triton_backend, utils.cc, model_instance_state.cc and the defaults of the sampling layers of TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmbackend.core.backend_api import (
    DATATYPE_OF_CONFIG_TYPE,
    ModelConfig,
    Request,
    Tensor,
    TritonError,
    invalid_argument,
    shown,
    unsupported,
)

from ..limits import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_SAMPLING_JSON_BYTES,
    MAX_STOPS,
    MAX_STOPS_TOTAL_LENGTH,
    check_at_most,
    check_stops,
)
from ..structured_outputs.constraint import Constraint, RequestPath, of_kind
from ..text.output_assembler import Chunk
from ..text.token_bias import TokenBias
from ..text.tokenizer import ModelTokenizer
from .sampling import SEED_MASK
from .schema import (
    GUIDE,
    GUIDE_TYPE,
    Generation,
    LlmInputs,
    OutputOptions,
    Prompt,
    Reply,
    TensorType,
    complete_config,
    decoded,
    outputs_of,
    parameter,
    wanted_outputs,
)
from .tensorrtllm_tensors import CORE_INPUTS, CORE_OUTPUTS, PERF_OUTPUTS, REFUSED_INPUTS, USER_INPUTS, USER_OUTPUTS

_FLOAT_FIELDS = ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")
_ENABLED_BY = {
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_perf_metrics": PERF_OUTPUTS,
}
_DATATYPES = {
    name: DATATYPE_OF_CONFIG_TYPE[tensor.data_type]
    for name, tensor in (CORE_OUTPUTS | USER_OUTPUTS).items()
    if tensor.data_type
}


class TensorRtLlmSchema:
    """The schemas of TensorRT-LLM's models.

    "tensorrtllm": text in, text out, like its `ensemble` and `tensorrt_llm_bls` models. "tensorrtllm_core": token ids
    in and out, like its `tensorrt_llm` model between `preprocessing` and `postprocessing`. Without top_k and top_p a
    generation is greedy; the seed is 0; in the core form only `end_id` ends a generation; the token that ended it is
    not part of the output; a batch of N prompts makes N generations with separate responses.
    """

    outputs_of_prompt = frozenset({"num_input_tokens"})
    has_model_defaults = False

    def __init__(self, config: ModelConfig, *, is_core: bool) -> None:
        """is_core: token ids in and out; otherwise text."""
        self.needs_tokenizer = not is_core
        self._is_core = is_core
        self._inputs: Mapping[str, TensorType] = CORE_INPUTS if is_core else USER_INPUTS
        self._outputs: Mapping[str, TensorType] = CORE_OUTPUTS if is_core else USER_OUTPUTS
        self._decoupled = config.model_transaction_policy.decoupled
        self._batches = config.max_batch_size > 0
        self._excludes_input = parameter(config, "exclude_input_in_output").lower() in ("true", "1")

    def complete(self, config: ModelConfig) -> ModelConfig:
        return complete_config(config, self._inputs, self._outputs)

    def client_error(self, error: TritonError) -> TritonError:
        return error

    def read(self, request: Request) -> Sequence[LlmInputs]:
        rows = Rows(request, self._batches, "input_ids" if self._is_core else "text_input")
        if rows.count > 1 and not self._decoupled:
            raise unsupported(
                f"a batch of {rows.count} gives {rows.count} responses, but this model is configured with "
                "decoupled: false"
            )
        return [self._read_row(rows.row(index), request) for index in range(rows.count)]

    def reply(
        self, inputs: LlmInputs, prompt: Prompt, tokenizer: ModelTokenizer, not_enforced: Sequence[str] = ()
    ) -> Reply:
        return TensorRtLlmReply(inputs, prompt, is_core=self._is_core, batches=self._batches)

    def _read_row(self, row: Row, request: Request) -> LlmInputs:
        row.refuse(REFUSED_INPUTS)
        if row.number("beam_width", 1) > 1:
            raise unsupported(f"'beam_width' is {row.number('beam_width')}, only 1 is supported by this backend")
        count = _return_sequences(row)
        return LlmInputs(
            options=self._options(row, request, count),
            sampling=self._sampling(row),
            text_input=None if self._is_core else row.text("text_input"),
            input_ids=_prompt_ids(row) if self._is_core else None,
            stop_sequences=_word_list(row, "stop_words_list") if self._is_core else (),
            hides_stop_token=True,
            bias=self._bias(row),
            batch_index=row.index,
            num_sequences=count,
        )

    def _options(self, row: Row, request: Request, num_sequences: int) -> OutputOptions:
        stream = row.flag("streaming" if self._is_core else "stream")
        if stream and not self._decoupled:
            raise unsupported("Streaming is only supported in decoupled mode.")
        excludes = row.flag("exclude_input_in_output", self._excludes_input)
        enabled = {"output_ids", "sequence_length", "text_output"}
        enabled.update(name for flag, names in _ENABLED_BY.items() if row.flag(flag) for name in names)
        if row.batch_size > 1:
            enabled.add("batch_index")
        if num_sequences > 1:
            enabled.add("sequence_index")
        return OutputOptions(
            stream,
            prepend_prompt=not excludes and not stream,
            outputs=wanted_outputs(enabled, request),
            logprobs=row.flag("return_log_probs"),
        )

    def _sampling(self, row: Row) -> dict[str, Any]:
        """Sampling parameters under their names in sampling.py."""
        values: dict[str, Any] = {name: row.number(name) for name in _FLOAT_FIELDS if name in row}
        values |= self._token_choice(row)
        values["max_tokens"] = row.number("request_output_len" if self._is_core else "max_tokens", required=True)
        values["min_tokens"] = row.number("min_tokens", row.number("min_length", 0))
        values["seed"] = int(row.number("seed", row.number("random_seed", 0))) & SEED_MASK
        end_id = row.number("end_id")
        if end_id is not None or self._is_core:
            values["ignore_eos"] = True
            values["stop_token_ids"] = [int(end_id)] if end_id is not None and end_id >= 0 else []
        if (constraint := _constraint(row)) is not None:
            values["structured_outputs"] = constraint
        if not self._is_core:
            values["stop"] = row.texts("stop_words") or None
            values["include_stop_str_in_output"] = True
        return values

    def _bias(self, row: Row) -> TokenBias:
        if self._is_core:
            return TokenBias(by_id=row.bias("embedding_bias"), bad_ids=_word_list(row, "bad_words_list"))
        return TokenBias(by_word=_weighted_words(row), bad_words=row.texts("bad_words"))

    def _token_choice(self, row: Row) -> dict[str, Any]:
        prefix = "runtime_" if self._is_core else ""
        top_k = int(row.number(f"{prefix}top_k", 0))
        top_p = float(row.number(f"{prefix}top_p", 0.0))
        if top_k <= 0 and top_p <= 0.0:
            return {"temperature": 0.0}
        return {"top_k": max(top_k, 0), "top_p": top_p if top_p > 0.0 else 1.0}


class Rows:
    """The inputs of a request, prompt by prompt."""

    def __init__(self, request: Request, batches: bool, prompt: str) -> None:
        self._inputs = request.inputs
        self._batches = batches
        if prompt not in request.inputs:
            raise invalid_argument(f"A value is required for {prompt}")
        self.count = request.inputs[prompt].shape[0] if batches else 1

    def row(self, index: int) -> Row:
        return Row({name: self._of(tensor, index) for name, tensor in self._inputs.items()}, index, self.count)

    def _of(self, tensor: Tensor, index: int) -> npt.NDArray[Any]:
        if not self._batches:
            return tensor.data
        if tensor.data.shape[0] != self.count:
            raise invalid_argument(
                f"Expected batch size doesn't match batch size for tensor {tensor.name}. "
                f"Expected {self.count} got {tensor.data.shape[0]}"
            )
        row: npt.NDArray[Any] = np.asarray(tensor.data[index])
        return row


class Row:
    """The inputs of one prompt, without the batch dimension; a scalar may still have a dimension of 1."""

    def __init__(self, values: Mapping[str, npt.NDArray[Any]], index: int, batch_size: int) -> None:
        self._values = values
        self.index = index
        self.batch_size = batch_size

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def array(self, name: str) -> npt.NDArray[Any] | None:
        return self._values.get(name)

    def number(self, name: str, default: Any = None, *, required: bool = False) -> Any:
        values = self._values.get(name)
        if values is None:
            if required:
                raise invalid_argument(f"A value is required for {name}")
            return default
        if values.size != 1:
            raise invalid_argument(f"Expected a scalar tensor for tensor {name}")
        return values.item()

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.number(name, default))

    def text(self, name: str) -> str:
        """The input's string; "" if it is not given."""
        return decoded(name, self.number(name, b""))

    def texts(self, name: str) -> list[str]:
        """The non-empty strings of an input."""
        values = self._values.get(name, np.empty(0))
        check_at_most(f"input '{name}'", values.size, MAX_STOPS, "elements")
        return [decoded(name, value) for value in values.ravel().tolist() if value]

    def bias(self, name: str) -> dict[int, float]:
        """Non-zero biases by token id."""
        values = self._values.get(name)
        if values is None or not np.any(values):
            return {}
        check_at_most(f"input '{name}'", int(np.count_nonzero(values)), MAX_LOGIT_BIAS, "biases that are not 0")
        flat = values.ravel()
        return {int(token_id): float(flat[token_id]) for token_id in np.flatnonzero(flat)}

    def refuse(self, names: Collection[str]) -> None:
        """Refuses those of the named inputs that ask for something."""
        for name, values in self._values.items():
            if name in names and _is_used(name, values):
                raise unsupported(f"input '{name}' is not supported by this backend")


def _is_used(name: str, values: npt.NDArray[Any]) -> bool:
    if name == "decoder_input_ids":  # preprocessing sends one padding token to every model
        return values.size > 1
    if values.dtype == np.object_:
        return any(values.ravel().tolist())
    return bool(np.any(values))


_GUIDE_TYPES = {
    "json": "json",
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""TensorRT-LLM's guide types. "json" is any JSON value, and needs no guide."""


def _constraint(row: Row) -> Constraint | None:
    """The constraint expressed by the guide. A preprocessing model sends empty strings if there is none."""
    kind, guide = _guide_text(row, "guided_decoding_guide_type"), _guide_text(row, "guided_decoding_guide")
    if not kind and not guide:
        return None
    if kind not in _GUIDE_TYPES:
        raise invalid_argument(f"input '{GUIDE_TYPE}' is {shown(kind)}, expected one of: {', '.join(_GUIDE_TYPES)}")
    if kind == "json":
        return of_kind("json", True, RequestPath(GUIDE_TYPE))
    if not guide:
        raise invalid_argument(f"input '{GUIDE_TYPE}' is '{kind}', expected it together with '{GUIDE}'")
    return of_kind(_GUIDE_TYPES[kind], guide, RequestPath(GUIDE))


def _guide_text(row: Row, name: str) -> str:
    text = row.text(name)
    check_at_most(f"input '{name}'", len(text), MAX_SAMPLING_JSON_BYTES, "characters")
    return text


def _return_sequences(row: Row) -> int:
    count = int(row.number("num_return_sequences", 1))
    if not 1 <= count <= MAX_CHOICES:
        raise invalid_argument(f"'num_return_sequences' is {count}, expected 1 to {MAX_CHOICES}")
    return count


def _prompt_ids(row: Row) -> npt.NDArray[Any]:
    """`input_ids` up to `input_lengths`; the rest is padding."""
    values = row.array("input_ids")
    assert values is not None
    length = int(row.number("input_lengths", values.size))
    if not 0 <= length <= values.size:
        raise invalid_argument(f"'input_lengths' is {length}, but 'input_ids' holds {values.size} token ids")
    return values.ravel()[:length]


def _weighted_words(row: Row) -> list[tuple[str, float]]:
    names = ("embedding_bias_words", "embedding_bias_weights")
    words, weights = (row.array(name) for name in names)
    if words is None or weights is None:
        return []
    if words.size != weights.size:
        raise invalid_argument(
            f"'{names[0]}' has {words.size} elements and '{names[1]}' {weights.size}, expected the same number"
        )
    check_at_most(f"input '{names[0]}'", words.size, MAX_STOPS, "elements")
    pairs = zip(words.ravel().tolist(), weights.ravel().tolist(), strict=True)
    return [(decoded(names[0], word), weight) for word, weight in pairs if word]


def _word_list(row: Row, name: str) -> tuple[tuple[int, ...], ...]:
    """Words as token ids, from two padded rows: the ids of all words, and the end of each word in them."""
    if (values := row.array(name)) is None:
        return ()
    if values.ndim != 2 or values.shape[0] != 2:
        raise invalid_argument(f"Invalid format for word list: '{name}' has shape {list(values.shape)}, expected [2,n]")
    check_at_most(f"input '{name}'", values.shape[1], MAX_STOPS_TOTAL_LENGTH, "columns")
    ids, ends = values.tolist()
    words: list[tuple[int, ...]] = []
    start = 0
    for end in ends:
        if end == -1:
            break
        if not start < end <= len(ids):
            if end == 0 and not words:  # an empty list, padded with zeros
                break
            raise invalid_argument(f"Invalid format for word list: '{name}' has offset {end} after {start}")
        words.append(tuple(ids[start:end]))
        start = end
    check_stops(f"input '{name}'", words, "words", "tokens")
    return tuple(words)


class TensorRtLlmReply(Reply):
    """TensorRT-LLM's outputs of one generation.

    The tokens have a leading beam dimension of 1. Without streaming, the output begins with the prompt unless excluded;
    a stream never contains it.
    Source: fillTritonResponse in TensorRT-LLM's model_instance_state.cc; its postprocessing for text.
    """

    def __init__(self, inputs: LlmInputs, prompt: Prompt, *, is_core: bool, batches: bool) -> None:
        """batches: whether all outputs except text have a batch dimension."""
        self._inputs = inputs
        self._outputs = inputs.options.outputs
        self._prompt = prompt if inputs.options.prepend_prompt else Prompt("", ())
        self.waits_for_text = not is_core
        self._batches = batches
        self._log_prob_sum = 0.0

    def outputs(self, chunk: Chunk, generation: Generation) -> Sequence[Tensor]:
        num_tokens = len(chunk.token_ids) - chunk.ends_with_stop_token
        prompt, self._prompt = self._prompt, Prompt("", ())
        ids = [*prompt.token_ids, *chunk.token_ids[:num_tokens]]
        values: dict[str, Any] = {
            "output_ids": [ids],
            "sequence_length": [len(ids)],
            "batch_index": [self._inputs.batch_index],
            "sequence_index": [self._inputs.sequence_index],
            "num_input_tokens": [generation.num_prompt_tokens],
            "num_output_tokens": [num_tokens],
        }
        if self._inputs.options.logprobs:
            log_probs = [entry.logprob for entry in chunk.logprobs[:num_tokens]]
            self._log_prob_sum += sum(log_probs)
            values["output_log_probs"] = [log_probs]
            values["cum_log_probs"] = [self._log_prob_sum]
        if not self._outputs.isdisjoint(PERF_OUTPUTS):
            values |= performance(generation)
        wanted = {name: [value] if self._batches else value for name, value in values.items() if name in self._outputs}
        if "text_output" in self._outputs:
            wanted["text_output"] = prompt.text + "".join(chunk.text)
        return outputs_of(wanted, _DATATYPES, stream=self._inputs.options.stream)


def performance(generation: Generation) -> dict[str, Any]:
    """The outputs of `return_perf_metrics` so far. Blocks are derived from token counts, without recomputation."""
    times, block_size = generation.times, generation.kv_block_size
    # The last token needs no KV space until the next one is computed.
    blocks = -(-(generation.num_prompt_tokens + max(generation.num_output_tokens - 1, 0)) // block_size)
    reused = generation.num_cached_tokens // block_size
    drafts, accepted = generation.num_draft_tokens, generation.num_accepted_draft_tokens
    return {
        "kv_cache_alloc_new_blocks": [blocks - reused],
        "kv_cache_reused_blocks": [reused],
        "kv_cache_alloc_total_blocks": [blocks],
        "arrival_time_ns": [times.exec_start_ns],
        "first_scheduled_time_ns": [times.taken_ns],
        "first_token_time_ns": [times.first_token_ns],
        "last_token_time_ns": [times.last_token_ns],
        "acceptance_rate": [accepted / drafts if drafts else 0.0],
        "total_accepted_draft_tokens": [accepted],
        "total_draft_tokens": [drafts],
    }
