"""From a loaded model to a runner on an accelerator: kernels, the verified program, KV memory, graphs and warm-up
steps.

Used by make_runner. Invariants: memory is allocated in this order: weights, the buffers of the program and the rows,
what the largest step needs in addition, graphs; KV blocks get the rest, up to the configured limit, so no step of a
running engine runs out of memory. The warm-up steps compile every kernel that a running engine needs, so that no
request waits for a compiler; they write only to the first KV block. Triton is imported only if it is used.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

from ..attention.interface import LayerShape
from ..config import EngineConfig
from ..errors import ProgramUnsupportedError
from ..kv_groups import KVGroups, LayerGroups, layer_groups
from ..messages import ModelInfo
from ..model.compatibility import MAX_PROBE_TOKENS
from ..model.decoder_description import Decoder
from ..model.loader import LoadedModel
from ..sampling.sampler import PIECE_TOKENS
from ..step import Int32Array, LookupLengths, RowTable, Runner, StepPlan
from . import device_kv_memory as kv_memory
from .device import CudaDevice, Device
from .device_kv_memory import HostBlocks, block_bytes, num_kv_blocks
from .device_rows import DeviceRows, Padded, StepMessages
from .gpu_runner import GpuRunner, HostSampling, RunnerParts, StepSampler
from .graphs import StepGraphs, graph_bytes, ladder, mixed_ladder
from .lora import DeviceAdapters, slots_for
from .ops.ops import LayerCache, Ops
from .ops.torch_ops import TorchOps
from .program import WHOLE, GpuProgram, Stages, library_matmul
from .row_messages import max_sequences
from .weights.dense import Matmul

logger = logging.getLogger(__name__)


def start_on_cuda(config: EngineConfig, loaded: LoadedModel, start_s: float) -> GpuRunner:
    """`start` with the operations and the sampler for an NVIDIA GPU."""
    return start(config, loaded, CudaDevice(loaded.device), *choose(config, loaded), start_s)


def start(
    config: EngineConfig,
    loaded: LoadedModel,
    device: Device,
    ops: Ops,
    matmul: Matmul,
    sampling: StepSampler,
    start_s: float,
    stages: Stages = WHOLE,
) -> GpuRunner:
    """start_s: when loading began, by the monotonic clock. stages: if `loaded` is a pipeline stage.

    Raises ProgramUnsupportedError if the model must run as modules; ValueError (naming the argument) or
    torch.OutOfMemoryError if it does not fit.
    """
    layers = _layer_groups(config, loaded, stages)
    parts = _make_parts(config, loaded, device, ops, matmul, sampling, stages, layers)
    num_blocks = _num_blocks(config, loaded, parts, stages, layers)
    caches = _caches(loaded, layers, num_blocks, config.block_size, kv_memory.kv_dtype(config, loaded.dtype, device))
    parts.program.use_caches(caches)
    host_blocks = HostBlocks.make(config, device, caches.values())
    capture_s = parts.graphs.capture(_graph_sizes(config))
    if host_blocks is not None:
        host_blocks.warm_up()
    device.trim()
    how = f"{type(ops).__name__}, {_graphs_text(parts.graphs)} in {capture_s:.1f} s"
    logger.info("%s: %d KV blocks of %d tokens, %s", device.name, num_blocks, config.block_size, how)
    info = _info(config, loaded, device, layers.groups, num_blocks, how, start_s)
    info = msgspec.structs.replace(info, kv_bytes=_kv_bytes(caches.values()), device_bytes=device.held_bytes)
    if host_blocks is not None:
        parts = dataclasses.replace(parts, host_blocks=host_blocks)
        info = msgspec.structs.replace(info, num_host_blocks=host_blocks.num_blocks)
    return GpuRunner(parts, info)


def _make_parts(
    config: EngineConfig,
    loaded: LoadedModel,
    device: Device,
    ops: Ops,
    matmul: Matmul,
    sampling: StepSampler,
    stages: Stages,
    layers: LayerGroups,
) -> RunnerParts:
    """All parts except KV memory and graphs; the program has been verified with a few blocks."""
    assert loaded.decoder is not None
    max_tokens = max(config.max_num_batched_tokens, MAX_PROBE_TOKENS)
    max_samples = max(config.max_step_samples, MAX_PROBE_TOKENS, PIECE_TOKENS)
    few, num_groups = layers.groups.count * -(-MAX_PROBE_TOKENS // config.block_size), layers.groups.count
    precise = _caches(loaded, layers, few, config.block_size, loaded.dtype)
    loras, group_of = slots_for(config, loaded), layers.group_of
    program = GpuProgram(loaded.decoder, precise, ops, max_tokens, max_samples, matmul, stages, loras, group_of)
    program.verify(loaded.checked, config.block_size)
    dtype = kv_memory.kv_dtype(config, loaded.dtype, device)
    program.use_caches(_caches(loaded, layers, few, config.block_size, dtype))
    limits = config.max_num_seqs, loaded.max_model_len, config.block_size, max_sequences(config)
    messages = StepMessages(device, *limits, sampling.max_steps_in_flight, num_groups)
    speculation = config.speculative_config
    lookup = None if speculation is None else LookupLengths.of(speculation)
    rows = DeviceRows(device.torch_device, ops, *limits, messages.max_words, max_tokens, lookup, num_groups)
    over_stages = None if stages is WHOLE else stages.max_over_stages
    graphs = StepGraphs(device, program, rows, loaded.max_model_len, over_stages)
    adapters = None if loras is None else DeviceAdapters(config, loaded, loras, device)
    return RunnerParts(device, program, rows, messages, graphs, sampling, adapters=adapters)


def _layer_groups(config: EngineConfig, loaded: LoadedModel, stages: Stages) -> LayerGroups:
    """One group for a pipeline stage, which does not know the layers of the others, and if blocks are copied to host
    memory. Raises ProgramUnsupportedError if the model must run as modules."""
    if loaded.decoder is None:
        raise ProgramUnsupportedError(loaded.why_modules)
    layers = loaded.decoder.layers
    windows = [layer.attending.options.sliding_window or 0 if stages is WHOLE else 0 for layer in layers]
    are_alike = len({loaded.layer_shapes[layer.module] for layer in layers}) == 1
    return layer_groups(windows, loaded.max_model_len, are_alike and not config.offloads_kv)


def _shapes_of_block(loaded: LoadedModel, layers: LayerGroups) -> dict[nn.Module, LayerShape]:
    """Shapes of the layers in the first group."""
    assert loaded.decoder is not None
    of_group = zip(loaded.decoder.layers, layers.group_of, strict=True)
    return {layer.module: loaded.layer_shapes[layer.module] for layer, group in of_group if group == 0}


def _caches(
    loaded: LoadedModel, layers: LayerGroups, num_blocks: int, block_size: int, dtype: torch.dtype
) -> dict[nn.Module, LayerCache]:
    """Layers at the same place in blocks of different groups share memory."""
    assert loaded.decoder is not None
    shapes = _shapes_of_block(loaded, layers)
    by_place = [*kv_memory.kv_caches(shapes, num_blocks, block_size, dtype, loaded.device).values()]
    places = zip(loaded.decoder.layers, layers.place_of, strict=True)
    return {layer.module: by_place[place] for layer, place in places}


def _kv_bytes(caches: Iterable[LayerCache]) -> int:
    """Layers may share a cache."""
    by_address = {cache.keys.data_ptr(): cache for cache in caches}
    return sum(cache.keys.nbytes + cache.values.nbytes for cache in by_address.values())


def _num_blocks(
    config: EngineConfig, loaded: LoadedModel, parts: RunnerParts, stages: Stages, layers: LayerGroups
) -> int:
    dtype = kv_memory.kv_dtype(config, loaded.dtype, parts.device)
    measured = config.num_kv_blocks is None
    for_graphs = (
        stages.max_over_stages(graph_bytes(parts.graphs, parts.device, _graph_sizes(config))) if measured else 0
    )
    parts.device.trim()
    warm_up(config, parts, _info(config, loaded, parts.device, layers.groups, 1, "", 0.0))
    shapes = _shapes_of_block(loaded, layers)
    bytes_per_block = stages.max_over_stages(kv_memory.block_bytes(shapes, config.block_size, dtype))
    limits = config, loaded.max_model_len, bytes_per_block
    return kv_memory.num_kv_blocks(*limits, parts.device.memory(), for_graphs, layers.groups)


def _graph_sizes(config: EngineConfig) -> list[Padded]:
    if config.enforce_eager:
        return []
    max_tokens, wanted, most = config.max_num_batched_tokens, config.cudagraph_capture_sizes, max_sequences(config)
    decode = ladder(min(most, max_tokens), wanted)
    mixed = mixed_ladder(max_tokens, wanted)
    kinds = (False, True) if config.enable_lora else (False,)
    steps_of_decode = [Padded(n, n, True, adapts) for adapts in kinds for n in decode]
    return steps_of_decode + [Padded(most, n, False, config.enable_lora) for n in mixed]


def _graphs_text(graphs: StepGraphs) -> str:
    decode, mixed = (", ".join(map(str, sizes)) or "none" for sizes in (graphs.decode_sizes, graphs.mixed_sizes))
    return f"graphs of decode steps ({decode} sequences) and mixed steps ({mixed} tokens; larger ones run without)"


def _info(
    config: EngineConfig,
    loaded: LoadedModel,
    device: Device,
    groups: KVGroups,
    num_blocks: int,
    how: str,
    start_s: float,
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
        path="gpu",
        kv_groups=groups,
    )


def choose(config: EngineConfig, loaded: LoadedModel, triton: bool | None = None) -> tuple[Ops, Matmul, StepSampler]:
    """triton: whether its kernels run here; None = on CUDA devices, whose torch includes it. `kernels: torch` replaces
    the kernels of the operations, not the sampler.

    Raises ProgramUnsupportedError if the model must run as modules, ValueError naming an argument.
    """
    if loaded.decoder is None:
        raise ProgramUnsupportedError(loaded.why_modules)
    if triton is None:
        triton = loaded.device.type == "cuda"
    by_kernels = triton and config.kernels != "torch"
    _check_invariance(config, by_kernels)
    ops = _triton_ops(config, loaded, loaded.decoder) if by_kernels else TorchOps()
    return ops, _matmul(config), _sampling(config, loaded, triton)


def _check_invariance(config: EngineConfig, by_kernels: bool) -> None:
    if not config.batch_invariant:
        return
    if not by_kernels:
        raise ValueError("engine argument 'batch_invariant' is true, which needs a GPU, triton and its kernels")
    if config.tensor_parallel_size > 1:  # the order of sums across devices depends on their size
        size = config.tensor_parallel_size
        raise ValueError(f"engine argument 'tensor_parallel_size' is {size}, expected 1 with batch_invariant")


def _triton_ops(config: EngineConfig, loaded: LoadedModel, decoder: Decoder) -> Ops:
    from .kernels.paged_attention import PagedAttention
    from .ops.triton_ops import TritonOps

    if loaded.device.type == "cuda" and torch.cuda.get_device_capability(loaded.device) < (8, 0):
        raise ProgramUnsupportedError("the kernels need a GPU of compute capability 8.0 or more")
    if config.block_size < 16 or config.block_size & (config.block_size - 1):
        raise ValueError(f"engine argument 'block_size' is {config.block_size}, expected a power of two from 16")
    head_dims = [loaded.layer_shapes[layer.module].key_dim for layer in decoder.layers]
    widths = [layer.attending.out.weight.k for layer in decoder.layers]
    attention = PagedAttention(
        loaded.device,
        num_heads=max(width // head_dim for width, head_dim in zip(widths, head_dims, strict=True)),
        head_dim=max(head_dims),
        max_num_seqs=max_sequences(config),
        max_seq_len=loaded.max_model_len,
        exact_chunks=config.batch_invariant,
    )
    return TritonOps(attention, exact_products=config.batch_invariant)


def _matmul(config: EngineConfig) -> Matmul:
    if not config.batch_invariant:
        return library_matmul
    from .kernels.matmul import invariant_matmul

    return invariant_matmul


def _sampling(config: EngineConfig, loaded: LoadedModel, triton: bool) -> StepSampler:
    limits = config.max_num_seqs, loaded.vocab_size, loaded.eos_token_ids
    if not triton:
        return HostSampling(*limits)
    from .device_sampler import DeviceSampler

    return DeviceSampler(*limits, loaded.device, max_sequences(config))


_SIZES = 1, 17, 65, 257
"""Numbers of tokens and of samples at which products may be compiled with a different tile (kernels/matmul.py)."""


def warm_up(config: EngineConfig, parts: RunnerParts, info: ModelInfo) -> None:
    """The memory used counts as used afterwards (Device.memory). Raises torch.OutOfMemoryError."""
    runner = GpuRunner(parts, info)
    if parts.adapters is not None:
        parts.messages.expect_adapters()
    for step in (_largest(config, info.max_model_len), *_kinds(config, info.max_model_len)):
        _run(runner, config, step)


def run_largest(runner: Runner, config: EngineConfig) -> None:
    """Runs only the largest step. Raises torch.OutOfMemoryError."""
    _run(runner, config, _largest(config, runner.info.max_model_len))


class _Step(NamedTuple):
    counts: Int32Array
    """Tokens of each row."""
    drafts: Int32Array
    """How many of them are drafts."""
    length: int
    """Of every row, drafts included."""


def _largest(config: EngineConfig, max_model_len: int) -> _Step:
    """The maximum tokens and samples of a step."""
    num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    counts = np.clip(_shares(config.max_num_batched_tokens, num_rows), 1, max(max_model_len - 1, 1))
    drafts = np.minimum(_shares(max_sequences(config) - num_rows, num_rows), counts - 1)
    return _Step(counts, drafts, int(counts.max()))


def _kinds(config: EngineConfig, max_model_len: int) -> Iterator[_Step]:
    """For each size, a step of decoded tokens and drafts, and one with the end of a prompt, with as many keys as
    possible. (The sampled token takes a separate position.)"""
    length = max_model_len - 1
    for size in _SIZES:
        decoded = _shares(size, min(size, config.max_num_seqs))
        if size <= min(max_sequences(config), config.max_num_batched_tokens) and int(decoded.max()) <= length:
            yield _Step(decoded, decoded - 1, length)
        if size < min(config.max_num_batched_tokens, length):
            yield _Step(np.array([size + 1], np.int32), np.zeros(1, np.int32), length)


def _shares(total: int, count: int) -> Int32Array:
    """`total` split into `count` parts, larger ones first."""
    shares: Int32Array = total // count + (np.arange(count, dtype=np.int32) < total % count).astype(np.int32)
    return shares


def _run(runner: Runner, config: EngineConfig, step: _Step) -> None:
    num_rows = len(step.counts)
    table = RowTable(num_rows, step.length, config.block_size, runner.info.kv_groups.count)
    table.num_tokens[:] = step.length - step.drafts
    table.num_computed_tokens[:] = step.length - step.counts
    drafts = step.drafts if step.drafts.any() else None
    rows = np.arange(num_rows, dtype=np.int32)
    runner.execute(StepPlan(rows, step.counts, np.ones(num_rows, np.bool_), drafts), table)


_COPIES = 4
"""Bytes that attention copies per byte of a layer's KV read in a step: the rows' blocks, padded by up to a third, once
in the model's dtype and once in float32."""


def num_module_blocks(config: EngineConfig, loaded: LoadedModel, device: Device, trial: Runner) -> int:
    """trial: the model with one KV block. Raises ValueError if a sequence of max_model_len tokens does not fit,
    torch.OutOfMemoryError if the largest step does not."""
    device.trim()
    run_largest(trial, config)
    device.synchronize()
    layers = loaded.layer_shapes
    with_copies = block_bytes(layers, config.block_size, loaded.dtype) * (len(layers) + _COPIES) // len(layers)
    num_blocks = num_kv_blocks(config, loaded.max_model_len, with_copies, device.memory(), 0)
    # No more than all rows use at full length.
    return min(num_blocks, config.max_num_seqs * -(-loaded.max_model_len // config.block_size))
