"""A rank's part of a model: the layers of its stage, whole heads and columns of split weights, and all other weights.

Used by a rank between loading a model and building its program. Invariants: the parts of all ranks together are the
model; every rank of a stage computes the same hidden states, because the two products of a layer whose inputs are on
several ranks combine these inputs, or their results; what cannot be split evenly is refused by name.

Source: Megatron-LM's split of attention and MLP (arXiv 1909.08053, §3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn import functional

from ...attention.interface import LayerShape
from ...errors import UnshardableError
from ...model.decoder_description import Attention, Decoder, Experts, Layer
from ...model.projections import Mlp, Projection
from ..ops.ops import Norm, gate_up_rows
from ..weights.dense import DenseWeight, DeviceWeight, Matmul, QuantizedWeight, Rows
from ..weights.experts import ExpertProjection
from ..weights.int4 import Int4Weight
from ..weights.stored import StoredWeight
from .collectives import RankPlace, StageGroup


@dataclass(frozen=True, slots=True, eq=False)
class SummedWeight:
    """This rank's input columns of a matrix; the product is the sum of all ranks' products."""

    local: DeviceWeight
    ranks: StageGroup

    @property
    def n(self) -> int:
        return self.local.n

    @property
    def k(self) -> int:
        """Columns of this rank."""
        return self.local.k

    @property
    def input_dtype(self) -> torch.dtype | None:
        return self.local.input_dtype

    def multiply(self, matmul: Matmul, x: Rows, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        self.local.multiply(matmul, x, None, out)
        self.ranks.all_reduce(out)
        if bias is not None:
            out += bias


@dataclass(frozen=True, slots=True, eq=False)
class GatheredWeight:
    """This rank's output rows of a matrix, padded on the last rank; the product is the concatenation of all ranks'
    products."""

    local: DeviceWeight
    ranks: StageGroup
    n: int

    @property
    def k(self) -> int:
        return self.local.k

    @property
    def input_dtype(self) -> torch.dtype | None:
        return self.local.input_dtype

    def multiply(self, matmul: Matmul, x: Rows, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        part = out.new_empty((len(x), self.local.n))
        self.local.multiply(matmul, x, None if bias is None else self._own(bias), part)
        out.copy_(side_by_side(self.ranks.all_gather(part))[:, : self.n])

    def _own(self, bias: torch.Tensor) -> torch.Tensor:
        width = self.local.n
        own = bias[self.ranks.rank * width : (self.ranks.rank + 1) * width]
        return functional.pad(own, (0, width - len(own)))


@dataclass(frozen=True, slots=True, eq=False)
class GatheringWeight:
    """As GatheredWeight, for a product whose inputs are distributed over ranks: they are gathered first."""

    rows: GatheredWeight

    @property
    def n(self) -> int:
        return self.rows.n

    @property
    def k(self) -> int:
        """Inputs on this rank."""
        return self.rows.k // self.rows.ranks.size

    @property
    def input_dtype(self) -> torch.dtype | None:
        """None, because an 8-bit scale applies to a whole row, which no rank has."""
        return None

    def multiply(self, matmul: Matmul, x: Rows, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        assert isinstance(x, torch.Tensor), "rows are gathered in the model's dtype"
        self.rows.multiply(matmul, side_by_side(self.rows.ranks.all_gather(x)), bias, out)


def side_by_side(parts: torch.Tensor) -> torch.Tensor:
    """[ranks, rows, width] -> [rows, ranks * width]."""
    return parts.transpose(0, 1).flatten(1)


T = TypeVar("T")


class Sharding:
    """The part of one rank. Weights are copied to `device`, so that the whole model can be freed."""

    def __init__(
        self,
        ranks: StageGroup,
        device: torch.device,
        dtype: torch.dtype,
        place: RankPlace | None = None,
        is_exact: bool = False,
    ) -> None:
        """ranks: of the stage. dtype: the model's. place: None = there is one stage. is_exact: whether no sum of a
        product may be split among ranks."""
        self._is_exact = is_exact
        self._ranks = ranks
        self._to: dict[str, Any] = {"device": device, "dtype": dtype}
        self._device = device
        self._place = place or RankPlace(ranks.rank, ranks.size)

    def layer_shapes(self, shapes: Mapping[nn.Module, LayerShape]) -> dict[nn.Module, LayerShape]:
        """The KV shapes of this rank. Raises UnshardableError."""
        own = self._own(list(shapes.items()))
        return {module: replace(shape, num_kv_heads=len(self._kv_heads(shape.num_kv_heads))) for module, shape in own}

    def decoder(self, decoder: Decoder, shapes: Mapping[nn.Module, LayerShape]) -> Decoder:
        """shapes: of the whole model. The embedding is empty except in the first stage, the head except in the last.
        Raises UnshardableError."""
        embedding = _copied(decoder.embedding if self._place.is_first else decoder.embedding[:0], self._to)
        no_head = Projection(DenseWeight(torch.empty((0, decoder.head.weight.k), **self._to)), None)
        return replace(
            decoder,
            embedding=embedding,
            layers=tuple(self._layer(layer, shapes[layer.module]) for layer in self._own(decoder.layers)),
            norm=replace(decoder.norm, weight=decoder.norm.weight.to(self._device)),
            head=self._head(decoder, embedding) if self._place.is_last else no_head,
        )

    def _own(self, layers: Sequence[T]) -> Sequence[T]:
        if len(layers) < self._place.pipeline_size:
            size = self._place.pipeline_size
            raise UnshardableError(
                f"engine argument 'pipeline_parallel_size' is {size}, which the model does not support: it has "
                f"{len(layers)} layers"
            )
        own = self._place.layers(len(layers))
        return layers[own.start : own.stop]

    def _layer(self, layer: Layer, shape: LayerShape) -> Layer:
        assert isinstance(layer.mlp, Mlp | Experts), "supported only by the CPU's program"
        return replace(
            layer,
            attention_norm=self._norm(layer.attention_norm),
            attention=self._attention(layer.attending, shape),
            attention_out_norm=self._norm(layer.attention_out_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            mlp=self._mlp(layer.mlp) if isinstance(layer.mlp, Mlp) else self._experts(layer.mlp),
            mlp_out_norm=self._norm(layer.mlp_out_norm),
        )

    def _attention(self, attention: Attention, shape: LayerShape) -> Attention:
        if attention.norm_whole and self._ranks.size > 1:
            raise UnshardableError(self._refusal("it normalizes queries and keys over all heads"))
        head_dim = shape.key_dim
        heads = self._part(attention.out.weight.k // head_dim, "attention heads")
        kv_heads = self._kv_heads(shape.num_kv_heads)
        num_heads = attention.out.weight.k // head_dim
        rows = torch.cat(
            [
                _heads(heads, head_dim),
                _heads(kv_heads, head_dim) + num_heads * head_dim,
                _heads(kv_heads, head_dim) + (num_heads + shape.num_kv_heads) * head_dim,
            ]
        )
        sinks = attention.options.sinks
        return replace(
            attention,
            qkv=self._rows(attention.qkv, rows),
            out=self._columns(attention.out, range(heads.start * head_dim, heads.stop * head_dim)),
            q_norm=self._norm(attention.q_norm),
            k_norm=self._norm(attention.k_norm),
            rotation=replace(
                attention.rotation, cos_sin=None if attention.cos_sin is None else attention.cos_sin.to(self._device)
            ),
            options=replace(
                attention.options,
                sinks=None if sinks is None else sinks.detach()[heads.start : heads.stop].to(self._device),
            ),
        )

    def _mlp(self, mlp: Mlp) -> Mlp:
        """gate and up concatenated, as programs need them."""
        part = self._part(mlp.gate.weight.n, "columns of its MLP")
        rows = torch.arange(part.start, part.stop)
        both = _splittable(mlp.gate).rows(rows).above(_splittable(mlp.up).rows(rows)).to(self._device)
        return replace(
            mlp,
            gate=Projection(both.part(0, len(part)), self._bias(mlp.gate, part)),
            up=Projection(both.part(len(part), len(part)), self._bias(mlp.up, part)),
            down=self._columns(mlp.down, part),
        )

    def _experts(self, experts: Experts) -> Experts:
        """Columns of every expert, so that all ranks have the same work whatever experts are selected; if no sum may be
        split, all experts on every rank."""
        bias = experts.router.bias
        router = Projection(
            DenseWeight(_copied(_dense(experts.router), self._to)), None if bias is None else bias.to(self._device)
        )
        gate_up, down = experts.gate_up, experts.down
        if self._ranks.size == 1 or self._is_exact:
            return replace(experts, router=router, gate_up=self._by_expert(gate_up), down=self._by_expert(down))
        n = down.weight.k
        part = self._part(n, "columns of its experts")
        rows = gate_up_rows(experts.activation, n, part)
        own_bias = None if gate_up.bias is None else gate_up.bias[:, rows]
        own_gate_up = ExpertProjection(gate_up.weight.rows(rows), own_bias)
        # Only one rank adds the bias to the sum.
        own_down = ExpertProjection(down.weight.columns(part), down.bias if self._ranks.rank == 0 else None)
        return replace(
            experts,
            router=router,
            gate_up=self._by_expert(own_gate_up),
            down=self._by_expert(own_down),
            add_up=self._ranks.all_reduce,
        )

    def _by_expert(self, projection: ExpertProjection) -> ExpertProjection:
        weight, bias = projection.weight.to(**self._to), projection.bias
        return ExpertProjection(weight, None if bias is None else _copied(bias, self._to))

    def _head(self, decoder: Decoder, embedding: torch.Tensor) -> Projection:
        """A head tied to the embedding is a part of the embedding on the device, if that is there."""
        weight, own = _dense(decoder.head), self._own_outputs(decoder.head.weight.n)
        is_tied = weight.data_ptr() == decoder.embedding.data_ptr() and weight.shape == decoder.embedding.shape
        is_there = is_tied and self._place.is_first
        local = embedding[own.start : own.stop] if is_there else _copied(weight[own.start : own.stop], self._to)
        bias = decoder.head.bias
        return Projection(
            self._gathered(DenseWeight(local), decoder.head.weight.n), None if bias is None else bias.to(self._device)
        )

    def _own_outputs(self, count: int) -> range:
        """This rank's outputs of a matrix that is split as evenly as possible, whatever its rows mean."""
        width = -(-count // self._ranks.size)
        start = min(self._ranks.rank * width, count)
        return range(start, min(start + width, count))

    def _gathered(self, local: DenseWeight, count: int) -> DeviceWeight:
        """local: this rank's outputs. count: total over all ranks."""
        if self._ranks.size == 1:
            return local
        missing = -(-count // self._ranks.size) - local.n
        if missing:
            local = DenseWeight(nn.functional.pad(local.tensor, (0, 0, 0, missing)))
        return GatheredWeight(local, self._ranks, count)

    def _rows(self, projection: Projection, rows: torch.Tensor) -> Projection:
        weight, bias = _splittable(projection).rows(rows), projection.bias
        return Projection(weight.to(self._device), None if bias is None else bias[rows].to(self._device))

    def _columns(self, projection: Projection, columns: range) -> Projection:
        """A product whose inputs are distributed over ranks; `columns` are those of this rank."""
        weight, bias = _splittable(projection), projection.bias
        return Projection(self._of_inputs(weight, columns), None if bias is None else bias.to(self._device))

    def _of_inputs(self, weight: Any, columns: range) -> DeviceWeight:
        if self._ranks.size == 1:
            return cast(DeviceWeight, weight.to(self._device))
        if not self._is_exact:
            return SummedWeight(weight.columns(columns).to(self._device), self._ranks)
        if weight.n % self._ranks.size:
            raise UnshardableError(self._refusal(f"it has a width of {weight.n}"))
        own = self._own_outputs(weight.n)
        rows = weight.rows(torch.arange(own.start, own.stop)).to(self._device)
        return GatheringWeight(GatheredWeight(rows, self._ranks, weight.n))

    def _bias(self, projection: Projection, part: range) -> torch.Tensor | None:
        return None if projection.bias is None else projection.bias[part.start : part.stop].to(self._device)

    def _norm(self, norm: Norm | None) -> Norm | None:
        return None if norm is None else replace(norm, weight=norm.weight.to(self._device))

    def _part(self, count: int, what: str) -> range:
        if count % self._ranks.size:
            raise UnshardableError(self._refusal(f"it has {count} {what}"))
        width = count // self._ranks.size
        return range(self._ranks.rank * width, (self._ranks.rank + 1) * width)

    def _kv_heads(self, count: int) -> range:
        """If there are fewer KV heads than ranks, neighbouring ranks share one."""
        if count >= self._ranks.size or self._ranks.size % count:
            return self._part(count, "KV heads")
        head = self._ranks.rank * count // self._ranks.size
        return range(head, head + 1)

    def _refusal(self, why: str) -> str:
        return f"engine argument 'tensor_parallel_size' is {self._ranks.size}, which the model does not support: {why}"


def _heads(heads: range, head_dim: int) -> torch.Tensor:
    return torch.arange(heads.start * head_dim, heads.stop * head_dim)


def _splittable(projection: Projection) -> Any:
    """The weight; typed Any because the types do not say that gate and up are of the same kind."""
    kinds = DenseWeight, QuantizedWeight, Int4Weight, StoredWeight
    assert isinstance(projection.weight, kinds), "a model that was loaded for programs has such weights"
    return projection.weight


def _dense(projection: Projection) -> torch.Tensor:
    assert isinstance(projection.weight, DenseWeight), "heads and routers are never quantised"
    return projection.weight.tensor


def _copied(x: torch.Tensor, to: Mapping[str, Any]) -> torch.Tensor:
    """A copy in separate memory: x may be a mapped file."""
    return x.to(**to, copy=True)
