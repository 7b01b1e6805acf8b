"""Launches of the kernels of experts, in the shapes of real models, to be compiled: see compile_kernels.py."""

from __future__ import annotations

import torch

from llmbackend.engine.gpu.ops import ExpertRoom, ExpertSpec
from llmbackend.engine.gpu.triton_ops import TritonOps


def launch_experts(_capability: int) -> None:
    for count, num_experts, top_k in ((2, 128, 8), (512, 8, 2)):
        width, inner = 64, 64  # strides of 64 are as aligned as any
        gate_up = torch.zeros(num_experts, 2 * inner, width, dtype=torch.bfloat16)
        down = torch.zeros(num_experts, width, inner, dtype=torch.bfloat16)
        spec = ExpertSpec(gate_up, down, top_k, True)
        x = torch.zeros(count, width, dtype=torch.bfloat16)
        logits = torch.zeros(count, num_experts, dtype=torch.bfloat16)
        TritonOps().mix_experts(x, logits, spec, "silu", ExpertRoom.of(count, [spec]), torch.empty_like(x))
