"""Buffers of a native program: rows of activations in native memory, those of latent attention and of mixtures of
experts, and the operations that need only these.

Used by cpu/decoder_program.py and the modules of its operations. Invariants: memory is zeroed, and committed only when
first written; all layers use the same buffers, one after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..kernels.expert_layout import ExpertMatrix, Pairs, heads_op
from ..kernels.library import KernelLibrary
from ..kernels.operations import HeadsOp, Kind, MixOp, RouteOp, Type
from .packed_decoder import Memories, PackedAttention, PackedExperts
from .packed_latent import PackedLatent
from .packed_parts import TYPE_OF, MatrixAt

Float32Array = npt.NDArray[np.float32]

# Rows a multiple of 4 KiB apart would compete for the same few sets of the L1 cache.
_ROW_PADDING: Final = 16
_TILE_ROWS: Final = 16
_TILE_COLUMNS: Final = 32


class Buffer:
    """Rows of float32 or bfloat16 in native memory, or tiles of bfloat16."""

    def __init__(self, library: KernelLibrary, rows: int, width: int, kind: Type) -> None:
        self.stride = -(-width // 16) * 16 + _ROW_PADDING
        if kind is Type.BFLOAT16_TILES:
            self.stride = -(-width // _TILE_COLUMNS) * _TILE_COLUMNS
            rows = -(-rows // _TILE_ROWS) * _TILE_ROWS
        self.type = kind
        self._memory = library.memory(rows * self.stride * (4 if kind is Type.FLOAT32 else 2))
        self.address = int(self._memory.ctypes.data)

    def from_column(self, column: int) -> Buffer:
        """The columns from this one on; float32 only."""
        part = copy.copy(self)
        part.address += 4 * column
        return part

    def floats(self, rows: int, width: int) -> Float32Array:
        """The first rows of a float32 buffer."""
        return self._memory.view(np.float32).reshape(-1, self.stride)[:rows, :width]


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


_SCORES: Final = {"softmax": 0, "sigmoid": 1}


class ExpertBuffers:
    def __init__(self, library: KernelLibrary, tokens: int, mixtures: Sequence[PackedExperts]) -> None:
        """tokens: of the largest step. mixtures: of all layers that have one. Raises MemoryError."""
        experts = max(each.count for each in mixtures)
        top_k = max(each.top_k for each in mixtures)
        width = mixtures[0].down.first.n
        inner = max(each.down.first.k for each in mixtures)

        def rows(count: int, columns: int) -> Buffer:
            return Buffer(library, count, columns, Type.FLOAT32)

        self.normed = rows(tokens, width)
        self.logits = rows(tokens, experts)
        self.gated = rows(tokens * top_k, inner)
        """Indexed by places, like `mixed`."""
        self.mixed = rows(tokens * top_k, width)
        self.shared = rows(tokens, width)
        self.shared_gate = rows(tokens, 1)
        self._memories = [library.memory(4 * count) for count in (*[tokens * top_k] * 3, experts + 1)]
        self._shares, self._chosen, self._places, self._first = (int(each.ctypes.data) for each in self._memories)

    def pairs(self, experts: PackedExperts) -> Pairs:
        return Pairs(experts.count, experts.top_k, self._first, self._places)

    def route_op(self, experts: PackedExperts, correction: int | None) -> RouteOp:
        """Reads `logits`. correction: its address."""
        return RouteOp(
            kind=Kind.ROUTE, scores=_SCORES[experts.scores], logits=self.logits.address, correction=correction,
            shares=self._shares, chosen=self._chosen, places=self._places, first=self._first,
            stride=self.logits.stride, num_experts=experts.count, top_k=experts.top_k, groups=experts.groups,
            top_groups=experts.top_groups, renormalises=experts.renormalises, factor=experts.factor,
            epsilon=experts.epsilon, of_group=experts.of_group,
        )  # fmt: skip

    def mix_op(self, experts: PackedExperts, has_shared: bool, width: int) -> MixOp:
        """The sum of `mixed`, and of `shared` if there is a shared expert; the caller sets the destination."""
        shared: dict[str, Any] = {}
        if has_shared:
            shared = {"shared": self.shared.address, "shared_stride": self.shared.stride}
        if experts.shared_gate is not None:
            shared |= {"shared_gate": self.shared_gate.address, "gate_stride": self.shared_gate.stride}
        return MixOp(
            kind=Kind.MIX, top_k=experts.top_k, mixed=self.mixed.address, places=self._places, shares=self._shares,
            mixed_stride=self.mixed.stride, width=width, **shared,
        )  # fmt: skip
