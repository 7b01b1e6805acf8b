"""TensorRT-LLM's tensors: names, datatypes and shapes, and which of them this backend does not support.

Used by TensorRtLlmSchema. Independent of how a tensor is read. Invariant: every tensor in TensorRT-LLM's own
configurations is listed, so that they load unchanged; a request that uses an unsupported tensor is refused with the
tensor's name.
Source: inflight_batcher_llm's config.pbtxt files (TensorRT-LLM 1.0), and the names of earlier releases.
"""

from __future__ import annotations

from .schema import FLAG, FLOAT, FLOATS, INT, INTS, LONG, LONGS, TEXT, TEXTS, TIME, TensorType

_WORDS = TensorType("TYPE_INT32", (2, -1))
_TABLE = TensorType("", (-1, -1))

_COMMON_INPUTS: dict[str, TensorType] = {
    "num_return_sequences": INT,
    "end_id": INT,
    "pad_id": INT,
    "beam_width": INT,
    "temperature": FLOAT,
    "repetition_penalty": FLOAT,
    "presence_penalty": FLOAT,
    "frequency_penalty": FLOAT,
    "min_tokens": INT,
    "seed": LONG,
    "random_seed": LONG,
    "return_log_probs": FLAG,
    "return_context_logits": FLAG,
    "return_generation_logits": FLAG,
    "return_perf_metrics": FLAG,
    "return_num_input_tokens": FLAG,
    "return_num_output_tokens": FLAG,
    "exclude_input_in_output": FLAG,
    "prompt_embedding_table": _TABLE,
    "prompt_vocab_size": INT,
    "lora_task_id": LONG,
    "lora_weights": _TABLE,
    "lora_config": TensorType("TYPE_INT32", (-1, 3)),
    "guided_decoding_guide_type": TEXT,
    "guided_decoding_guide": TEXT,
}
USER_INPUTS: dict[str, TensorType] = {
    "text_input": TEXT,
    "max_tokens": INT,
    "stop_words": TEXTS,
    "bad_words": TEXTS,
    "top_k": INT,
    "top_p": FLOAT,
    "length_penalty": FLOAT,
    "stream": FLAG,
    **_COMMON_INPUTS,
    "decoder_text_input": TEXT,
    "prompt_table_extra_id": LONG,
    "embedding_bias_words": TEXTS,
    "embedding_bias_weights": FLOATS,
    "num_draft_tokens": INT,
    "use_draft_logits": FLAG,
    "image_input": TensorType("", (-1, 3, -1, -1)),
    "image_bytes_input": TensorType("TYPE_UINT8", (-1, -1, -1, -1)),
    "image_url_input": TEXT,
    "video_bytes_input": TensorType("TYPE_UINT8", (-1, -1, -1, -1)),
}
CORE_INPUTS: dict[str, TensorType] = {
    "input_ids": INTS,
    "input_lengths": INT,
    "request_output_len": INT,
    "stop_words_list": _WORDS,
    "bad_words_list": _WORDS,
    "embedding_bias": FLOATS,
    "runtime_top_k": INT,
    "runtime_top_p": FLOAT,
    "runtime_top_p_min": FLOAT,
    "runtime_top_p_decay": FLOAT,
    "runtime_top_p_reset_ids": INT,
    "len_penalty": FLOAT,
    "early_stopping": FLAG,
    "beam_search_diversity_rate": FLOAT,
    "min_length": INT,
    "stop": FLAG,
    "streaming": FLAG,
    **_COMMON_INPUTS,
    "encoder_input_features": _TABLE,
    "encoder_output_lengths": INT,
    "draft_input_ids": INTS,
    "draft_logits": TensorType("", (-1, -1), usual="TYPE_FP32"),
    "draft_acceptance_threshold": FLOAT,
    "decoder_input_ids": INTS,
    "decoder_input_lengths": INT,
    "prompt_table_extra_ids": LONGS,
    "cross_attention_mask": TensorType("TYPE_BOOL", (-1, -1)),
    "mrope_rotary_cos_sin": FLOATS,
    "mrope_position_deltas": TIME,
    "context_phase_params": TensorType("TYPE_UINT8", (-1,)),
    "skip_cross_attn_blocks": FLAG,
    "retention_token_range_starts": INTS,
    "retention_token_range_ends": INTS,
    "retention_token_range_priorities": INTS,
    "retention_token_range_durations_ms": INTS,
    "retention_decode_priority": INT,
    "retention_decode_duration_ms": INT,
    "lookahead_window_size": INT,
    "lookahead_ngram_size": INT,
    "lookahead_verification_set_size": INT,
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

TIMES_AND_DRAFTS: dict[str, TensorType] = {
    "arrival_time_ns": TIME,
    "first_scheduled_time_ns": TIME,
    "first_token_time_ns": TIME,
    "last_token_time_ns": TIME,
    "acceptance_rate": FLOAT,
    "total_accepted_draft_tokens": INT,
    "total_draft_tokens": INT,
}
"""Perf outputs of the LLM API too."""
_PERF_OUTPUT_TYPES: dict[str, TensorType] = {
    "kv_cache_alloc_new_blocks": INT,
    "kv_cache_reused_blocks": INT,
    "kv_cache_alloc_total_blocks": INT,
    **TIMES_AND_DRAFTS,
}
PERF_OUTPUTS = tuple(_PERF_OUTPUT_TYPES)
"""The outputs that `return_perf_metrics` adds to every response."""
_COMMON_OUTPUTS: dict[str, TensorType] = {
    "cum_log_probs": FLOATS,
    "output_log_probs": TensorType("TYPE_FP32", (-1, -1)),
    "context_logits": TensorType("", (-1, -1), usual="TYPE_FP32"),
    "generation_logits": TensorType("", (-1, -1, -1), usual="TYPE_FP32"),
    "batch_index": INT,
    "sequence_index": INT,
    **_PERF_OUTPUT_TYPES,
    "num_input_tokens": INT,
    "num_output_tokens": INT,
}
USER_OUTPUTS: dict[str, TensorType] = {"text_output": TEXTS, **_COMMON_OUTPUTS}
CORE_OUTPUTS: dict[str, TensorType] = {
    "output_ids": TensorType("TYPE_INT32", (-1, -1)),
    "sequence_length": INTS,
    **_COMMON_OUTPUTS,
    "context_phase_params": TensorType("TYPE_UINT8", (-1,)),
}
