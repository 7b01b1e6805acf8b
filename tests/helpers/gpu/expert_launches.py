"""Launches of the kernels of experts, in the shapes of real models, to be compiled: see compile_kernels.py."""

from __future__ import annotations

import torch

from llmbackend.engine.gpu.ops.ops import Activation, ExpertScratch, ExpertSpec
from llmbackend.engine.gpu.ops.triton_ops import TritonOps
from llmbackend.engine.gpu.weights.experts import DenseExperts, ExpertProjection, Int4Experts
from llmbackend.engine.gpu.weights.int4 import Int4Weight


def launch_experts(_capability: int) -> None:
    for count, num_experts, top_k in ((2, 128, 8), (512, 8, 2)):
        _mix(count, num_experts, top_k, "silu", is_transposed=False, has_bias=False)
        _mix(count, num_experts, top_k, "swigluoai", is_transposed=True, has_bias=True)


def launch_packed_experts(_capability: int) -> None:
    """In mxfp4, and in whole numbers of 4 bits with zeros in groups of 128."""
    for count in (2, 512):
        for is_float in (True, False):
            _mix_packed(count, is_float)


def _mix_packed(count: int, is_float: bool) -> None:
    num_experts, top_k, width = 32, 4, 256

    def projection(n: int, k: int) -> ExpertProjection:
        size = 32 if is_float else 128
        numbers, groups = torch.zeros(num_experts * n, k, dtype=torch.uint8), torch.zeros(num_experts * n, k // size)
        zero = None if is_float else groups.to(torch.uint8)
        weight = Int4Weight.of(
            numbers, groups.to(torch.uint8 if is_float else torch.float16), zero, size, False, is_float
        )
        return ExpertProjection(Int4Experts(weight, num_experts), torch.zeros(num_experts, n, dtype=torch.bfloat16))

    _launch(ExpertSpec(projection(2 * width, width), projection(width, width), top_k, True), count, "swigluoai")


def _mix(count: int, num_experts: int, top_k: int, activation: Activation, is_transposed: bool, has_bias: bool) -> None:
    width, inner = 64, 64  # strides of 64 are as aligned as any

    def projection(n: int, k: int) -> ExpertProjection:
        shape = (num_experts, k, n) if is_transposed else (num_experts, n, k)
        weight = torch.zeros(shape, dtype=torch.bfloat16)
        bias = torch.zeros(num_experts, n, dtype=torch.bfloat16) if has_bias else None
        return ExpertProjection(DenseExperts(weight.transpose(1, 2) if is_transposed else weight), bias)

    spec = ExpertSpec(projection(2 * inner, width), projection(width, inner), top_k, True)
    _launch(spec, count, activation)


def _launch(spec: ExpertSpec, count: int, activation: Activation) -> None:
    x = torch.zeros(count, spec.down.weight.n, dtype=torch.bfloat16)
    logits = torch.zeros(count, spec.num_experts, dtype=torch.bfloat16)
    scratch = ExpertScratch.of(count, [spec], x.dtype, x.device)
    TritonOps().mix_experts(x, logits, spec, activation, scratch, torch.empty_like(x))
