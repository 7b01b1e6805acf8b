"""Reads and answers requests with the tensors of TensorRT-LLM's LLM API in Triton (its `llmapi` layout).

Used for models of schema "llmapi". Independent of tokenizers, engines and model.yaml. Invariants: names, datatypes,
rules and defaults are those of TensorRT-LLM's model.py; outputs have the datatypes declared in its config.pbtxt. A
request with `sampling_parameters`, as sent by the OpenAI and Anthropic frontends, is read and answered as in vllm.py.
Source: the llmapi model of TensorRT-LLM's triton_backend, and the SamplingParams of its LLM API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmbackend.core.backend_api import (
    DATATYPE_OF_CONFIG_TYPE,
    ErrorCode,
    ModelConfig,
    Request,
    Tensor,
    TritonError,
    invalid_argument,
    unsupported,
)

from ..text.output_assembler import Chunk
from ..text.tokenizer import ModelTokenizer
from .sampling import SEED_MASK
from .schema import (
    FLAG,
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LONG,
    TEXT,
    TEXTS,
    Generation,
    LlmInputs,
    OutputOptions,
    Prompt,
    Reply,
    TensorType,
    complete_unbatched_config,
    outputs_of,
    wanted_outputs,
)
from .tensorrtllm import Row, Rows, performance
from .tensorrtllm_tensors import TIMES_AND_DRAFTS
from .vllm import INPUTS as VLLM_INPUTS
from .vllm import OUTPUTS as VLLM_OUTPUTS
from .vllm import VllmSchema

_SAMPLING = "sampling_param_"
INPUTS: dict[str, TensorType] = {
    "text_input": TEXTS,
    "image_url": TEXTS,
    "streaming": FLAG,
    "sampling_param_best_of": INT,
    "sampling_param_temperature": FLOAT,
    "sampling_param_top_k": INT,
    "sampling_param_top_p": FLOAT,
    "sampling_param_frequency_penalty": FLOAT,
    "sampling_param_presence_penalty": FLOAT,
    "sampling_param_max_tokens": INT,
    "sampling_param_stop": TEXTS,
    "sampling_param_seed": LONG,
    "sampling_param_exclude_input_from_output": FLAG,
    "sampling_param_return_perf_metrics": FLAG,
    "sampling_param_logits_post_processor_name": TEXT,
    "return_finish_reason": FLAG,
    "return_stop_reason": FLAG,
    "return_cumulative_logprob": FLAG,
    "stop": FLAG,
    "lora_id": LONG,
    "lora_name": TEXT,
    "lora_path": TEXT,
    "lora_ckpt_source": TEXT,
}
_PERF_OUTPUTS: dict[str, TensorType] = {
    "kv_cache_reused_block": INTS,
    "kv_cache_missed_block": INTS,
    "kv_cache_alloc_new_blocks": INTS,
    "kv_cache_alloc_total_blocks": INTS,
    "kv_cache_hit_rate": FLOATS,
    **TIMES_AND_DRAFTS,
}
OUTPUTS: dict[str, TensorType] = {
    "text_output": TEXTS,
    "finish_reason": TEXTS,
    "stop_reason": TEXTS,
    "cumulative_logprob": FLOATS,
    **_PERF_OUTPUTS,
}
_ENABLED_BY: Mapping[str, tuple[str, ...]] = {
    "return_finish_reason": ("finish_reason",),
    "return_stop_reason": ("stop_reason",),
    "return_cumulative_logprob": ("cumulative_logprob",),
    "sampling_param_return_perf_metrics": tuple(_PERF_OUTPUTS),
}
_DATATYPES = {name: DATATYPE_OF_CONFIG_TYPE[tensor.data_type] for name, tensor in OUTPUTS.items()}
_NUMBERS = ("best_of", "temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "max_tokens")
_CHOOSING = frozenset({"temperature", "top_k", "top_p"})
_REFUSED = ("image_url", "sampling_param_logits_post_processor_name")
_OF_ADAPTERS = ("lora_id", "lora_path", "lora_ckpt_source")
DEFAULT_MAX_TOKENS = 32


@dataclass(frozen=True, slots=True)
class LlmApiOptions(OutputOptions):
    """Options of a request that uses this module's tensors."""


