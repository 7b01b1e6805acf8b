"""TensorRT-LLM's tensors: names, datatypes and shapes, and which of them this backend does not support.

Used by TensorRtLlmSchema. Independent of how a tensor is read. Invariant: every tensor in TensorRT-LLM's own
configurations is listed, so that they load unchanged; a request that uses an unsupported tensor is refused with the
tensor's name.
Source: inflight_batcher_llm's config.pbtxt files (TensorRT-LLM 1.0), and the names of earlier releases.
"""

from __future__ import annotations

from .schema import TensorType

_TEXT, _TEXTS = TensorType("TYPE_STRING"), TensorType("TYPE_STRING", (-1,))
_INT, _INTS = TensorType("TYPE_INT32"), TensorType("TYPE_INT32", (-1,))
_LONG, _LONGS = TensorType("TYPE_UINT64"), TensorType("TYPE_UINT64", (-1,))
_FLOAT, _FLOATS = TensorType("TYPE_FP32"), TensorType("TYPE_FP32", (-1,))
_FLAG, _TIME = TensorType("TYPE_BOOL"), TensorType("TYPE_INT64")
_WORDS = TensorType("TYPE_INT32", (2, -1))
_TABLE = TensorType("", (-1, -1))

_COMMON_INPUTS: dict[str, TensorType] = {
    "num_return_sequences": _INT,
    "end_id": _INT,
    "pad_id": _INT,
    "beam_width": _INT,
    "temperature": _FLOAT,
    "repetition_penalty": _FLOAT,
    "presence_penalty": _FLOAT,
    "frequency_penalty": _FLOAT,
    "min_tokens": _INT,
    "seed": _LONG,
    "random_seed": _LONG,
    "return_log_probs": _FLAG,
    "return_context_logits": _FLAG,
    "return_generation_logits": _FLAG,
    "return_perf_metrics": _FLAG,
    "return_num_input_tokens": _FLAG,
    "return_num_output_tokens": _FLAG,
    "exclude_input_in_output": _FLAG,
    "prompt_embedding_table": _TABLE,
    "prompt_vocab_size": _INT,
    "lora_task_id": _LONG,
    "lora_weights": _TABLE,
    "lora_config": TensorType("TYPE_INT32", (-1, 3)),
    "guided_decoding_guide_type": _TEXT,
    "guided_decoding_guide": _TEXT,
}
USER_INPUTS: dict[str, TensorType] = {
    "text_input": _TEXT,
    "max_tokens": _INT,
    "stop_words": _TEXTS,
    "bad_words": _TEXTS,
    "top_k": _INT,
    "top_p": _FLOAT,
    "length_penalty": _FLOAT,
    "stream": _FLAG,
    **_COMMON_INPUTS,
    "decoder_text_input": _TEXT,
    "prompt_table_extra_id": _LONG,
    "embedding_bias_words": _TEXTS,
    "embedding_bias_weights": _FLOATS,
    "num_draft_tokens": _INT,
    "use_draft_logits": _FLAG,
    "image_input": TensorType("", (-1, 3, -1, -1)),
    "image_bytes_input": TensorType("TYPE_UINT8", (-1, -1, -1, -1)),
    "image_url_input": _TEXT,
    "video_bytes_input": TensorType("TYPE_UINT8", (-1, -1, -1, -1)),
}
CORE_INPUTS: dict[str, TensorType] = {
    "input_ids": _INTS,
    "input_lengths": _INT,
    "request_output_len": _INT,
    "stop_words_list": _WORDS,
    "bad_words_list": _WORDS,
    "embedding_bias": _FLOATS,
    "runtime_top_k": _INT,
    "runtime_top_p": _FLOAT,
    "runtime_top_p_min": _FLOAT,
    "runtime_top_p_decay": _FLOAT,
    "runtime_top_p_reset_ids": _INT,
    "len_penalty": _FLOAT,
    "early_stopping": _FLAG,
    "beam_search_diversity_rate": _FLOAT,
    "min_length": _INT,
    "stop": _FLAG,
    "streaming": _FLAG,
    **_COMMON_INPUTS,
    "encoder_input_features": _TABLE,
    "encoder_output_lengths": _INT,
    "draft_input_ids": _INTS,
    "draft_logits": TensorType("", (-1, -1), usual="TYPE_FP32"),
    "draft_acceptance_threshold": _FLOAT,
    "decoder_input_ids": _INTS,
    "decoder_input_lengths": _INT,
    "prompt_table_extra_ids": _LONGS,
    "cross_attention_mask": TensorType("TYPE_BOOL", (-1, -1)),
    "mrope_rotary_cos_sin": _FLOATS,
    "mrope_position_deltas": _TIME,
    "context_phase_params": TensorType("TYPE_UINT8", (-1,)),
    "skip_cross_attn_blocks": _FLAG,
    "retention_token_range_starts": _INTS,
    "retention_token_range_ends": _INTS,
    "retention_token_range_priorities": _INTS,
    "retention_token_range_durations_ms": _INTS,
    "retention_decode_priority": _INT,
    "retention_decode_duration_ms": _INT,
    "lookahead_window_size": _INT,
    "lookahead_ngram_size": _INT,
    "lookahead_verification_set_size": _INT,
}
REFUSED_INPUTS = frozenset(
    {
        "context_phase_params", "cross_attention_mask", "decoder_input_ids", "decoder_text_input",
        "draft_acceptance_threshold", "draft_input_ids", "draft_logits", "encoder_input_features",
        "encoder_output_lengths", "image_bytes_input", "image_input", "image_url_input", "lookahead_ngram_size",
        "lookahead_verification_set_size", "lookahead_window_size", "lora_config", "lora_task_id", "lora_weights",
        "mrope_position_deltas", "mrope_rotary_cos_sin", "num_draft_tokens", "prompt_embedding_table",
        "prompt_table_extra_id", "prompt_table_extra_ids", "prompt_vocab_size", "return_context_logits",
        "return_generation_logits", "runtime_top_p_decay", "runtime_top_p_min", "runtime_top_p_reset_ids",
        "skip_cross_attn_blocks", "use_draft_logits", "video_bytes_input",
    }
)  # fmt: skip
"""Refused unless the tensor is empty, all zeros, or all empty strings."""

