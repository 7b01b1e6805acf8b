"""TensorRT-LLM's outputs of one generation.

For: TensorRtLlmSchema. Does not know: requests, responses. Invariants: as TensorRT-LLM counts, the token that ended a
generation (its end_id) is no output; a batch dimension of 1 and a beam dimension of 1 stand before the tokens; without
streaming the prompt stands before the output unless it is excluded, and in a stream never.
Source: fillTritonResponse in TensorRT-LLM's model_instance_state.cc; its postprocessing for text.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llmbackend.core.backend_api import Tensor

from .output_assembler import Chunk
from .tensor_schema import Generation, LlmInputs, Prompt
from .tensorrtllm_tensors import PERF_OUTPUTS


class TensorRtLlmReply:
    def __init__(self, inputs: LlmInputs, prompt: Prompt, *, is_core: bool, leading: tuple[int, ...]) -> None:
        """leading: the batch dimension of every output but text, which has none."""
        self._inputs = inputs
        self._outputs = inputs.options.outputs
        self._prompt = prompt if inputs.options.prepend_prompt else Prompt("", ())
        self._is_core = is_core
        self._leading = leading
        self._log_prob_sum = 0.0

    def is_due(self, generation: Generation) -> bool:
        return self._is_core or generation.assembler.has_text

    def tensors(self, chunk: Chunk, generation: Generation) -> list[Tensor]:
        num_tokens = len(chunk.token_ids) - chunk.ends_with_stop_token
        prompt, self._prompt = self._prompt, Prompt("", ())
        ids = [*prompt.token_ids, *chunk.token_ids[:num_tokens]]
        values: dict[str, tuple[Any, type[np.generic]]] = {
            "output_ids": ([ids], np.int32),
            "sequence_length": ([len(ids)], np.int32),
            "batch_index": ([self._inputs.batch_index], np.int32),
            "sequence_index": ([self._inputs.sequence_index], np.int32),
            "num_input_tokens": ([generation.num_prompt_tokens], np.int32),
            "num_output_tokens": ([num_tokens], np.int32),
        }
        if self._inputs.options.logprobs:
            log_probs = [entry.logprob for entry in chunk.logprobs[:num_tokens]]
            self._log_prob_sum += sum(log_probs)
            values["output_log_probs"] = ([log_probs], np.float32)
            values["cum_log_probs"] = ([self._log_prob_sum], np.float32)
        if not self._outputs.isdisjoint(PERF_OUTPUTS):
            values |= _performance(generation)
        tensors = [self._tensor(name, *values[name]) for name in values if name in self._outputs]
        if "text_output" in self._outputs:
            tensors.append(Tensor.text("text_output", prompt.text + "".join(chunk.text)))
        return tensors

    def _tensor(self, name: str, value: Any, kind: type[np.generic]) -> Tensor:
        array = np.array(value, kind)
        return Tensor.of(name, array.reshape((*self._leading, *array.shape)))


def _performance(generation: Generation) -> dict[str, tuple[Any, type[np.generic]]]:
    """The numbers of `return_perf_metrics`, as they stand. Blocks are counted from tokens: what a preempted request
    gave back and computed again does not show."""
    times = generation.times
    blocks, reused = generation.num_kv_blocks, generation.num_reused_kv_blocks
    values: dict[str, tuple[Any, type[np.generic]]] = {
        "kv_cache_alloc_new_blocks": ([blocks - reused], np.int32),
        "kv_cache_reused_blocks": ([reused], np.int32),
        "kv_cache_alloc_total_blocks": ([blocks], np.int32),
        "arrival_time_ns": ([times.exec_start_ns], np.int64),
        "first_scheduled_time_ns": ([times.taken_ns], np.int64),
        "first_token_time_ns": ([times.first_token_ns], np.int64),
        "last_token_time_ns": ([times.last_token_ns], np.int64),
    }
    if not generation.makes_drafts:
        values["acceptance_rate"] = ([0.0], np.float32)
        values["total_accepted_draft_tokens"] = values["total_draft_tokens"] = ([0], np.int32)
    return values
