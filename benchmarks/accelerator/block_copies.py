"""Copies KV blocks to host memory and back: checks the bits, and compares the speed with one large copy.

    python -m benchmarks.accelerator.block_copies --shape llama-3.1-8b --device cuda --json FILE --scratch FOLDER

For kv_offloading_size (device_kv_memory.py). Independent of the blocks' content. Invariants: blocks of all layers, at
random places of the device, to neighbours on the host; the device's memory is overwritten before blocks are copied
back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .engines import ENGINE
from .section import Section, run_alone
from .shapes import SHAPES, Shape

NUM_BLOCKS, FEW_BLOCKS = 512, 4
"""2 GiB of the 8B shape."""
RUNS = 3


def measure(section: Section) -> None:
    import numpy as np
    import torch

    from llmbackend.engine.gpu.device_kv_memory import HostBlocks
    from llmbackend.engine.step import KVCopies

    shape, device = SHAPES[section.shape], _device(section)
    count = NUM_BLOCKS if section.on_gpu else FEW_BLOCKS
    caches = _caches(shape, count, device.torch_device)
    parts = [part for cache in caches for part in (cache.keys, cache.values)]
    host = HostBlocks(device, caches, count)
    blocks = torch.randperm(count, generator=torch.Generator().manual_seed(0)).numpy().astype(np.int32)
    there, back = (KVCopies(to_host, blocks, np.arange(count, dtype=np.int32)) for to_host in (True, False))
    before, num_bytes = [part.clone() for part in parts], sum(part.nbytes for part in parts)
    for name, copies in (("to the host", there), ("to the device", back)):
        seconds = _seconds(device, partial(host.copy, copies))
        section.add(measure="copy", case=name, num_bytes=num_bytes, bytes_per_s=num_bytes / seconds)
        if copies.to_host:
            for part in parts:
                part.fill_(0)
    different = sum(not torch.equal(part, old) for part, old in zip(parts, before, strict=True))
    section.add(measure="block bits", case="there and back", parts=len(parts), different=different)
    _plain(section, device)
    section.fail([f"{different} of {len(parts)} parts of KV memory came back with other bits"] if different else [])


def _plain(section: Section, device: Any) -> None:
    """One copy of one piece of memory, the most that the bus gives."""
    import torch

    size = (1 << 30) if section.on_gpu else (1 << 20)
    here, there = torch.zeros(size, dtype=torch.uint8, device=device.torch_device), device.pinned(size, torch.uint8)
    for name, target, source in (("one piece to the host", there, here), ("one piece to the device", here, there)):
        copy = partial(target.copy_, source, non_blocking=True)
        seconds = _seconds(device, partial(device.enqueue, copy))
        section.add(measure="copy", case=name, num_bytes=size, bytes_per_s=size / seconds)


def _device(section: Section) -> Any:
    import torch

    from llmbackend.engine.gpu.device import CpuDevice, CudaDevice

    return CudaDevice(torch.device(section.device)) if section.on_gpu else CpuDevice()


def _caches(shape: Shape, num_blocks: int, device: Any) -> list[Any]:
    import torch

    from llmbackend.engine.gpu.ops.ops import LayerCache

    sizes = num_blocks, shape.num_kv_heads, ENGINE["block_size"], shape.head_dim
    random = torch.Generator(device).manual_seed(0)
    layers = range(shape.num_layers)
    drawn = [[torch.randn(sizes, generator=random, device=device).bfloat16() for _ in "kv"] for _ in layers]
    return [LayerCache(keys, values) for keys, values in drawn]


def _seconds(device: Any, copy: Callable[[], object]) -> float:
    """The fastest of some runs."""
    found = []
    for _ in range(RUNS):
        device.synchronize()
        start_s = time.perf_counter()
        copy()
        device.synchronize()
        found.append(time.perf_counter() - start_s)
    return min(found)


if __name__ == "__main__":
    run_alone("block_copies", measure)