_PERF_OUTPUT_TYPES: dict[str, TensorType] = {
    "kv_cache_alloc_new_blocks": _INT,
    "kv_cache_reused_blocks": _INT,
    "kv_cache_alloc_total_blocks": _INT,
    "arrival_time_ns": _TIME,
    "first_scheduled_time_ns": _TIME,
    "first_token_time_ns": _TIME,
    "last_token_time_ns": _TIME,
    "acceptance_rate": _FLOAT,
    "total_accepted_draft_tokens": _INT,
    "total_draft_tokens": _INT,
}
PERF_OUTPUTS = tuple(_PERF_OUTPUT_TYPES)
"""The outputs that `return_perf_metrics` adds to every response."""
_COMMON_OUTPUTS: dict[str, TensorType] = {
    "cum_log_probs": _FLOATS,
    "output_log_probs": TensorType("TYPE_FP32", (-1, -1)),
    "context_logits": TensorType("", (-1, -1), usual="TYPE_FP32"),
    "generation_logits": TensorType("", (-1, -1, -1), usual="TYPE_FP32"),
    "batch_index": _INT,
    "sequence_index": _INT,
    **_PERF_OUTPUT_TYPES,
    "num_input_tokens": _INT,
    "num_output_tokens": _INT,
}
USER_OUTPUTS: dict[str, TensorType] = {"text_output": _TEXTS, **_COMMON_OUTPUTS}
CORE_OUTPUTS: dict[str, TensorType] = {
    "output_ids": TensorType("TYPE_INT32", (-1, -1)),
    "sequence_length": _INTS,
    **_COMMON_OUTPUTS,
    "context_phase_params": TensorType("TYPE_UINT8", (-1,)),
}
