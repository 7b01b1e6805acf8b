"""From a loaded model to a runner on an accelerator: the program and its proof, KV memory, graphs.

For: make_runner. Does not know: requests, schedules. Invariant: memory is taken in this order: weights, the program's
buffers and the rows, what the largest step needs beside them, graphs; KV blocks get the rest, up to the limit that the
config states. So no step of a running engine meets a device that is full.
"""

from __future__ import annotations

import dataclasses
import logging
import time

import msgspec
import numpy as np
from torch import nn

from ..config import EngineConfig
from ..decoder_description import UnrecognisedError
from ..infer_request import ModelInfo
from ..loader import LoadedModel
from ..step import RowTable, StepPlan
from . import memory
from .choice import choose
from .dense_weights import Matmul
from .device import CudaDevice, Device
from .device_rows import DeviceRows
from .graphs import DecodeGraphs, ladder
from .host_blocks import HostBlocks
from .ops import LayerCache, Ops
from .program import GpuProgram
from .proof import LONGEST_PROBE, prove
from .runner import Engine, GpuRunner
from .sampling import Sampling
from .step_message import StepMessages

logger = logging.getLogger(__name__)


def start_on_cuda(config: EngineConfig, loaded: LoadedModel, start_s: float) -> GpuRunner:
    """As `start`, with what there is for an NVIDIA GPU."""
    return start(config, loaded, CudaDevice(loaded.device), *choose(config, loaded), start_s)


def start(
    config: EngineConfig,
    loaded: LoadedModel,
    device: Device,
    ops: Ops,
    matmul: Matmul,
    sampling: Sampling,
    start_s: float,
) -> GpuRunner:
    """start_s: when loading began, by the monotonic clock.

    Raises UnrecognisedError when the model must run as modules, ValueError (naming the argument) or
    torch.OutOfMemoryError when there is no room for it.
    """
    if config.speculative_config is not None:
        raise ValueError(f"engine argument 'speculative_config' is set, which device '{config.device}' cannot do yet")
    engine = _make_engine(config, loaded, device, ops, matmul, sampling)
    num_blocks = _num_blocks(config, loaded, engine)
    caches = _caches(config, loaded, device, num_blocks)
    engine.program.use_caches(caches)
    host_blocks = HostBlocks.make(config, device, caches.values())
    capture_s = engine.graphs.capture(_graph_sizes(config))
    device.trim()
    how = f"{type(ops).__name__}, graphs of {engine.graphs.sizes or 'no'} sequences in {capture_s:.1f} s"
    logger.info("%s: %d KV blocks of %d tokens, %s", device.name, num_blocks, config.block_size, how)
    info = _info(config, loaded, device, num_blocks, how, start_s)
    if host_blocks is not None:
        engine = dataclasses.replace(engine, host_blocks=host_blocks)
        info = msgspec.structs.replace(info, num_host_blocks=host_blocks.num_blocks)
    return GpuRunner(engine, info)


def _make_engine(
    config: EngineConfig, loaded: LoadedModel, device: Device, ops: Ops, matmul: Matmul, sampling: Sampling
) -> Engine:
    """All but the KV memory: a program that was proved with a few blocks, rows, and no graphs yet."""
    if loaded.decoder is None:
        raise UnrecognisedError(loaded.why_modules)
    max_tokens = max(config.max_num_batched_tokens, LONGEST_PROBE)
    max_samples = max(min(config.max_num_seqs, max_tokens), LONGEST_PROBE)
    few = -(-LONGEST_PROBE // config.block_size)
    precise = memory.kv_caches(loaded.layer_shapes, few, config.block_size, loaded.dtype, device.torch_device)
    program = GpuProgram(loaded.decoder, precise, ops, max_tokens, max_samples, matmul)
    prove(program, loaded.checked, config.block_size)
    program.use_caches(_caches(config, loaded, device, few))
    limits = config.max_num_seqs, loaded.max_model_len, config.block_size
    messages = StepMessages(device, *limits, sampling.max_steps_in_flight)
    rows = DeviceRows(device.torch_device, ops, *limits, messages.max_words)
    graphs = DecodeGraphs(device, program, rows, loaded.max_model_len)
    return Engine(device, program, rows, messages, graphs, sampling)


def _caches(config: EngineConfig, loaded: LoadedModel, device: Device, num_blocks: int) -> dict[nn.Module, LayerCache]:
    dtype = memory.kv_dtype(config, loaded.dtype, device)
    return memory.kv_caches(loaded.layer_shapes, num_blocks, config.block_size, dtype, device.torch_device)


def _num_blocks(config: EngineConfig, loaded: LoadedModel, engine: Engine) -> int:
    dtype = memory.kv_dtype(config, loaded.dtype, engine.device)
    graph_bytes = _graph_bytes(config, engine) if config.num_kv_blocks is None else 0
    engine.device.trim()
    _run_largest_step(config, loaded, engine)
    bytes_per_block = memory.block_bytes(loaded.layer_shapes, config.block_size, dtype)
    return memory.num_kv_blocks(config, loaded.max_model_len, bytes_per_block, engine.device.memory(), graph_bytes)


def _run_largest_step(config: EngineConfig, loaded: LoadedModel, engine: Engine) -> None:
    """As many tokens and samples as a step can have, in the first block. What it took stays taken (Device.memory), and
    kernels that were compiled for it are there when the first request comes."""
    num_tokens = config.max_num_batched_tokens
    num_rows = min(config.max_num_seqs, num_tokens)
    count = max(1, min(num_tokens // num_rows, loaded.max_model_len - 1))
    table = RowTable(config.max_num_seqs, loaded.max_model_len, config.block_size)
    table.num_tokens[:] = count
    rows = np.arange(num_rows, dtype=np.int32)
    plan = StepPlan(rows, np.full(num_rows, count, np.int32), np.ones(num_rows, np.bool_))
    GpuRunner(engine, _info(config, loaded, engine.device, 1, "", 0.0)).execute(plan, table)


def _graph_sizes(config: EngineConfig) -> list[int]:
    if config.enforce_eager:
        return []
    return ladder(min(config.max_num_seqs, config.max_num_batched_tokens), config.cudagraph_capture_sizes)


def _graph_bytes(config: EngineConfig, engine: Engine) -> int:
    """What all graphs will take: the largest brings the memory that the others share, and each has launches of its
    own. Measured by capturing two of them."""
    sizes = _graph_sizes(config)
    free_bytes = []
    for some in ([], sizes[-1:], sizes[-2:]):
        engine.graphs.forget()
        engine.graphs.capture(some)
        engine.device.synchronize()
        free_bytes.append(engine.device.memory().free_bytes)
    engine.graphs.forget()
    first, second = free_bytes[0] - free_bytes[1], free_bytes[1] - free_bytes[2]
    return first + second * max(len(sizes) - 1, 0)


def _info(
    config: EngineConfig, loaded: LoadedModel, device: Device, num_blocks: int, how: str, start_s: float
) -> ModelInfo:
    dtype = str(loaded.dtype).removeprefix("torch.")
    return ModelInfo(
        model_type=loaded.model_type,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        block_size=config.block_size,
        num_blocks=num_blocks,
        dtype=dtype,
        device=str(loaded.device),
        load_s=time.monotonic() - start_s,
        description=f"{device.name}, {dtype}, one program, {how}",
    )
