"""Launches of the kernels of LoRA adapters, in the shapes of real models, to be compiled: see compile_kernels.py."""

from __future__ import annotations

import torch

from llmbackend.engine.gpu.lora import LoraSlots
from llmbackend.engine.gpu.ops.ops import LoraScratch
from llmbackend.engine.gpu.ops.triton_ops import TritonOps

_CASES = ((8, 4096, (4096, 1024, 1024)), (64, 14336, (4096,)), (256, 896, (4864, 4864)))
"""Largest rank, columns of the input, and of each part of the output."""


def launch_loras(_capability: int) -> None:
    for max_rank, k, widths in _CASES:
        slots = LoraSlots(2, max_rank, torch.bfloat16, torch.device("cpu"))
        spec = slots.for_product([(torch.nn.Identity(), width) for width in widths], k)
        scratch, adapters, ops = LoraScratch.of(2, [spec]), torch.zeros(2, dtype=torch.int32), TritonOps()
        ops.group_by_adapter(adapters, scratch)
        x, out = torch.zeros(2, k, dtype=torch.bfloat16), torch.zeros(2, sum(widths), dtype=torch.bfloat16)
        ops.add_loras(x, adapters, spec, scratch, out)
