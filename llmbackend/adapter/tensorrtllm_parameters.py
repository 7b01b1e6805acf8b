"""TensorRT-LLM's parameters in config.pbtxt, as far as they mean something here.

For: engine_args.py, for models of the backend `tensorrtllm` or of its tensor schemas. Does not know: files. Invariant:
no parameter is dropped in silence: each is used, warned about because it changes nothing here, or refused by name.
A value that is empty or still a template (`${…}`) counts as not given, as in TensorRT-LLM.
Source: inflight_batcher_llm/tensorrt_llm/config.pbtxt and docs/model_config.md of TensorRT-LLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from llmbackend.core.backend_api import invalid_argument
from llmbackend.engine.config import EngineConfig

logger = logging.getLogger(__name__)

_ENGINE_ARGUMENT = {
    "gpt_model_path": "model",
    "engine_dir": "model",
    "tokenizer_dir": "tokenizer",
    "enable_kv_cache_reuse": "enable_prefix_caching",
}
KV_TOKENS = "max_tokens_in_paged_kv_cache"
_READ_ELSEWHERE = frozenset({"exclude_input_in_output"})
_NO_EFFECT = frozenset(
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
_ONLY_VALUE: dict[str, tuple[str, ...]] = {
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


def translate(parameters: Mapping[str, str]) -> dict[str, str]:
    """The parameters with TensorRT-LLM's replaced by engine arguments; others stay as they are.

    Raises TritonError INVALID_ARG for one that asks for what this engine does not do.
    """
    translated: dict[str, str] = {}
    without_effect: list[str] = []
    for name, value in parameters.items():
        if value == "" or value.startswith("${"):
            continue
        if name in _ONLY_VALUE:
            _check(name, value)
        elif name in _NO_EFFECT:
            without_effect.append(name)
        elif name not in _READ_ELSEWHERE:
            translated[_ENGINE_ARGUMENT.get(name, name)] = value
    if without_effect:
        logger.warning("config.pbtxt parameters: no effect here: %s", ", ".join(sorted(without_effect)))
    if KV_TOKENS in translated:
        _use_kv_tokens(translated)
    return translated


def _check(name: str, value: str) -> None:
    allowed = _ONLY_VALUE[name]
    if value not in allowed:
        only = f"only {' or '.join(allowed)} is" if allowed else "no value is"
        raise invalid_argument(f"parameter '{name}' is '{value}', {only} supported")


def _use_kv_tokens(translated: dict[str, str]) -> None:
    """Tokens of KV memory as blocks."""
    text = translated.pop(KV_TOKENS)
    if not text.isdecimal() or int(text) < 1:
        raise invalid_argument(f"parameter '{KV_TOKENS}' is '{text}', expected an integer of at least 1")
    given = translated.get("block_size", "")
    block_size = int(given) if given.isdecimal() and int(given) else EngineConfig(model="").block_size
    translated.setdefault("num_kv_blocks", str(-(-int(text) // block_size)))