class LlmApiSchema:
    """Without temperature, top_k and top_p a generation is greedy. A non-streamed answer begins with the prompt unless
    excluded; a stream never contains it, and each of its responses contains the whole text so far."""

    needs_tokenizer = True
    outputs_of_prompt = VllmSchema.outputs_of_prompt
    has_model_defaults = False

    def __init__(self, config: ModelConfig) -> None:
        self._decoupled = config.model_transaction_policy.decoupled
        self._vllm = VllmSchema(config)

    def complete(self, config: ModelConfig) -> ModelConfig:
        return complete_unbatched_config(config, VLLM_INPUTS | INPUTS, VLLM_OUTPUTS | OUTPUTS)

    def client_error(self, error: TritonError) -> TritonError:
        """model.py puts this prefix before all errors except cancellations."""
        if error.code is ErrorCode.CANCELLED:
            return error
        return TritonError(f"Error generating request: {error.message}", error.code, error.param)

    def read(self, request: Request) -> Sequence[LlmInputs]:
        if "sampling_parameters" in request.inputs:
            return self._vllm.read(request)
        row = Rows(request, False, "text_input").row(0)
        row.refuse(_REFUSED)
        return (
            LlmInputs(options=self._options(row, request), sampling=_sampling(row), text_input=row.text("text_input")),
        )

    def reply(
        self, inputs: LlmInputs, prompt: Prompt, tokenizer: ModelTokenizer, not_enforced: Sequence[str] = ()
    ) -> Reply:
        if isinstance(inputs.options, LlmApiOptions):
            return LlmApiReply(inputs.options, prompt)
        return self._vllm.reply(inputs, prompt, tokenizer, not_enforced)

    def _options(self, row: Row, request: Request) -> OutputOptions:
        stream = row.flag("streaming")
        if stream and not self._decoupled:
            raise unsupported("Streaming is only supported in decoupled mode.")
        enabled = {"text_output"}
        enabled.update(name for flag, names in _ENABLED_BY.items() if row.flag(flag) for name in names)
        return LlmApiOptions(
            stream,
            prepend_prompt=not stream and not row.flag("sampling_param_exclude_input_from_output"),
            outputs=wanted_outputs(enabled, request),
            logprobs=row.flag("return_cumulative_logprob"),
        )


def _sampling(row: Row) -> dict[str, Any]:
    """Sampling parameters under their names in sampling.py."""
    given = {name: row.number(_SAMPLING + name) for name in _NUMBERS if _SAMPLING + name in row}
    values = {"max_tokens": DEFAULT_MAX_TOKENS, **given}
    if given.keys().isdisjoint(_CHOOSING):
        values["temperature"] = 0.0
    if stop := row.texts("sampling_param_stop"):
        values["stop"] = stop
    if "sampling_param_seed" in row:
        values["seed"] = int(row.number("sampling_param_seed")) & SEED_MASK
    if adapter := row.text("lora_name"):
        values["lora_name"] = adapter
    elif names := [name for name in _OF_ADAPTERS if row.number(name)]:
        raise invalid_argument(f"input '{names[0]}' is given without 'lora_name'", param=names[0])
    return values


class LlmApiReply(Reply):
    waits_for_text = True

    def __init__(self, options: OutputOptions, prompt: Prompt) -> None:
        self._options = options
        self._text = prompt.text if options.prepend_prompt else ""
        """The whole text so far."""

    def outputs(self, chunk: Chunk, generation: Generation) -> Sequence[Tensor]:
        self._text += "".join(chunk.text)
        wanted = self._options.outputs
        values: dict[str, Any] = {
            "text_output": self._text,
            "finish_reason": "cancelled" if chunk.finish_reason == "abort" else str(chunk.finish_reason),
            "stop_reason": str(chunk.stop_reason),
            "cumulative_logprob": [generation.assembler.cumulative_logprob],
        }
        if not wanted.isdisjoint(_PERF_OUTPUTS):
            values |= _performance(generation)
        named = {name: value for name, value in values.items() if name in wanted}
        return outputs_of(named, _DATATYPES, stream=self._options.stream)


def _performance(generation: Generation) -> dict[str, Any]:
    values = performance(generation)
    [reused] = values.pop("kv_cache_reused_blocks")
    missed = -(-generation.num_prompt_tokens // generation.kv_block_size) - reused
    return values | {
        "kv_cache_reused_block": [reused],
        "kv_cache_missed_block": [missed],
        "kv_cache_hit_rate": [reused / (reused + missed)],
    }
