"""What a load would produce and need, determined without reading weights.

Used by `llmbackend check` through the adapter. Imports torch and transformers, as the load does. Invariant: nothing is
decided here; every value comes from the code that loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from .config import EngineConfig
from .cpu_threads import engine_threads
from .kv_groups import KVGroups

if TYPE_CHECKING:
    from .model.unloaded_model import UnloadedModel


class LoadForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `forecast`, which raises instead if the engine would not start.

    path              "native program", "transformers modules", "accelerator" or "mock"
    why_not_faster    why it is not the native program; "" = it is, or the device is not a CPU
    device            "cpu", "cuda:0" …
    threads           on CPU
    weight_bytes      in memory, as packed; without embedding_bytes, of which a step reads only a few rows
    kv_bytes_per_token  None = unknown until the weights are loaded; num_kv_blocks, kv_bytes, full_length_requests and
                      max_request_tokens are then None too
    state_bytes       recurrent state of one sequence; 0 = no recurrent layers, or unknown
    num_kv_blocks     blocks in the whole KV memory; None = unknown until loaded, as on an accelerator
    kv_bytes          the whole KV memory, whose pages are committed when first used; None as for num_kv_blocks
    full_length_requests  how many requests of max_model_len tokens fit at once; None as for num_kv_blocks
    max_request_tokens    the longest request that fits, at most max_model_len; None as for num_kv_blocks
    kernels           the CPU kernels that this machine would choose, and what was measured
    weight_cache      where the packed weights are, or why they would be packed again
    """

    path: str
    why_not_faster: str = ""
    device: str
    threads: int = 0
    architecture: str = ""
    model_type: str = ""
    dtype: str = ""
    quantization: str | None = None
    num_parameters: int = 0
    vocab_size: int = 0
    max_model_len: int = 0
    weight_bytes: int = 0
    embedding_bytes: int = 0
    kv_bytes_per_token: int | None = None
    state_bytes: int = 0
    block_size: int = 0
    num_kv_blocks: int | None = None
    kv_bytes: int | None = None
    full_length_requests: int | None = None
    max_request_tokens: int | None = None
    max_num_seqs: int = 0
    kernels: str = ""
    weight_cache: str = ""


def forecast(config: EngineConfig) -> LoadForecast:
    """Raises ValueError or OSError with the message with which the engine's load would fail."""
    if config.model == "mock":
        return LoadForecast(path="mock", device="cpu", max_num_seqs=config.max_num_seqs, block_size=config.block_size)
    from .model.unloaded_model import unloaded_model

    model = unloaded_model(config)
    is_cpu = config.device == "cpu"
    is_native = is_cpu and not model.why_modules
    return LoadForecast(
        path="accelerator" if not is_cpu else "native program" if is_native else "transformers modules",
        why_not_faster=model.why_modules,
        device=config.device,
        threads=engine_threads(config) if is_cpu else 0,
        architecture=model.architecture,
        model_type=model.model_type,
        dtype=model.dtype,
        quantization=config.quantization,
        num_parameters=model.num_parameters,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        weight_bytes=model.weight_bytes,
        embedding_bytes=model.embedding_bytes,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        kernels=model.kernels,
        weight_cache=_weight_cache(config) if is_native else "",
        **_kv_memory(config, model),
    )


def _kv_memory(config: EngineConfig, model: UnloadedModel) -> dict[str, Any]:
    bytes_per_token, max_model_len = model.kv_bytes_per_token, model.max_model_len
    if bytes_per_token is None or config.device != "cpu":
        return {"kv_bytes_per_token": bytes_per_token}
    from .cpu.native_memory import num_kv_blocks

    groups = KVGroups() if model.layers is None else model.layers.groups
    bytes_of_block = bytes_per_token if model.layers is None else model.layers.share_of_block(bytes_per_token)
    num_blocks = num_kv_blocks(config, bytes_of_block, max_model_len, groups)
    at_once = groups.max_blocks(max_model_len, config.max_num_batched_tokens, config.block_size)
    return {
        "kv_bytes_per_token": bytes_per_token,
        "state_bytes": model.state_bytes,
        "num_kv_blocks": num_blocks,
        "kv_bytes": num_blocks * config.block_size * bytes_of_block,
        "full_length_requests": min(num_blocks // at_once, _num_states(config, model.state_bytes, num_blocks)),
        "max_request_tokens": min(max_model_len, groups.max_request_tokens(config.block_size, num_blocks)),
    }


def _num_states(config: EngineConfig, state_bytes: int, num_blocks: int) -> int:
    """How many requests can run at once, as limited by recurrent states."""
    if not state_bytes:
        return config.max_num_seqs
    from .cpu.recurrent_states import num_state_slots

    return min(config.max_num_seqs, num_state_slots(config, state_bytes, num_blocks))


def _weight_cache(config: EngineConfig) -> str:
    from .weight_cache.cache import CachedModel

    cached = CachedModel(config)
    try:
        if cached.why_not:
            return f"not used: {cached.why_not}"
        return f"found in {cached.directory}" if cached.has_image() else f"not yet in {cached.directory}"
    finally:
        cached.close()
