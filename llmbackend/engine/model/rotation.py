"""How an attention module rotates its heads: tables of cosines and sines, and which numbers of a head form pairs.

Used by decoder_description.py. The module is called with projections that return known numbers, and the queries and
keys that it passes to attention are compared with those of each known scheme. Invariants: modules are unchanged
afterwards; an unknown scheme raises ProgramUnsupportedError.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch import nn

from ..attention.interface import AttentionOptions, active_context
from ..errors import ProgramUnsupportedError
from ..gpu.ops.ops import Norm
from .recognition import normalised

_PROBE_POSITIONS: Final = (0, 1, 2, 5)
"""Others are added in the middle and at the end."""
_LARGE: Final = 100.0
"""Large enough to reveal a bound on queries and keys."""


Embeddings = tuple[torch.Tensor, torch.Tensor] | torch.Tensor
"""Cosines and sines, or both as complex numbers."""
QueryScale = Callable[[torch.Tensor], torch.Tensor]
"""Factors on queries, by position."""
GateFunction = Literal["sigmoid", "softplus"]
GATES: Final = ("gate_proj", "g_proj")
"""Possible names of the projection that yields the gates of heads' outputs."""
_GATE_FUNCTIONS: Final[Mapping[GateFunction, Callable[[torch.Tensor], torch.Tensor]]] = {
    "sigmoid": torch.sigmoid, "softplus": nn.functional.softplus,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Heads:
    """What an attention module computes queries and keys from."""

    outputs: Mapping[str, int]
    """Numbers of outputs of its projections, by name: query, key and value in this order, then the projection after
    attention."""
    dim: int
    num_kv_heads: int
    q_norm: Norm | None
    k_norm: Norm | None
    norm_whole: bool
    gates: Mapping[str, int] = field(default_factory=dict)
    """The same for the projection that yields the gates of heads' outputs, if there is one."""


@dataclass(frozen=True, slots=True)
class Rotation:
    cos_sin: torch.Tensor | None
    """float32 [max_model_len, rotary_dim]: cosines of each pair, then sines; None = no rotation."""
    q_cos_sin: torch.Tensor | None = None
    """For queries, if theirs differ."""
    pairs: bool = False
    """Whether numbers 2i and 2i + 1 of a head rotate together, instead of i and i + rotary_dim / 2."""
    norm_last: bool = False
    """Whether heads are normalised after the rotation."""


class Rotations:
    """Cosines and sines of all positions, computed once per kind of layer by a copy of the module on the CPU. A GPU may
    be configured to round the factors of products (TF32), which would lose the fraction of angles in the thousands."""

    def __init__(
        self, rotary: Any, max_model_len: int, device: torch.device, kinds: Sequence[str] = (),
        query_scale: QueryScale | None = None,
    ) -> None:  # fmt: skip
        """kinds: of the layers, if the module has a table for each. query_scale: a scaling that attention may apply."""
        self._rotary = copy.deepcopy(rotary).cpu()
        self._device = device
        self._length = max_model_len
        self._query_scale = query_scale
        by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
        self._kinds: Sequence[str] | None = kinds if by_kind else None
        self._tables: dict[str | None, torch.Tensor] = {}
        self._scaled_tables: dict[str | None, torch.Tensor] = {}
        if by_kind and not kinds:
            raise ProgramUnsupportedError(
                f"{type(rotary).__name__} has a table per layer type, but the config states no layer types"
            )

    def of(self, layer: int, attention: nn.Module, heads: Heads) -> Rotation:
        """Raises ProgramUnsupportedError."""
        kind = self.kind_of(layer)
        positions = self._probe_positions()
        rows = positions.to(self._device)
        given = _probe(attention, heads, rows, self._given(positions, kind)).heads
        for rotation in self._known(kind, heads):
            if all(_is_near(*each) for each in zip(given, _expected(heads, rotation, rows), strict=True)):
                return rotation
        raise ProgramUnsupportedError(f"{type(attention).__name__} rotates its heads in an unknown way")

    def kind_of(self, layer: int) -> str | None:
        """Type of the layer's table; None = all layers share one."""
        return None if self._kinds is None else self._kinds[layer]

    def gate_function(self, layer: int, attention: nn.Module, heads: Heads) -> GateFunction:
        """The function of the gates on heads' outputs. Raises ProgramUnsupportedError."""
        positions = self._probe_positions()[:1]
        probed = _probe(attention, heads, positions.to(self._device), self._given(positions, self.kind_of(layer)))
        gates = _raw_gates(sum(heads.gates.values()), self._device)
        for name, function in _GATE_FUNCTIONS.items():
            expected = function(gates).repeat_interleave(probed.gated.shape[-1] // len(gates))
            if torch.allclose(probed.gated.flatten(), expected, atol=1e-2):
                return name
        raise ProgramUnsupportedError(f"{type(attention).__name__} has gates of an unknown kind")

    def of_latent(
        self, layer: int, attention: nn.Module, outputs: Mapping[str, int], q: str, kept: str, rotary_dim: int
    ) -> Rotation:
        """For latent attention: the last `rotary_dim` numbers of each head, and of the output of the projection `kept`,
        are rotated. Compares products of queries and keys, which may be permuted. outputs: as in `Heads`; q: the
        projection of queries. Raises ProgramUnsupportedError."""
        kind = self.kind_of(layer)
        positions = self._probe_positions()
        rows = positions.to(self._device)
        heads = Heads(outputs, rotary_dim, 1, None, None, False)
        probed = _probe(attention, heads, rows, self._given(positions, kind))
        queries, keys = (each[..., -rotary_dim:] for each in probed.heads)
        names, raw = list(outputs)[:-1], _raw(heads, rows.device)
        numbers = dict(zip(names, torch.split(raw, [outputs[name] for name in names]), strict=True))
        raw_q = numbers[q].view(queries.shape[1], -1)[:, -rotary_dim:].expand(len(rows), -1, -1)
        raw_k = numbers[kept][-rotary_dim:].expand(len(rows), 1, -1)
        table = self.table(kind, rotary_dim)
        for pairs in (False, True):
            turned_q, turned_k = (_rotated(each, table[rows], pairs) for each in (raw_q, raw_k))
            if table.shape[1] == rotary_dim and _is_near(_products(queries, keys), _products(turned_q, turned_k)):
                return Rotation(table, None, pairs)
        raise ProgramUnsupportedError(f"{type(attention).__name__} rotates its heads in an unknown way")

    def table(self, kind: str | None, head_dim: int) -> torch.Tensor:
        if kind not in self._tables:
            self._tables[kind] = self._table(head_dim, kind)
        return self._tables[kind]

    def _known(self, kind: str | None, heads: Heads) -> Iterator[Rotation]:
        yield Rotation(None)
        table = self.table(kind, heads.dim)
        for norm_last in (False, True) if heads.q_norm or heads.k_norm else (False,):
            for pairs in (False, True):
                yield Rotation(table, None, pairs, norm_last)
        if self._query_scale is not None and table.shape[1] == heads.dim:
            yield Rotation(table, self._scaled(kind, table))

    def _scaled(self, kind: str | None, table: torch.Tensor) -> torch.Tensor:
        """The table for queries, which includes their scale."""
        assert self._query_scale is not None
        if kind not in self._scaled_tables:
            positions = torch.arange(self._length, device=self._device)
            self._scaled_tables[kind] = table * self._query_scale(positions)[:, None]
        return self._scaled_tables[kind]

    def _probe_positions(self) -> torch.Tensor:
        tried = {*_PROBE_POSITIONS, self._length // 2, self._length - 1}
        return torch.tensor(sorted(each for each in tried if each < self._length))

    def _embeddings(self, positions: torch.Tensor, kind: str | None) -> Embeddings:
        given: Embeddings = self._rotary(torch.empty(1, 1), positions[None], *([] if kind is None else [kind]))
        return given

    def _given(self, positions: torch.Tensor, kind: str | None) -> Embeddings:
        given = self._embeddings(positions, kind)
        if isinstance(given, torch.Tensor):
            return given.to(self._device)
        return given[0].to(self._device), given[1].to(self._device)

    def _table(self, head_dim: int, kind: str | None) -> torch.Tensor:
        """Modules state each angle twice, for halves or for neighbours, or once if they rotate whole heads."""
        given = self._embeddings(torch.arange(self._length), kind)
        cos, sin = (each[0] for each in ((given.real, given.imag) if isinstance(given, torch.Tensor) else given))
        half = cos.shape[-1] // 2
        if torch.equal(cos[:, :half], cos[:, half:]):
            cos, sin = cos[:, :half], sin[:, :half]
        elif torch.equal(cos[:, 0::2], cos[:, 1::2]):
            cos, sin = cos[:, 0::2], sin[:, 0::2]
        elif 2 * cos.shape[-1] != head_dim:
            raise ProgramUnsupportedError(f"{type(self._rotary).__name__} does not rotate pairs")
        return torch.cat((cos, sin), dim=-1).float().to(self._device)


class _Given:
    """Attention that records its inputs and returns ones."""

    def __init__(self) -> None:
        self.heads: tuple[torch.Tensor, torch.Tensor] | None = None

    def attend(
        self, layer: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        self.heads = query.float(), key.float()
        return query.new_ones(*query.shape[:2], value.shape[-1])


@dataclass(frozen=True, slots=True)
class _Probed:
    heads: tuple[torch.Tensor, torch.Tensor]
    """Queries and keys [positions, heads, dim]."""
    gated: torch.Tensor
    """[1, positions, heads * dim]: input of the projection after attention, whose output is ones."""


def _probe(attention: nn.Module, heads: Heads, positions: torch.Tensor, embeddings: Embeddings) -> _Probed:
    given, hidden = _Given(), torch.zeros(1, len(positions), 1, device=positions.device)
    with _projecting(attention, heads, hidden) as gated, active_context(given):
        attention(
            hidden_states=hidden,
            position_embeddings=embeddings,
            attention_mask=None,
            position_ids=positions[None],
            past_key_values=None,
        )
    if given.heads is None:
        raise ProgramUnsupportedError(f"{type(attention).__name__} did not call attention when it was tried")
    return _Probed(given.heads, gated[0].float())


def _raw(heads: Heads, device: torch.device) -> torch.Tensor:
    """The outputs of the query, key and value projections, concatenated."""
    *inner, _ = heads.outputs.values()
    return _LARGE * (torch.arange(1.0, sum(inner) + 1, device=device) * 1.7).sin()


def _raw_gates(count: int, device: torch.device) -> torch.Tensor:
    """Outputs of the projection of gates."""
    return torch.linspace(-3, 4, count, device=device)


@contextmanager
def _projecting(attention: Any, heads: Heads, hidden: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Makes the module's projections return known numbers, the same at all positions. Yields the last one's inputs."""
    *inner, last = heads.outputs
    sizes = [heads.outputs[name] for name in inner]
    rows = _raw(heads, hidden.device).expand(1, hidden.shape[1], -1)
    numbers = dict(zip(inner, torch.split(rows, sizes, dim=-1), strict=True)) | {last: hidden}
    for name, count in heads.gates.items():
        numbers[name] = _raw_gates(count, hidden.device).expand(1, hidden.shape[1], -1)
    children = {name: getattr(attention, name) for name in numbers}
    given_to_last: list[torch.Tensor] = []

    def projected(x: torch.Tensor, name: str) -> torch.Tensor:
        if name == last:
            given_to_last.append(x)
        return numbers[name].clone()  # some modules clamp them in place

    for name, child in children.items():
        child.forward = functools.partial(projected, name=name)
    try:
        yield given_to_last
    finally:
        for child in children.values():
            del child.forward


def _expected(heads: Heads, rotation: Rotation, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    raw = _raw(heads, positions.device)
    num_kv = heads.num_kv_heads * heads.dim
    q, k = raw[: len(raw) - 2 * num_kv], raw[len(raw) - 2 * num_kv : len(raw) - num_kv]
    q, k = (each.view(1, -1, heads.dim).expand(len(positions), -1, -1) for each in (q, k))
    tables = rotation.cos_sin if rotation.q_cos_sin is None else rotation.q_cos_sin, rotation.cos_sin
    q_rows, k_rows = (None if table is None else table[positions] for table in tables)
    is_whole = heads.norm_whole
    return _turned(q, heads.q_norm, is_whole, q_rows, rotation), _turned(k, heads.k_norm, is_whole, k_rows, rotation)


def _turned(
    x: torch.Tensor, norm: Norm | None, norm_whole: bool, rows: torch.Tensor | None, rotation: Rotation
) -> torch.Tensor:
    """rows: of the table."""
    if norm is not None and not rotation.norm_last:
        x = _head_normed(x, norm, norm_whole)
    if rows is not None:
        x = _rotated(x, rows, rotation.pairs)
    return _head_normed(x, norm, norm_whole) if norm is not None and rotation.norm_last else x


def _head_normed(x: torch.Tensor, norm: Norm, norm_whole: bool) -> torch.Tensor:
    return normalised(x.flatten(1), norm).view(x.shape) if norm_whole else normalised(x, norm)


def _rotated(x: torch.Tensor, rows: torch.Tensor, pairs: bool) -> torch.Tensor:
    half = rows.shape[-1] // 2
    cos, sin = rows[:, None, :half], rows[:, None, half:]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if pairs else (turned[..., :half], turned[..., half:])
    a, b = a * cos - b * sin, b * cos + a * sin
    both = torch.stack((a, b), dim=-1).flatten(-2) if pairs else torch.cat((a, b), dim=-1)
    return torch.cat((both, rest), dim=-1)


def _products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """All pairwise products: queries [positions, heads, dim], keys [positions, heads or 1, dim]."""
    return torch.einsum("phd,qhd->hpq", queries, keys.expand(-1, queries.shape[1], -1))


def query_scale_of(config: Any) -> QueryScale | None:
    """For Ministral 3: queries grow with the logarithm of their position."""
    stated = getattr(config, "rope_parameters", None) or {}
    beta, length = (stated.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    if not beta or not length:
        return None
    return lambda positions: 1 + float(beta) * torch.log(1 + torch.floor(positions / int(length)))


def _is_near(given: torch.Tensor, expected: torch.Tensor) -> bool:
    if given.shape != expected.shape:
        return False
    return bool((given - expected).abs().max() <= 1e-3 * expected.abs().max())
