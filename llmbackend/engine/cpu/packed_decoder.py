"""A native program as data: each weight's location in one of two memories, and the parameters.

Used by the packer, by the files that store it, and by the program. Independent of torch and model families. Invariants:
a description is self-contained, so an engine needs neither the checkpoint nor the libraries that read it; locations
outside their memory and inconsistent shapes are refused before a kernel sees an address (`Memories`,
`PackedDecoder.check`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import numpy as np

from ..kernels.expert_layout import MAX_EXPERTS, steps_of
from ..kernels.library import ALIGN_BYTES
from ..kv_groups import LayerGroups, layer_groups
from .native_memory import LayerKV
from .packed_latent import PackedLatent, check_latent
from .packed_parts import (
    ITEM_BYTES,
    TYPE_OF,
    ArrayAt,
    Bytes,
    MatrixAt,
    PackedNorm,
    PackedPart,
    PackedProjection,
    check_norm,
    check_projection,
    expect,
)
from .packed_recurrent import PackedScan, PackedShortConv, check_mixer, inputs_of


class PackedAttention(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's attention, and the shape of its keys and values."""

    qkv: tuple[PackedProjection, ...]
    """Query, key and value as one matrix, or one matrix per type of weight; for latent attention, the latent and the
    rotary part of keys."""
    out: PackedProjection
    q_norm: PackedNorm | None
    """Over each head, or with norm_whole over all heads together."""
    k_norm: PackedNorm | None
    norm_whole: bool
    cos_sin: ArrayAt | None
    """float32 [positions, rotary_dim]: cosines of each pair, then sines; None = no rotation."""
    q_cos_sin: ArrayAt | None = None
    """For queries, if theirs differ."""
    pairs: bool = False
    """Whether numbers 2i and 2i + 1 of a head rotate together, instead of i and i + rotary_dim / 2."""
    norm_last: bool = False
    """Whether heads are normalised after the rotation."""
    num_kv_heads: int
    head_dim: int
    scaling: float
    sliding_window: int
    """A query attends to this many positions, its own included; 0 = all."""
    softcap: float
    """Scores become softcap * tanh(scores / softcap); 0 = off."""
    sinks: ArrayAt | None
    """float32 [num_heads]: an extra score per head without a value."""
    is_gated: bool = False
    """In qkv, each head of queries is followed by as many gates; the head's output is multiplied by their sigmoid."""
    gate: PackedProjection | None = None
    """A separate projection of gates instead: one per number of all heads, or one per head."""
    gate_function: Literal["sigmoid", "softplus"] = "sigmoid"
    latent: PackedLatent | None = None

    @property
    def has_gates(self) -> bool:
        return self.is_gated or self.gate is not None

    @property
    def num_heads(self) -> int:
        return self.out.weight.k // (self.head_dim if self.latent is None else self.latent.down.n)

    @property
    def projected(self) -> int:
        """Numbers of queries, gates, keys and values per token."""
        if self.latent is not None:
            return (self.num_heads + 1) * self.head_dim
        return sum(part.weight.n for together in self.inputs for part in together)

    @property
    def kv(self) -> LayerKV:
        return LayerKV(self.num_kv_heads, self.head_dim, self.latent is None)

    @property
    def inputs(self) -> tuple[tuple[PackedProjection, ...], ...]:
        """The projections before attention, grouped by input, in program order."""
        if self.latent is None:
            return (self.qkv,) if self.gate is None else (self.qkv, (self.gate,))
        of_both, *others = self.latent.inputs
        return ((*self.qkv, *of_both), *others)


class PackedMlp(msgspec.Struct, frozen=True):
    """down(activation(gate_factor * gate) * up), or without a gate, down(activation(up))"""

    gate: PackedProjection | None
    up: PackedProjection
    down: PackedProjection
    activation: Literal["silu", "gelu_tanh", "relu2"]
    gate_factor: float = 1.0


class PackedExpertMatrix(msgspec.Struct, frozen=True):
    """x·Wᵀ + bias for each expert"""

    first: MatrixAt
    """Of expert 0; the others follow (kernels/expert_layout.py), as do their input permutations."""
    bias: ArrayAt | None
    """float32 [experts, n]"""

    def of_expert(self, expert: int) -> MatrixAt:
        first = self.first
        return first.moved(steps_of(first.n, first.k, TYPE_OF[first.dtype]), expert)


