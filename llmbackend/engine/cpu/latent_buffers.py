"""Buffers of a program for multi-head latent attention, and the operations that need only these.

Used by cpu/decoder_program.py. Invariant: all layers use the same buffers, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..kernels.expert_layout import ExpertMatrix, heads_op
from ..kernels.library import KernelLibrary
from ..kernels.operations import HeadsOp, Type
from .buffers import Buffer
from .packed_decoder import Memories, PackedAttention
from .packed_latent import PackedLatent
from .packed_parts import TYPE_OF, MatrixAt


class LatentBuffers:
    def __init__(
        self, library: KernelLibrary, tokens: int, attentions: Sequence[PackedAttention], activation: Type
    ) -> None:
        """tokens: of the largest step. attentions: those with latent attention. Raises MemoryError."""
        shapes = [(each.num_heads, each.latent) for each in attentions if each.latent is not None]
        compressed = max(0 if each.q_down is None else each.q_down.weight.n for _, each in shapes)
        self.compressed = Buffer(library, tokens, compressed, Type.FLOAT32)
        self.normed = Buffer(library, tokens, compressed, activation)
        self.queries = Buffer(library, tokens, max(each.q.weight.n for _, each in shapes), Type.FLOAT32)
        self.weighted = Buffer(library, tokens, max(heads * each.rank for heads, each in shapes), Type.FLOAT32)
        """Weighted sums of latents, per head."""

    def up_op(self, attention: PackedAttention, latent: PackedLatent, memories: Memories, y: Buffer) -> HeadsOp:
        """From `queries` to the latent parts of the queries that attention reads, each after its rotary part."""
        rotary_dim = attention.head_dim - latent.rank
        x = (self.queries.address, self.queries.stride, latent.up.k + rotary_dim)
        to = (y.address + 4 * rotary_dim, y.stride, attention.head_dim)
        return heads_op(attention.num_heads, _matrix(latent.up, memories), latent.up_steps, x, to, y.type)

    def down_op(self, attention: PackedAttention, latent: PackedLatent, memories: Memories, y: Buffer) -> HeadsOp:
        """From `weighted` to the heads' outputs."""
        x = (self.weighted.address, self.weighted.stride, latent.rank)
        to = (y.address, y.stride, latent.down.n)
        return heads_op(attention.num_heads, _matrix(latent.down, memories), latent.down_steps, x, to, y.type)


def _matrix(matrix: MatrixAt, memories: Memories) -> ExpertMatrix:
    panels, scale, sums = memories.matrix_addresses(matrix)
    assert panels is not None, "a matrix has panels"
    return ExpertMatrix(panels, scale, sums, matrix.n, matrix.k, TYPE_OF[matrix.dtype], None)
