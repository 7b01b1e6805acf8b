"""Buffers of a program for mixtures of experts, and the operations that need only these.

Used by cpu/decoder_program.py. Invariant: all layers use the same buffers, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ..kernels.expert_layout import Pairs
from ..kernels.library import KernelLibrary
from ..kernels.operations import Kind, MixOp, RouteOp, Type
from .buffers import Buffer
from .packed_decoder import PackedExperts

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
