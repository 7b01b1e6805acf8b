"""Engine arguments of vLLM and parameters of TensorRT-LLM that this engine lacks or names differently.

Used by engine_args.py and the command line's flags. Independent of files and models. Invariant: an argument is ignored
only if no client can notice the difference, or only for values with that property (ONLY_VALUE). All others are used, or
refused by name with the reason.
Sources: vLLM's EngineArgs and AsyncEngineArgs 0.4 to 0.33; TensorRT-LLM's config.pbtxt and docs/model_config.md.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from llmbackend.core.backend_api import invalid_argument
from llmbackend.engine.config import EngineConfig

logger = logging.getLogger(__name__)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _by_name(groups: Mapping[str, str]) -> dict[str, str]:
    """Inverts a mapping of reason → names into name → reason."""
    return {name: reason for reason, names in groups.items() for name in _names(names)}


STORED_QUANTIZATION = _names("awq awq_marlin compressed-tensors gguf gptq gptq_marlin mxfp4")
"""vLLM's names of the formats of quantized checkpoints, as values of `quantization`."""
STORED_QUANTIZATION_BECAUSE = "the format of quantized weights is that of the checkpoint"
NO_EFFECT: Mapping[str, str] = _by_name(
    {
        "each engine manages its own memory": """
            cpu_offload_gb cpu_offload_params enable_cumem_allocator enable_nccl_comm_suspend enable_shm_tensor_arena
            enable_sleep_mode offload_backend offload_group_size offload_num_in_group offload_params
            offload_prefetch_step sleep_mode_offload_cudagraph sleep_preserve_parameter_names swap_space watermark""",
        "an engine has one copy of the model": """
            data_parallel_address data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb
            data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port data_parallel_size_local
            data_parallel_start_rank disable_nccl_for_dp_synchronization dp_sync_interval elastic_ep_max_dp_size
            enable_elastic_ep prefill_schedule_interval""",
        "several machines are configured by --cluster": """
            cpu_distributed_timeout_seconds distributed_executor_backend distributed_timeout_seconds engine_use_ray
            master_addr master_port ray_workers_use_nsight worker_use_ray""",
        "every rank has a part of each expert": """
            all2all_backend enable_ep_weight_filter enable_eplb enable_expert_parallel eplb_config
            expert_placement_strategy""",
        "cores and memory nodes are set by --host-policy": "numa_bind numa_bind_cpus numa_bind_nodes",
        "the packed weights of the first start are reused": """
            max_parallel_loading_workers model_loader_extra_config pt_load_map_location safetensors_load_strategy
            safetensors_prefetch_block_size safetensors_prefetch_num_threads use_tqdm_on_load""",
        "files are chosen by their format": "allow_deprecated_quantization ignore_patterns model_impl",
        "this engine chooses among its own kernels": """
            attention_backend attention_config compilation_config cp_kv_cache_interleave_size cuda_graph_sizes
            dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size
            dcp_q_replicate disable_cascade_attn disable_custom_all_reduce enable_batch_sharded_sampling enable_dbo
            enable_flashinfer_autotune enable_hc_sp gdn_prefill_backend ir_op_priority jit_monitor_mode
            jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config linear_backend
            max_context_len_to_capture max_cudagraph_capture_size max_seq_len_to_capture moe_backend
            optimization_level performance_mode sparse_indexer_topk_backend ubatch_size use_fp64_gumbel worker_cls""",
        "recurrent layers have only one implementation": """
            enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint engram_config mamba_backend
            mamba_block_size mamba_cache_mode mamba_cache_philox_rounds mamba_ssu_algorithm replayssm_buffer_len
            use_replayssm""",
        "prefills are always chunked, which changes no answer": "enable_chunked_prefill",
        "steps are bounded by max_num_batched_tokens and max_num_seqs only": """
            disable_async_output_proc disable_hybrid_kv_cache_manager kv_sharing_fast_prefill
            long_prefill_token_threshold_adaptive max_long_partial_prefills max_num_active_seqs
            max_num_partial_prefills max_num_scheduled_tokens multi_step_stream_outputs num_lookahead_slots
            num_scheduler_steps preemption_mode scheduler_delay_factor scheduler_reserve_full_isl scheduling_policy
            use_v2_block_manager""",
        "the prefix cache has one implementation": """
            prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit swa_bounded_replay""",
        "prompts are rendered on up to two threads for each model": "renderer_num_workers",
        "an engine that dies is replaced, and its requests continue": "enable_fault_tolerance fault_tolerance_config",
        "the log, metrics and traces are configured by --log-…, --metrics-config and --trace-config": """
            aggregate_engine_logging collect_detailed_traces cudagraph_metrics disable_log_requests
            enable_layerwise_nvtx_tracing enable_log_requests enable_logging_iteration_details enable_mfu_metrics
            kv_cache_metrics kv_cache_metrics_sample log_config_file log_level logging_config otlp_traces_endpoint
            profiler_config show_hidden_metrics_for_version""",
        "metrics follow the model": "disable_log_stats",
        "the model has the name of its repository directory": "served_model_name",
        "only text is supported": """
            allowed_local_media_path allowed_media_domains default_mm_loras disable_chunked_mm_input
            disable_mm_preprocessor_cache ec_manager_config enable_mm_embeds enable_tower_connector_lora
            interleave_mm_strings language_model_only limit_mm_per_prompt media_io_kwargs mm_device_do_normalize
            mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
            mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm
            mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device
            mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling
            video_pruning_method video_pruning_rate""",
        "tool calls and reasoning are parsed if the chat template shows their format": """
            enable_auto_tool_choice enable_reasoning""",
        "adapters use the model's data type and stay in memory": """
            fully_sharded_loras long_lora_scaling_factors lora_dtype lora_extra_vocab_size
            max_lora_cls_labels specialize_active_lora""",
        "hub files are stored under HF_HOME": "download_dir hf_token",
        "stream events are controlled by --stream-interval and by requests": "stream_interval",
        "the server's own flags limit queue and shutdown": "max_num_queued_reqs shutdown_timeout",
        "a warning names vLLM's environment variables without effect": "fail_on_environ_validation",
    }
)
"""Accepted arguments, each with the reason why clients cannot notice that it has no effect."""

