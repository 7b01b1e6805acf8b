"""Launches of attention and of the batch-invariant product in the shapes of real models, to be compiled: see
compile_kernels.py."""

from __future__ import annotations

import torch

from llmbackend.engine.gpu.kernels.matmul import invariant_matmul
from llmbackend.engine.gpu.kernels.paged_attention import PagedAttention
from llmbackend.engine.gpu.ops.ops import AttendSpec, LayerCache, StepLayout

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TOKENS, BLOCK_SIZE = 8, 32
LLAMA = AttendSpec(32, 8, 128, 0.1, 0, 0.0, None)
GEMMA = AttendSpec(16, 8, 256, 0.1, 4096, 50.0, None)
GPT_OSS = AttendSpec(64, 8, 64, 0.1, 128, 0.0, torch.zeros(64))
MOST_SEQS = 1024


def launch_plain(_capability: int) -> None:
    launch(LLAMA)


def launch_wide(capability: int) -> None:
    """Heads of 256, a window, a soft cap and, where there is one, a float8 cache."""
    launch(GEMMA, cache_dtype=FP8 if capability >= 89 else BF16)


def decode_16_bits(_capability: int) -> None:
    """Decode steps of many sequences, with keys and values of 16 bits."""
    for spec in (LLAMA, GEMMA, GPT_OSS):
        launch(spec, max_num_seqs=MOST_SEQS, max_query_len=1)


def decode_8_bits(_capability: int) -> None:
    for spec in (LLAMA, GEMMA, GPT_OSS):
        launch(spec, FP8, max_num_seqs=MOST_SEQS, max_query_len=1)


def launch_exact(_capability: int) -> None:
    launch(LLAMA, exact_chunks=True)


def launch_products(_capability: int) -> None:
    """Of few rows, more and many."""
    weight, bias = torch.zeros(160, 512, dtype=BF16), torch.zeros(160, dtype=BF16)
    for num_rows in (1, 200, 300):
        x = torch.zeros(num_rows, 512, dtype=BF16)
        invariant_matmul(x, weight, bias, torch.zeros(num_rows, 160, dtype=BF16))


def launch(
    spec: AttendSpec,
    cache_dtype: torch.dtype = BF16,
    exact_chunks: bool = False,
    max_num_seqs: int = 4,
    max_query_len: int = 5,
) -> None:
    """On a device of one multiprocessor. By default a mixed step: all three kernels."""
    width, kv_width = spec.num_heads * spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim
    ints = torch.zeros(TOKENS, dtype=torch.int32)
    layout = StepLayout(ints[:3], ints[:4], ints[:3], ints, ints, ints, ints, max_query_len, 1000)
    memory = torch.zeros(2, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim).to(cache_dtype)
    attention = PagedAttention(
        torch.device("cpu"),
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        max_num_seqs=max_num_seqs,
        max_seq_len=1024,
        exact_chunks=exact_chunks,
        num_multiprocessors=1,
    )
    attention.attend(
        torch.zeros(TOKENS, width + kv_width, dtype=BF16),
        layout,
        torch.zeros(4, 32, dtype=torch.int32),
        spec,
        LayerCache(memory, memory.clone()),
        torch.zeros(TOKENS, width, dtype=BF16),
    )