class PackedExperts(msgspec.Struct, frozen=True, kw_only=True):
    """The sum over a token's experts of share * down(activation(gate) * up), or without a gate, share *
    down(activation(up)); plus the layer's MLP, which is the shared expert. Expert selection: native/step_experts.h."""

    router: PackedProjection
    top_k: int
    scores: Literal["softmax", "sigmoid"]
    renormalises: bool
    factor: float
    correction: ArrayAt | None
    """float32 [experts]"""
    groups: int
    """0 = none."""
    top_groups: int
    of_group: int = 2
    """A group's score is the sum of this many of its best experts."""
    gate: PackedExpertMatrix | None
    up: PackedExpertMatrix
    down: PackedExpertMatrix
    activation: Literal["silu", "gelu_tanh", "swigluoai", "relu2"]
    shared_gate: PackedProjection | None
    """[1, width]: the shared expert is multiplied by the sigmoid of this; None = by 1."""
    epsilon: float = 0.0
    """Added to the sum by which shares are divided."""

    @property
    def count(self) -> int:
        return self.router.weight.n


class PackedLayer(msgspec.Struct, frozen=True, kw_only=True):
    """h += out_norm(block(in_norm(h))), for attention and then for the MLP, the experts or both; without an out norm, h
    += factor * block(…). Weights of out norms include the factor. A norm or block that is None is omitted. A mixer
    replaces attention, or runs parallel to it on the same input."""

    attention_norm: PackedNorm | None
    attention: PackedAttention | None
    attention_out_norm: PackedNorm | None
    mlp_norm: PackedNorm | None
    mlp: PackedMlp | None
    mlp_out_norm: PackedNorm | None
    residual_factor: float
    """For attention."""
    mixer_factor: float = 1.0
    mlp_factor: float = 1.0
    experts: PackedExperts | None = None
    mixer: PackedShortConv | PackedScan | None = None
    is_parallel: bool = False
    """Whether the MLP reads the output of attention's in_norm."""

    @property
    def inputs(self) -> tuple[tuple[PackedProjection, ...], ...]:
        """The projections that adapters may change, grouped by input, in program order."""
        attention, mlp = self.attention, self.mlp
        qkv, out = ((), ()) if attention is None else (attention.inputs, ((attention.out,),))
        mixer = () if self.mixer is None else inputs_of(self.mixer)
        if mlp is None:
            return (*qkv, *out, *mixer)
        up = (mlp.up,) if mlp.gate is None else (mlp.gate, mlp.up)
        if self.is_parallel:
            return (*qkv, up, *out, (mlp.down,))
        shared_gate = () if self.experts is None or self.experts.shared_gate is None else ((self.experts.shared_gate,),)
        return (*qkv, *out, *mixer, up, (mlp.down,), *shared_gate)


class PackedDecoder(msgspec.Struct, frozen=True, kw_only=True):
    """Logits are x = head(norm(h)) * logit_factor, or with a softcap: softcap * tanh(x / softcap).

    kernel_variant  the library with which the program was verified; panels of all variants are alike
    linear_kind     how linear layers compute, for the log
    kernel_report   why these kernels, for the log
    """

    model_type: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: Literal["float32", "bfloat16"]
    """Of weights, keys and values."""
    kernel_variant: str
    linear_kind: str
    kernel_report: str
    embedding: ArrayAt
    """[vocab, width], in `dtype`"""
    embedding_factor: float
    layers: tuple[PackedLayer, ...]
    norm: PackedNorm
    head: PackedProjection
    logit_factor: float
    logit_softcap: float
    """0 = off."""
    unadapted: str = ""
    """A linear layer that LoRA adapters may change but that the program computes without them; "" = none."""

    @property
    def width(self) -> int:
        return self.embedding.shape[1]

    @property
    def parts(self) -> Iterator[tuple[PackedPart, int]]:
        """What adapters may change, in program order, with the number of inputs."""
        for layer in self.layers:
            for projection in (each for together in layer.inputs for each in together):
                for part in projection.parts:
                    yield part, projection.weight.k

    @property
    def kv_bytes_per_token(self) -> int:
        shapes = [each.kv for each in self.attentions]
        return sum(each.parts * each.num_kv_heads * each.head_dim for each in shapes) * ITEM_BYTES[self.dtype]

    @property
    def attentions(self) -> list[PackedAttention]:
        return [layer.attention for layer in self.layers if layer.attention is not None]

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence; 0 = no recurrent layers."""
        return 4 * sum(layer.mixer.state_floats for layer in self.layers if layer.mixer is not None)

    @property
    def layer_groups(self) -> LayerGroups:
        """Which layers with attention share KV blocks. In a model with recurrent layers, blocks behind windows are
        kept: a state lost in a failed step is recomputed, possibly from the first token."""
        attentions = self.attentions
        are_alike = len({each.kv for each in attentions}) == 1
        windows = [0 if self.state_bytes else each.sliding_window for each in attentions]
        return layer_groups(windows, self.max_model_len, are_alike)

    def check(self, memories: Memories) -> None:
        """Raises ValueError if weights are outside the memories, or inconsistent with each other or with the model's
        parameters."""
        for place in _places(self):
            if isinstance(place, ArrayAt):
                memories.address(place)
            else:
                list(memories.matrix_addresses(place))
                memories.order_address(place)
        rows, width = self.embedding.shape
        expect(self.embedding.dtype == self.dtype and rows >= self.vocab_size > 0, "embedding")
        expect(self.max_model_len > 0 and bool(self.layers), "model")
        check_norm(self.norm, (width,))
        check_projection(self.head, self.head.weight.n, width)
        expect(self.head.weight.n >= self.vocab_size, "head")
        _check_parts(self.parts)
        for layer in self.layers:
            for norm in (layer.attention_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm):
                check_norm(norm, (width,))
            if layer.attention is not None and layer.mixer is not None:
                expect(layer.attention_norm is not None and not layer.is_parallel, "layer")
            if layer.attention is not None:
                _check_attention(layer.attention, width, self.max_model_len, memories)
            if layer.mixer is not None:
                check_mixer(layer.mixer, width)
            expect(layer.experts is None or layer.mlp is not None or layer.experts.shared_gate is None, "layer")
            if layer.mlp is not None:
                _check_mlp(layer.mlp, width)
            if layer.is_parallel:
                expect(layer.attention_norm is not None and layer.mlp_norm is None, "norm")
                expect(layer.attention is not None and layer.mlp is not None, "layer")
            if layer.experts is not None:
                _check_experts(layer.experts, layer.mlp is not None, width, memories)


def _places(part: object) -> Iterator[ArrayAt | MatrixAt]:
    if isinstance(part, ArrayAt | MatrixAt):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _places(each)
    elif isinstance(part, msgspec.Struct):
        yield from _places(msgspec.structs.astuple(part))


def _check_parts(parts: Iterable[tuple[PackedPart, int]]) -> None:
    """Each layer's parts must follow each other from its first output on, with the same number of inputs."""
    ends: dict[str, tuple[int, int]] = {}
    for part, k in parts:
        expect((part.first, k) == ends.get(part.layer, (0, k)), "layers")
        ends[part.layer] = part.first + part.n, k