SWITCHES = _names(
    """
    aggregate_engine_logging allow_deprecated_quantization calculate_kv_scales cudagraph_metrics
    data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb dcp_q_replicate
    disable_async_output_proc disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce
    disable_hybrid_kv_cache_manager disable_log_requests disable_log_stats disable_mm_preprocessor_cache
    disable_nccl_for_dp_synchronization disable_sliding_window enable_auto_tool_choice enable_batch_sharded_sampling
    enable_chunked_prefill enable_cumem_allocator enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb
    enable_expert_parallel enable_fault_tolerance enable_flashinfer_autotune enable_hc_sp
    enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_mamba_cache_stochastic_rounding
    enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds
    enable_moe_shared_loras enable_nccl_comm_suspend enable_prompt_embeds enable_reasoning
    enable_return_routed_experts enable_shm_tensor_arena enable_sleep_mode enable_tower_connector_lora
    enable_trace_replay engine_use_ray fail_on_environ_validation fully_sharded_loras interleave_mm_strings
    jit_monitor_verbose kv_cache_metrics kv_sharing_fast_prefill language_model_only
    long_prefill_token_threshold_adaptive mm_device_do_normalize mm_encoder_only multi_step_stream_outputs numa_bind
    ray_workers_use_nsight return_sampling_mask scheduler_reserve_full_isl skip_mm_profiling
    sleep_mode_offload_cudagraph specialize_active_lora swa_bounded_replay use_fp64_gumbel use_replayssm
    use_tqdm_on_load use_v2_block_manager worker_use_ray
    """
)
"""Those of NO_EFFECT and ONLY_VALUE that take no value on vLLM's command line."""
GPU_ONLY = frozenset({"gpu_memory_utilization", "cudagraph_capture_sizes", "max_loras"})
"""Arguments of this engine that have no effect on a CPU."""

