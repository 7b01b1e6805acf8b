"""What `llmbackend serve --help` says of the engine's arguments, and in which group.

For: engine_flags.py. Data, no code. Does not know: types, defaults. Invariant: an argument that is missing here is a
flag nevertheless, without a word about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_MODEL: Final = "--model: weights and text"
_MEMORY: Final = "--model: memory and batches"
_COMPUTE: Final = "--model: device and computation"
_LORA: Final = "--model: LoRA adapters"
_PROCESS: Final = "--model: the engine's process"
QUEUE_PANEL: Final = "--model: bounds on requests"
OTHER_PANEL: Final = "--model: further engine arguments"
INERT_PANEL: Final = "--model: arguments of vLLM without effect here"

HELP: Final[Mapping[str, tuple[str, str]]] = {
    "tokenizer": (_MODEL, "Directory or hub id of the tokenizer; default: that of the model."),
    "chat_template": (_MODEL, "File of a chat template (Jinja), or the template itself; default: the model's."),
    "generation_config": (_MODEL, "Sampling defaults: auto = the model's, vllm = none, or a folder with the file."),
    "override_generation_config": (_MODEL, "Sampling defaults, as JSON."),
    "trust_remote_code": (_MODEL, "Run code that the checkpoint brings along."),
    "dtype": (_MODEL, "Data type of weights and activations."),
    "quantization": (_MODEL, "Weights in 8 bits, made while loading."),
    "load_format": (_MODEL, "safetensors, or dummy for random weights."),
    "max_model_len": (_MODEL, "Context limit in tokens (32k, 32K); default: the model's."),
    "seed": (_MODEL, "Seed of random weights."),
    "max_num_seqs": (_MEMORY, "Requests in one step."),
    "max_num_batched_tokens": (_MEMORY, "Token budget of a step."),
    "step_target_ms": (_MEMORY, "How long a step with prompts beside running requests may take; 0 = no limit."),
    "long_prefill_token_threshold": (_MEMORY, "Longer prompts leave half of a step to shorter ones."),
    "kv_cache_memory_bytes": (_MEMORY, "Memory for keys and values (4G); default on CPU: 1 GiB."),
    "kv_cache_dtype": (_MEMORY, "Keys and values in 8 bits, on a GPU."),
    "gpu_memory_utilization": (_MEMORY, "Share of a GPU's memory to use."),
    "num_kv_blocks": (_MEMORY, "Blocks of keys and values, instead of their memory."),
    "block_size": (_MEMORY, "Tokens in a block of keys and values."),
    "enable_prefix_caching": (_MEMORY, "Keep the keys and values of prompts for others that begin alike."),
    "kv_offloading_size": (_MEMORY, "GiB of host memory for blocks that a GPU has no room for."),
    "num_host_kv_blocks": (_MEMORY, "The same as a number of blocks."),
    "device": (_COMPUTE, "cpu, cuda, cuda:N, or auto: a GPU where there is one."),
    "tensor_parallel_size": (_COMPUTE, "GPUs that the engine spans."),
    "num_threads": (_COMPUTE, "Threads on CPU; 0 = all cores."),
    "speculative_config": (_COMPUTE, 'N-gram speculation: {"method": "ngram", "num_speculative_tokens": 4}.'),
    "async_scheduling": (_COMPUTE, "Schedule the next step while one runs; default: where it can be."),
    "enforce_eager": (_COMPUTE, "No native program on CPU, no graphs on a GPU."),
    "cudagraph_capture_sizes": (_COMPUTE, "Batch sizes of a GPU's graphs, a JSON list."),
    "batch_invariant": (_COMPUTE, "Sums in an order that does not depend on the batch, on a GPU."),
    "kernels": (_COMPUTE, "torch: no own kernels."),
    "enable_lora": (_LORA, "Serve adapters beside the model."),
    "lora_modules": (_LORA, "An adapter, repeatable; --lora-separator makes adapters models of the OpenAI API."),
    "max_lora_rank": (_LORA, "Largest rank of an adapter."),
    "transport": (_PROCESS, "inline: the engine runs in the server's process."),
    "engine_python": (_PROCESS, "The Python that runs the engine; default: the server's."),
    "step_timeout_s": (_PROCESS, "An engine whose step takes longer hangs, seconds."),
    "load_timeout_s": (_PROCESS, "The same for loading, seconds."),
    "max_engine_failures": (_PROCESS, "Engines that may die in a row before the model is given up."),
    "max_queue_size": (QUEUE_PANEL, "Requests that may wait; more get 503. (default: 4096)"),
    "max_prompt_tokens": (QUEUE_PANEL, "Longer prompts are refused; default: the context."),
    "max_output_tokens": (QUEUE_PANEL, "max_tokens is cut to it; default: the context."),
    "max_messages_bytes": (QUEUE_PANEL, "Largest `messages` of a chat."),
    "request_timeout_s": (QUEUE_PANEL, "Age at which a request is ended, seconds; default: none."),
    "stall_timeout_s": (QUEUE_PANEL, "Work and no step for so long: not ready, seconds. (default: 60)"),
}
