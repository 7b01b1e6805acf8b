"""Multi-head latent attention of a native program as data.

Used by packed_decoder.py. Invariant: inconsistent parts raise ValueError in the checks here.
"""

from __future__ import annotations

import msgspec

from ..kernels.expert_layout import Steps, steps_of, steps_of_rows
from .packed_parts import TYPE_OF, MatrixAt, PackedNorm, PackedProjection, check_norm, check_projection, expect


class PackedLatent(msgspec.Struct, frozen=True, kw_only=True):
    """All heads read one key per token, [rotary part | latent], whose latent is also the value. A head's query is
    [rotary part | up·rest], its output down·(weighted latents)."""

    q_down: PackedProjection | None
    """Queries are q(q_norm(q_down(x))), or without it, q(x)."""
    q_norm: PackedNorm | None
    q: PackedProjection
    """[heads * (rest + rotary part), …]"""
    norm: PackedNorm
    up: MatrixAt
    """[latent, rest], of head 0; the others follow."""
    down: MatrixAt
    """[value_dim, latent], of head 0: the last of a head's rest + value_dim rows; the others follow."""

    @property
    def rank(self) -> int:
        """Dimension of a latent."""
        return self.up.n

    @property
    def up_steps(self) -> Steps:
        """Strides in bytes between the parts of consecutive heads."""
        return steps_of(self.rank, self.up.k, TYPE_OF[self.up.dtype])

    @property
    def down_steps(self) -> Steps:
        return steps_of_rows(self.up.k + self.down.n, self.rank, TYPE_OF[self.down.dtype])

    @property
    def inputs(self) -> tuple[tuple[PackedProjection, ...], ...]:
        """Of queries, grouped by input; the first input is also that of keys."""
        return ((self.q,),) if self.q_down is None else ((self.q_down,), (self.q,))


def check_latent(latent: PackedLatent, head_dim: int, num_heads: int, width: int) -> None:
    """Raises ValueError if parts are inconsistent. head_dim: of keys."""
    rank, rest, value_dim = latent.rank, latent.up.k, latent.down.n
    rotary_dim = head_dim - rank
    expect(rotary_dim > 0 and all(size % 32 == 0 for size in (rank, rest, value_dim, rotary_dim)), "attention")
    q_width = width if latent.q_down is None else latent.q_down.weight.n
    if latent.q_down is not None:
        check_projection(latent.q_down, q_width, width)
    expect((latent.q_down is None) == (latent.q_norm is None), "attention")
    check_norm(latent.q_norm, (q_width,))
    check_projection(latent.q, num_heads * (rest + rotary_dim), q_width)
    check_norm(latent.norm, (rank,))
    check_projection(PackedProjection(latent.up, None), rank, rest)
    check_projection(PackedProjection(latent.down, None), value_dim, rank)