def _check_attention(attention: PackedAttention, width: int, max_model_len: int, memories: Memories) -> None:
    kv_heads, dim = attention.num_kv_heads, attention.head_dim
    expect(dim > 0 and dim % 32 == 0 and kv_heads > 0, "attention")
    heads = attention.num_heads
    expect(heads > 0 and heads % kv_heads == 0, "attention")
    if attention.latent is not None:
        _check_latent(attention, attention.latent, width, memories)
    else:
        of_queries = heads * (1 + attention.is_gated)
        expect(sum(part.weight.n for part in attention.qkv) == (of_queries + 2 * kv_heads) * dim, "attention")
        check_projection(attention.out, width, heads * dim)
    expect(not (attention.is_gated and attention.norm_whole), "attention")
    if (gate := attention.gate) is not None:
        expect(attention.latent is None and not attention.is_gated, "gate")
        check_projection(gate, heads if gate.weight.n == heads else heads * dim, width)
    for part in attention.qkv:
        check_projection(part, part.weight.n, width)
    check_norm(attention.q_norm, (heads * dim if attention.norm_whole else dim,))
    check_norm(attention.k_norm, (kv_heads * dim if attention.norm_whole else dim,))
    expect(attention.sliding_window >= 0, "window")
    for table in filter(None, (attention.cos_sin, attention.q_cos_sin)):
        fits = len(table.shape) == 2 and table.shape[0] >= max_model_len and table.shape[1] <= dim
        expect(fits and table.shape[1] % 2 == 0 and table.dtype == "float32", "rotary table")
        expect(attention.cos_sin is not None and table.shape == attention.cos_sin.shape, "rotary table")
    if (sinks := attention.sinks) is not None:
        expect(sinks.shape == (heads,) and sinks.dtype == "float32", "sinks")


def _check_latent(attention: PackedAttention, latent: PackedLatent, width: int, memories: Memories) -> None:
    heads, rank = attention.num_heads, latent.rank
    check_latent(latent, attention.head_dim, heads, width)
    check_projection(attention.out, width, heads * latent.down.n)
    rotary_dim = attention.head_dim - rank
    expect([part.weight.n for part in attention.qkv] == [rank, rotary_dim], "attention")
    expect(attention.cos_sin is not None and attention.cos_sin.shape[1] == rotary_dim, "rotary table")
    norms = (attention.q_norm, attention.k_norm, attention.q_cos_sin)
    expect(attention.num_kv_heads == 1 and norms == (None, None, None) and not attention.is_gated, "attention")
    for matrix in (latent.up.moved(latent.up_steps, heads - 1), latent.down.moved(latent.down_steps, heads - 1)):
        list(memories.matrix_addresses(matrix))