_ONLY: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "the engine loads no third-party code": {
        "io_processor_plugin": (None, ""),
        "logits_processor_pattern": (None,),
        "logits_processors": (None,),
        "model_class_overrides": ({}, None),
        "reasoning_parser_plugin": ("", None),
        "scheduler_cls": (None,),
        "worker_extension_cls": ("", None),
    },
    "only models that generate text are supported": {
        "convert": ("auto", "none"),
        "diffusion_config": (None,),
        "override_pooler_config": (None,),
        "pooler_config": (None,),
        "runner": ("auto", "generate"),
        "task": ("auto", "generate"),
    },
    "only text is supported": {"ec_transfer_config": (None,), "mm_encoder_only": (False,)},
    "the model is computed as its config.json specifies": {
        "config_format": ("auto", "hf"),
        "disable_sliding_window": (False,),
        "hf_config_path": (None,),
        "hf_overrides": ({}, None),
        "override_attention_dtype": (None,),
        "rope_scaling": ({}, None),
        "rope_theta": (None,),
    },
    "an engine has one copy of the model; replicas of a model are its instances (instance_group)": {
        "data_parallel_size": (1,),
    },
    "several machines are configured by --cluster": {"nnodes": (1,), "node_rank": (0,)},
    "sequences are not split over ranks": {
        "decode_context_parallel_size": (1,),
        "prefill_context_parallel_size": (1,),
    },
    "devices are set by --device and instance groups": {"device_ids": (None,)},
    "prompts are text or tokens": {"enable_prompt_embeds": (False,)},
    "requests cannot prescribe the tokens of their answers": {"enable_trace_replay": (False,)},
    "log probabilities are those of the model's own distribution": {
        "aux_output_config": ({}, None),
        "enable_return_routed_experts": (False,),
        "logprobs_mode": ("raw_logprobs",),
        "return_sampling_mask": (False,),
    },
    "there is only one implementation": {
        "custom_histogram_buckets": (None, {}),
        "enable_mixed_moe_lora_format": (False,),
        "enable_moe_shared_loras": (False,),
        "kv_cache_dtype_skip_layers": ([], None),
        "kv_offloading_backend": ("native", None),
        "lora_target_modules": (None,),
        "mamba_cache_dtype": ("auto",),
        "mamba_ssm_cache_dtype": ("auto",),
        "max_num_queued_tokens": (None,),
        "per_request_spec_decode_metrics": ("none",),
        "quantization_config": (None,),
        "reasoning_config": (None,),
    },
    "scales of keys and values are 1": {"calculate_kv_scales": (False,)},
    "KV blocks are not moved between servers": {"kv_transfer_config": (None,)},
    "answers have no watermarks": {"watermark_config": (None,)},
    "weights are read once, at startup": {"weight_transfer_config": (None,)},
    "no platform reads it": {"additional_config": ({}, None)},
    "the model's own tokenizer is required, in the format of the transformers library": {
        "tokenizer_mode": ("auto", "hf"),
    },
    "a model is one directory": {
        "code_revision": (None,),
        "revision": (None,),
        "tokenizer_revision": (None,),
    },
}
ONLY_VALUE: Mapping[str, tuple[Any, ...]] = {name: only for names in _ONLY.values() for name, only in names.items()}
"""Arguments that affect what clients see, and the values with which they are accepted."""
ONLY_VALUE_BECAUSE: Mapping[str, str] = {name: reason for reason, names in _ONLY.items() for name in names}

