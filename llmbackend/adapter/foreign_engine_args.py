"""Engine arguments of vLLM and parameters of TensorRT-LLM that this engine does not have.

For: engine_args.py and the command line's flags. Does not know: files, models. Invariant: an argument is ignored only
if that changes nothing that a client can see, or only with such values (ONLY_VALUE); others are used or refused by
name.
Sources: vLLM's EngineArgs and AsyncEngineArgs 0.4 to 0.15; TensorRT-LLM's config.pbtxt and docs/model_config.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from llmbackend.core.backend_api import invalid_argument
from llmbackend.engine.config import EngineConfig

logger = logging.getLogger(__name__)

NO_EFFECT = frozenset(
    {
        # Memory, placement and start
        "cpu_offload_gb",
        "data_parallel_address",
        "data_parallel_backend",
        "data_parallel_hybrid_lb",
        "data_parallel_rank",
        "data_parallel_rpc_port",
        "data_parallel_size_local",
        "disable_custom_all_reduce",
        "distributed_executor_backend",
        "download_dir",
        "enable_expert_parallel",
        "enable_sleep_mode",
        "engine_use_ray",
        "ignore_patterns",
        "master_addr",
        "master_port",
        "max_parallel_loading_workers",
        "model_loader_extra_config",
        "pt_load_map_location",
        "ray_workers_use_nsight",
        "swap_space",
        "use_tqdm_on_load",
        "worker_cls",
        "worker_use_ray",
        # How steps are computed and scheduled
        "attention_backend",
        "calculate_kv_scales",
        "compilation_config",
        "cuda_graph_sizes",
        "disable_async_output_proc",
        "disable_cascade_attn",
        "disable_hybrid_kv_cache_manager",
        "kv_sharing_fast_prefill",
        "max_context_len_to_capture",
        "max_long_partial_prefills",
        "max_num_partial_prefills",
        "max_seq_len_to_capture",
        "model_impl",
        "multi_step_stream_outputs",
        "num_lookahead_slots",
        "num_scheduler_steps",
        "optimization_level",
        "preemption_mode",
        "prefix_caching_hash_algo",
        "scheduler_delay_factor",
        "scheduling_policy",
        "stream_interval",
        "use_v2_block_manager",
        # Logs, metrics, traces
        "aggregate_engine_logging",
        "collect_detailed_traces",
        "disable_log_requests",
        "disable_log_stats",  # of an engine; what the host reports follows it (engine_args.py)
        "enable_log_requests",
        "otlp_traces_endpoint",
        "served_model_name",
        "show_hidden_metrics_for_version",
        # What other arguments turn on; each of those is refused, or asked for by a request that is
        "allowed_local_media_path",
        "allowed_media_domains",
        "disable_chunked_mm_input",
        "disable_mm_preprocessor_cache",
        "enable_auto_tool_choice",
        "enable_reasoning",
        "fully_sharded_loras",
        "limit_mm_per_prompt",
        "long_lora_scaling_factors",
        "lora_dtype",
        "lora_extra_vocab_size",
        "max_cpu_loras",
        "mm_processor_cache_gb",
        "mm_processor_kwargs",
    }
)
GPU_ONLY = frozenset({"gpu_memory_utilization", "cudagraph_capture_sizes", "max_loras"})
"""Arguments that this engine has, and that change nothing where it runs on a CPU."""
ONLY_VALUE: dict[str, tuple[Any, ...]] = {
    "additional_config": ({}, None),
    "code_revision": (None,),
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "data_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "disable_sliding_window": (False,),
    "enable_chunked_prefill": (True, None),
    "enable_prompt_embeds": (False,),
    "hf_config_path": (None,),
    "hf_overrides": ({}, None),
    "kv_offloading_backend": ("native", None),
    "kv_transfer_config": (None,),
    "logits_processor_pattern": (None,),
    "logits_processors": (None,),
    "logprobs_mode": ("raw_logprobs",),
    "nnodes": (1,),
    "node_rank": (0,),
    "override_attention_dtype": (None,),
    "override_pooler_config": (None,),
    "revision": (None,),
    "rope_scaling": ({}, None),
    "rope_theta": (None,),
    "runner": ("auto", "generate"),
    "scheduler_cls": (None,),
    "skip_tokenizer_init": (False,),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
}


_ENGINE_ARGUMENT_OF = {
    "gpt_model_path": "model",
    "engine_dir": "model",
    "tokenizer_dir": "tokenizer",
    "enable_kv_cache_reuse": "enable_prefix_caching",
}
KV_TOKENS = "max_tokens_in_paged_kv_cache"
_READ_ELSEWHERE = frozenset({"exclude_input_in_output"})
_TENSORRTLLM_NO_EFFECT = frozenset(
    {
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        "batch_scheduler_policy",
        "batching_strategy",
        "cancellation_check_period_ms",
        "cross_kv_cache_fraction",
        "cuda_graph_cache_size",
        "cuda_graph_mode",
        "enable_chunked_context",
        "enable_context_fmha_fp32_acc",
        "enable_trt_overlap",
        "executor_worker_path",
        "gpt_model_type",
        "gpu_device_ids",
        "gpu_weights_percent",
        "guided_decoding_backend",
        "iter_stats_max_iterations",
        "kv_cache_free_gpu_mem_fraction",
        "kv_cache_host_memory_bytes",
        "kv_cache_onboard_blocks",
        "lora_cache_gpu_memory_fraction",
        "lora_cache_host_memory_bytes",
        "lora_cache_max_adapter_size",
        "lora_cache_optimal_adapter_size",
        "lora_prefetch_dir",
        "multi_block_mode",
        "normalize_log_probs",
        "participant_ids",
        "recv_poll_period_ms",
        "request_stats_max_iterations",
        "speculative_decoding_fast_logits",
        "stats_check_period_ms",
        "worker_path",
        "xgrammar_tokenizer_info_path",
    }
)
_TENSORRTLLM_ONLY_VALUE: dict[str, tuple[str, ...]] = {
    "decoding_mode": ("auto", "top_k", "top_p", "top_k_top_p"),
    "eagle_choices": (),
    "encoder_model_path": (),
    "lookahead_ngram_size": (),
    "lookahead_verification_set_size": (),
    "lookahead_window_size": (),
    "max_attention_window_size": (),
    "max_beam_width": ("1",),
    "medusa_choices": (),
    "num_nodes": ("1",),
    "sink_token_length": ("0",),
}


def translate_tensorrtllm(parameters: Mapping[str, str]) -> dict[str, str]:
    """Replaces TensorRT-LLM's parameters of config.pbtxt by engine arguments; others stay as they are.

    One that is empty or still a template (`${…}`) counts as not given, as in TensorRT-LLM. Raises TritonError
    INVALID_ARG for one that asks for what this engine does not do.
    """
    translated: dict[str, str] = {}
    without_effect: list[str] = []
    for name, value in parameters.items():
        if value == "" or value.startswith("${"):
            continue
        if name in _TENSORRTLLM_ONLY_VALUE:
            _check_tensorrtllm_value(name, value)
        elif name in _TENSORRTLLM_NO_EFFECT:
            without_effect.append(name)
        elif name not in _READ_ELSEWHERE:
            translated[_ENGINE_ARGUMENT_OF.get(name, name)] = value
    if without_effect:
        logger.warning("config.pbtxt parameters: no effect here: %s", ", ".join(sorted(without_effect)))
    if KV_TOKENS in translated:
        _use_kv_tokens(translated)
    return translated


def _check_tensorrtllm_value(name: str, value: str) -> None:
    allowed = _TENSORRTLLM_ONLY_VALUE[name]
    if value not in allowed:
        only = f"only {' or '.join(allowed)} is" if allowed else "no value is"
        raise invalid_argument(f"parameter '{name}' is '{value}', {only} supported")


def _use_kv_tokens(translated: dict[str, str]) -> None:
    """Replaces a number of tokens of KV memory by a number of blocks."""
    text = translated.pop(KV_TOKENS)
    if not text.isdecimal() or int(text) < 1:
        raise invalid_argument(f"parameter '{KV_TOKENS}' is '{text}', expected an integer of at least 1")
    given = translated.get("block_size", "")
    block_size = int(given) if given.isdecimal() and int(given) else EngineConfig(model="").block_size
    translated.setdefault("num_kv_blocks", str(-(-int(text) // block_size)))
