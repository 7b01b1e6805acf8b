"""How many KV blocks a model that runs as modules gets on a GPU.

For: the model runner. Does not know: modules, attention's arithmetic. Invariants: as for programs, blocks get what the
largest step leaves of the limit that the config states; beside them there is room for what attention in plain torch
copies of one layer's keys and values.
"""

from __future__ import annotations

from ..config import EngineConfig
from ..model.loader import LoadedModel
from ..step import Runner
from .device import Device
from .kv_memory import block_bytes, num_kv_blocks
from .warm_up import run_largest

_COPIES = 4
"""Bytes that attention copies for each byte of a layer's KV that a step reads: the rows' blocks, padded by up to a
third, once in the model's dtype and once in float32."""


def num_module_blocks(config: EngineConfig, loaded: LoadedModel, device: Device, trial: Runner) -> int:
    """trial: the model with one KV block. Raises ValueError when one sequence of max_model_len tokens does not fit,
    torch.OutOfMemoryError when the largest step does not."""
    device.trim()
    run_largest(trial, config)
    device.synchronize()
    layers = loaded.layer_shapes
    with_copies = block_bytes(layers, config.block_size, loaded.dtype) * (len(layers) + _COPIES) // len(layers)
    num_blocks = num_kv_blocks(config, loaded.max_model_len, with_copies, device.memory(), 0)
    # More than all rows at full length need is never used.
    return min(num_blocks, config.max_num_seqs * -(-loaded.max_model_len // config.block_size))