_ENGINE_ARGUMENT_OF = {
    "gpt_model_path": "model",
    "engine_dir": "model",
    "tokenizer_dir": "tokenizer",
    "enable_kv_cache_reuse": "enable_prefix_caching",
}
KV_TOKENS = "max_tokens_in_paged_kv_cache"
_READ_ELSEWHERE = frozenset({"exclude_input_in_output"})
_TENSORRTLLM_NO_EFFECT = _names(
    """
    FORCE_CPU_ONLY_INPUT_TENSORS batch_scheduler_policy batching_strategy cancellation_check_period_ms
    cross_kv_cache_fraction cuda_graph_cache_size cuda_graph_mode enable_chunked_context
    enable_context_fmha_fp32_acc enable_trt_overlap executor_worker_path gpt_model_type gpu_device_ids
    gpu_weights_percent guided_decoding_backend iter_stats_max_iterations kv_cache_free_gpu_mem_fraction
    kv_cache_host_memory_bytes kv_cache_onboard_blocks lora_cache_gpu_memory_fraction lora_cache_host_memory_bytes
    lora_cache_max_adapter_size lora_cache_optimal_adapter_size lora_prefetch_dir multi_block_mode
    normalize_log_probs participant_ids recv_poll_period_ms request_stats_max_iterations
    speculative_decoding_fast_logits stats_check_period_ms worker_path xgrammar_tokenizer_info_path
    """
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
    """Replaces TensorRT-LLM's config.pbtxt parameters by engine arguments; others are left unchanged.

    As in TensorRT-LLM, a parameter that is empty or still a template (`${…}`) counts as not set. Raises TritonError
    INVALID_ARG for a parameter that asks for something this engine does not do.
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
        blocks = num_kv_blocks(KV_TOKENS, translated.pop(KV_TOKENS), translated.get("block_size"))
        translated.setdefault("num_kv_blocks", blocks)
    return translated


def _check_tensorrtllm_value(name: str, value: str) -> None:
    allowed = _TENSORRTLLM_ONLY_VALUE[name]
    if value not in allowed:
        only = f"only {' or '.join(allowed)} is" if allowed else "no value is"
        raise invalid_argument(f"parameter '{name}' is '{value}', {only} supported")


def num_kv_blocks(name: str, num_tokens: Any, block_size: Any) -> str:
    """The number of blocks for so many tokens of KV memory. name: names that number in errors."""
    text, given = str(num_tokens), str(block_size)
    if not text.isdecimal() or int(text) < 1:
        raise invalid_argument(f"parameter '{name}' is '{text}', expected an integer of at least 1")
    size = int(given) if given.isdecimal() and int(given) else EngineConfig(model="").block_size
    return str(-(-int(text) // size))


_STRUCTURED: Final = "structured_outputs_config"
FORMER_NAMES: Final[Mapping[str, str]] = {
    "guided_decoding_backend": "backend",
    "guided_decoding_disable_fallback": "disable_fallback",
    "guided_decoding_disable_any_whitespace": "disable_any_whitespace",
    "guided_decoding_disable_additional_properties": "disable_additional_properties",
}
"""Former argument → its field in the configuration."""
_PARSER, _PLUGIN = "reasoning_parser", "reasoning_parser_plugin"


def with_present_names(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The engine arguments with a single `structured_outputs_config`, from which the reasoning parser is moved into its
    own argument. Raises TritonError INVALID_ARG."""
    rest = {name: value for name, value in values.items() if name not in FORMER_NAMES and name != _STRUCTURED}
    former = {FORMER_NAMES[name]: values[name] for name in FORMER_NAMES if values.get(name) is not None}
    config = former | _structured_outputs(values.get(_STRUCTURED), source)
    if config.pop(_PLUGIN, None):
        raise invalid_argument(
            f"{source}: '{_PLUGIN}' of engine argument '{_STRUCTURED}' is set, expected none: parsers are built in"
        )
    parser = config.pop(_PARSER, None)
    if parser and not rest.get(_PARSER):
        rest[_PARSER] = parser
    if config:
        rest[_STRUCTURED] = config
    return rest


def _structured_outputs(value: object, source: str) -> dict[str, Any]:
    if value is None:
        return {}
    try:
        config = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise invalid_argument(f"{source}: engine argument '{_STRUCTURED}' is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise invalid_argument(f"{source}: engine argument '{_STRUCTURED}' is {json.dumps(config)}, expected an object")
    return dict(config)
