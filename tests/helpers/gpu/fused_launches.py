"""Launches of the fused kernels in the shapes of real models, to be compiled: see compile_kernels.py."""

from __future__ import annotations

import torch

from llmbackend.engine.gpu.kernels.fused import BlockMoves
from llmbackend.engine.gpu.ops.ops import LayerCache, Norm, RotarySpec, StepLayout
from llmbackend.engine.gpu.ops.triton_ops import TritonOps
from llmbackend.engine.gpu.row_messages import NUM_FIELDS
from llmbackend.engine.step import LookupLengths

BF16 = torch.bfloat16
TOKENS = 2


def launch_operations(_capability: int) -> None:
    for width in (896, 4096, 8192):
        _launch_for(width)
    for head_dim, rotary_dim, whole, cache_dtype in (
        (64, 64, False, BF16),
        (128, 128, False, torch.float8_e4m3fn),
        (128, 128, True, BF16),
        (96, 48, False, BF16),
        (256, 0, False, torch.float16),
    ):
        _launch_rotary(head_dim, rotary_dim, whole, cache_dtype)
    ints, table = torch.zeros(TOKENS, dtype=torch.int32), torch.zeros((TOKENS, 32), dtype=torch.int32)
    TritonOps().step_inputs(ints, ints, ints, table, table, 16, ints, ints, ints, ints, ints)
    TritonOps().put_tokens(ints, ints, ints, table)
    block = torch.zeros(4, 32768, dtype=torch.uint8)
    BlockMoves([block], [0, 32768], block).gather([0])


def launch_drafts(_capability: int) -> None:
    drafted = torch.zeros((NUM_FIELDS, TOKENS), dtype=torch.int32)
    ints, table = torch.zeros(TOKENS, dtype=torch.int32), torch.zeros((TOKENS, 131072), dtype=torch.int32)
    for longest in (1, 3):
        TritonOps().begin_drafts(drafted, LookupLengths(1, longest), table, ints, ints, ints)
    TritonOps().accept_drafts(drafted, ints, table, ints, ints)


def _launch_for(width: int) -> None:
    ops, ints = TritonOps(), torch.zeros(TOKENS, dtype=torch.int32)
    residual, block = torch.zeros(TOKENS, width), torch.zeros(TOKENS, width, dtype=BF16)
    norm = Norm(torch.zeros(width), 1e-5)
    ops.embed(ints, block, 1.0, residual)
    ops.residual_norm(residual, block, None, 1.0, norm, block)
    ops.residual_norm(residual, block, norm, 1.0, norm, block)
    ops.residual_norm(residual, None, None, 1.0, norm, block, ints)
    ops.gate(torch.zeros(TOKENS, 2 * width, dtype=BF16), "silu", block)
    ops.gate(torch.zeros(TOKENS, 2 * width, dtype=BF16), "gelu_tanh", block)


def _launch_rotary(head_dim: int, rotary_dim: int, whole: bool, cache_dtype: torch.dtype) -> None:
    num_heads, num_kv_heads = 32, 8
    ints = torch.zeros(TOKENS, dtype=torch.int32)
    layout = StepLayout(ints, ints, ints, ints, ints, ints, ints, 1, 1)
    memory = torch.zeros(4, num_kv_heads, 16, head_dim).to(cache_dtype)
    q_norm = Norm(torch.zeros(num_heads * head_dim if whole else head_dim), 1e-6)
    k_norm = Norm(torch.zeros(num_kv_heads * head_dim if whole else head_dim), 1e-6)
    cos_sin = torch.zeros(8, rotary_dim) if rotary_dim else None
    qkv = torch.zeros(TOKENS, (num_heads + 2 * num_kv_heads) * head_dim, dtype=BF16)
    for has_norm in (True, False):
        norms = (q_norm, k_norm) if has_norm else (None, None)
        spec = RotarySpec(num_heads, num_kv_heads, head_dim, norms[0], norms[1], whole, cos_sin)
        TritonOps().rotary_and_write(qkv, layout, spec, LayerCache(memory, memory.clone()))
