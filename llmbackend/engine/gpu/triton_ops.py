"""The operations of the decoder program as Triton kernels, one launch each.

For: the program, on a GPU; and tests, under Triton's interpreter. Does not know: models, requests, graphs. Invariants:
those of `Ops`; a step without tokens launches nothing.
"""

from __future__ import annotations

import torch

from .kernels import activation as activation_kernels
from .kernels import embedding as embedding_kernels
from .kernels import norm as norm_kernels
from .kernels import rotary as rotary_kernels
from .kernels import row_tables
from .kernels.paged_attention import PagedAttention
from .ops import Activation, AttendSpec, LayerCache, NormSpec, RotarySpec, StepLayout


class TritonOps:
    """Implements `Ops`. The last dimension of every tensor is contiguous. attention: for `attend`, with room for the
    model's largest step; None where only the others are wanted."""

    def __init__(self, attention: PagedAttention | None = None) -> None:
        self._attention = attention

    def embed(self, token_ids: torch.Tensor, embedding: torch.Tensor, factor: float, residual: torch.Tensor) -> None:
        if len(token_ids):
            embedding_kernels.embed(token_ids, embedding, factor, residual)

    def residual_norm(
        self,
        residual: torch.Tensor,
        block: torch.Tensor | None,
        block_norm: NormSpec | None,
        factor: float,
        norm: NormSpec | None,
        out: torch.Tensor | None,
        tokens: torch.Tensor | None = None,
    ) -> None:
        if len(residual if tokens is None else tokens):
            norm_kernels.residual_norm(residual, block, block_norm, factor, norm, out, tokens)

    def rotary_and_write(self, qkv: torch.Tensor, layout: StepLayout, spec: RotarySpec, cache: LayerCache) -> None:
        if len(qkv):
            rotary_kernels.rotary_and_write(qkv, layout, spec, cache)

    def attend(
        self,
        qkv: torch.Tensor,
        layout: StepLayout,
        block_table: torch.Tensor,
        spec: AttendSpec,
        cache: LayerCache,
        out: torch.Tensor,
    ) -> None:
        if self._attention is None:
            raise RuntimeError("these operations were made without attention")
        if len(qkv):
            self._attention.attend(qkv, layout, block_table, spec, cache, out)

    def gate(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        if len(out):
            activation_kernels.gate(gate_up, activation == "gelu_tanh", out)

    def next_inputs(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        token_table: torch.Tensor,
        block_table: torch.Tensor,
        block_size: int,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        row_tables.next_inputs(rows, seq_lens, token_table, block_table, block_size, token_ids, positions, slots)

    def put_tokens(
        self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, token_table: torch.Tensor
    ) -> None:
        if len(rows):
            row_tables.put_tokens(rows, positions, token_ids, token_table)