def _check_mlp(mlp: PackedMlp, width: int) -> None:
    inner = mlp.down.weight.k
    check_projection(mlp.up, inner, width)
    check_projection(mlp.down, width, inner)
    expect(mlp.activation in (("gelu_tanh", "relu2") if mlp.gate is None else ("silu", "gelu_tanh")), "activation")
    if mlp.gate is None:
        return
    check_projection(mlp.gate, inner, width)
    gate, up = mlp.gate.weight, mlp.up.weight
    expect((gate.dtype, gate.order_offset_bytes) == (up.dtype, up.order_offset_bytes), "MLP")


def _check_experts(experts: PackedExperts, is_shared: bool, width: int, memories: Memories) -> None:
    count, inner = experts.count, experts.down.first.k
    expect(0 < experts.top_k <= count <= MAX_EXPERTS, "experts")
    check_projection(experts.router, count, width)
    expect((experts.gate is None) == (experts.activation == "relu2"), "experts")
    gate = experts.up if experts.gate is None else experts.gate
    for matrix, n, k in ((gate, inner, width), (experts.up, inner, width), (experts.down, width, inner)):
        check_projection(PackedProjection(matrix.first, None), n, k)
        list(memories.matrix_addresses(matrix.of_expert(count - 1)))
        bias = matrix.bias
        expect(bias is None or (bias.shape == (count, n) and bias.dtype == "float32"), "bias")
        memories.order_address(matrix.first, count)
    gate_at, up_at = gate.first, experts.up.first
    expect((gate_at.dtype, gate_at.order_offset_bytes) == (up_at.dtype, up_at.order_offset_bytes), "experts")
    correction, groups = experts.correction, experts.groups
    expect(correction is None or (correction.shape == (count,) and correction.dtype == "float32"), "correction")
    if groups:
        size, rest = divmod(count, groups)
        expect(groups > 0 and rest == 0 and size > 1 and 0 < experts.top_groups <= groups, "groups")
        expect(experts.of_group in (1, 2), "groups")
        expect(experts.top_k <= experts.top_groups * size, "groups")
    if experts.shared_gate is not None:
        expect(is_shared, "shared expert")
        check_projection(experts.shared_gate, 1, width)


@dataclass(frozen=True, slots=True)
class Memories:
    """The memories with a packed model's weights, read-only for the program.

    resident  uint8 [bytes]  what every step reads: packed matrices, norms, biases; on huge pages
    mapped    uint8 [bytes]  what a step reads few rows of: the embedding, rotary tables
    is_file   whether `mapped` consists of a file's pages, read-only, which can be released and are then read again
    """

    resident: Bytes
    mapped: Bytes
    is_file: bool = False

    def address(self, array: ArrayAt) -> int:
        """Raises ValueError if the array is outside its memory."""
        memory = self.resident if array.memory == "resident" else self.mapped
        return _address(memory, array.offset_bytes, array.size_bytes)

    def address_if_any(self, array: ArrayAt | None) -> int | None:
        """As `address`; None for None."""
        return None if array is None else self.address(array)

    def matrix_addresses(self, matrix: MatrixAt) -> Iterator[int | None]:
        """Of panels, scales, and sums, minima or zero points. Raises ValueError if one is outside the resident
        memory."""
        for offset_bytes, size_bytes in matrix.parts:
            yield None if offset_bytes is None else _address(self.resident, offset_bytes, size_bytes)

    def order_address(self, matrix: MatrixAt, count: int = 1) -> int | None:
        """Of its input permutation, or of so many experts' ones. Raises ValueError if it is outside the resident memory
        or not a permutation."""
        offset_bytes, size_bytes = matrix.order_offset_bytes, 4 * count * matrix.k
        if offset_bytes is None:
            return None
        address = _address(self.resident, offset_bytes, size_bytes)
        order = self.resident[offset_bytes : offset_bytes + size_bytes].view(np.int32)
        expect(bool(((order >= 0) & (order < matrix.k)).all()), "order of inputs")
        return address


class PackingPlace(Protocol):
    """Provides memory for packing a model; the packing process allocates what it does not provide."""

    def new_memory(self, size_bytes: int) -> Bytes | None:
        """Zeroed resident memory."""

    def write_tables(self, resident: Bytes, tables: Sequence[tuple[int, Bytes]], size_bytes: int) -> Bytes | None:
        """Mapped memory of this size with these arrays at their offsets; called once `resident` is filled."""


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A model that a native program can compute; the program's logits were compared with those of the modules."""

    decoder: PackedDecoder
    memories: Memories


def _address(memory: Bytes, offset_bytes: int, size_bytes: int) -> int:
    inside = 0 <= offset_bytes <= offset_bytes + size_bytes <= len(memory)
    if not inside or offset_bytes % ALIGN_BYTES:
        raise ValueError(
            f"the description of a packed model is broken: {size_bytes} bytes at {offset_bytes} of {len(memory)}"
        )
    return int(memory.ctypes.data) + offset_bytes
