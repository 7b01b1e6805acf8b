"""A decoder-only model on an accelerator: a flat list of operations that one call executes.

Used by the accelerator's runner if the model was recognised (decoder_description.py). Invariants: every buffer is
allocated once, for the largest step, so a step can be captured and replayed at the same addresses; nothing here waits
for the device; the residual stream is float32, everything else is in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch import nn

from ..errors import ProgramUnsupportedError
from ..model.compatibility import CheckedModel
from ..model.decoder_description import Decoder, Experts, Layer
from ..model.mixture_description import Mixture
from ..model.projections import Mlp, PlainMlp, Projection, joined
from .lora import LoraSlots
from .ops.ops import (
    Activation,
    AttendSpec,
    ExpertScratch,
    ExpertSpec,
    LayerCache,
    LoraScratch,
    LoraSpec,
    Norm,
    Ops,
    RotarySpec,
    StepLayout,
)
from .weights.dense import DenseWeight, DeviceWeight, EightBitRows, Matmul, Rows
from .weights.experts import DenseExperts, ExpertProjection


def library_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """The vendor's library. It chooses a kernel, and so the order of sums, by the number of rows: the last bits of a
    row may depend on the number of others."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


@dataclass(frozen=True, slots=True, eq=False)
class _Linear:
    weight: DeviceWeight
    bias: torch.Tensor | None
    lora: LoraSpec | None = None

    @property
    def n(self) -> int:
        return self.weight.n


@dataclass(frozen=True, slots=True, eq=False)
class _Mlp:
    first: _Linear
    """Gate and up."""
    activation: Activation
    down: _Linear


@dataclass(frozen=True, slots=True, eq=False)
class _Experts:
    first: _Linear
    """The router."""
    activation: Activation
    spec: ExpertSpec
    add_up: Callable[[torch.Tensor], None] | None
    """As in decoder_description.Experts."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One layer as arguments of its operations; see decoder_description.Layer for the parts."""

    attention_norm: Norm | None
    qkv: _Linear
    rotary: RotarySpec
    attend: AttendSpec
    attention_out: _Linear
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp: _Mlp | _Experts
    mlp_out_norm: Norm | None
    residual_factor: float


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """The output of a block that has not been added to the residual stream yet; the next operation that reads the
    stream adds it."""

    block: torch.Tensor | None = None
    norm: Norm | None = None
    factor: float = 1.0


class Stages(Protocol):
    """The place of a program in a pipeline of stages, each with some of the layers."""

    @property
    def is_first(self) -> bool: ...

    @property
    def is_last(self) -> bool: ...

    def receive(self, residual: torch.Tensor) -> None:
        """Fills the residual stream, float32 [tokens, width], from the previous stage."""

    def send(self, residual: torch.Tensor) -> None:
        """To the next stage."""

    def max_over_stages(self, count: int) -> int:
        """The maximum of this number over all stages."""


class _Whole:
    """A model that is not split into stages."""

    is_first = is_last = True

    def receive(self, residual: torch.Tensor) -> None:
        raise AssertionError("there is no previous stage")

    def send(self, residual: torch.Tensor) -> None:
        raise AssertionError("there is no next stage")

    def max_over_stages(self, count: int) -> int:
        return count


WHOLE: Final = _Whole()


class _Buffer:
    """Memory for the largest step; a smaller one uses its start as a contiguous matrix."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.zeros(rows * width, dtype=dtype, device=device)

    def matrix(self, rows: int, width: int) -> torch.Tensor:
        return self._memory[: rows * width].view(rows, width)


class _Inputs:
    """Memory for the input of a product, in the model's dtype or in the 8-bit type that its weight requires."""

    def __init__(self, rows: int, weights: Sequence[DeviceWeight], dtype: torch.dtype, device: torch.device) -> None:
        dense = [weight.k for weight in weights if weight.input_dtype is None]
        small = [weight.k for weight in weights if weight.input_dtype is not None]
        self._dense = _Buffer(rows, max(dense, default=0), dtype, device)
        self._small = _Buffer(rows, max(small, default=0), torch.uint8, device)
        self._scale = _Buffer(rows, 1 if small else 0, torch.float32, device)

    def rows(self, rows: int, weight: DeviceWeight) -> Rows:
        if weight.input_dtype is None:
            return self._dense.matrix(rows, weight.k)
        numbers = self._small.matrix(rows, weight.k).view(weight.input_dtype)
        return EightBitRows(numbers, self._scale.matrix(rows, 1))


class GpuProgram:
    def __init__(
        self,
        decoder: Decoder,
        caches: Mapping[nn.Module, LayerCache],
        ops: Ops,
        max_tokens: int,
        max_samples: int,
        matmul: Matmul = library_matmul,
        stages: Stages = WHOLE,
        loras: LoraSlots | None = None,
        group_of: Sequence[int] = (),
    ) -> None:
        """caches: KV memory by attention module; layers of different groups may share it. max_tokens, max_samples: of
        the largest step. Weights (DeviceWeight) and caches are on one device. stages: the place in a pipeline. loras:
        for adapters of every product except the head's. group_of: the group of each layer; the layers of a group share
        block tables; empty = there is one group. Raises torch.OutOfMemoryError, or ProgramUnsupportedError for what it
        cannot compute."""
        self._stages, self._loras = stages, loras
        self._ops, self._matmul = ops, matmul
        self._dtype, self._device = decoder.embedding.dtype, decoder.embedding.device
        self._embedding, self._embedding_factor = decoder.embedding, decoder.embedding_factor
        self._width = decoder.embedding.shape[1]
        self._modules = [layer.module for layer in decoder.layers]
        self._group_of = tuple(group_of) or (0,) * len(decoder.layers)
        self.use_caches(caches)
        self._layers = [self._layer(layer, caches[layer.module]) for layer in decoder.layers]
        self._norm, self._head = decoder.norm, self._base(decoder.head)
        self._logit_factor, self._logit_softcap = decoder.logit_factor, decoder.logit_softcap
        self._max_tokens, self._max_samples = max_tokens, max_samples
        self._make_buffers(max_tokens, max_samples)

    def use_caches(self, caches: Mapping[nn.Module, LayerCache]) -> None:
        """Switches to other KV memory of the same kind."""
        self._caches = [caches[module] for module in self._modules]

    @torch.inference_mode()
    def forward(self, layout: StepLayout, block_table: torch.Tensor) -> torch.Tensor:
        """Computes the step and writes its KV. block_table int32 [rows, blocks]: of the first group of layers.

        Returns logits [samples, vocab], valid until the next call: float32 if the model scales or caps them, else in
        its dtype; [0, vocab], without computing the head, if no row samples; [samples, 0] if another stage has the
        head.
        """
        self.run_layers(layout, block_table)
        if not self._stages.is_last:
            return self._logit_memory.matrix(len(layout.sampled_tokens), 0)
        return self.logits_behind(layout.sampled_tokens)

    @torch.inference_mode()
    def run_layers(self, layout: StepLayout, block_table: torch.Tensor) -> None:
        """As `forward`, but without the logits (`logits_behind`)."""
        num_tokens = len(layout.token_ids)
        if num_tokens > self._max_tokens or len(layout.sampled_tokens) > self._max_samples:
            raise RuntimeError(
                f"a step of {num_tokens} tokens and {len(layout.sampled_tokens)} samples exceeds the program's buffers"
            )
        residual = self._residual.matrix(num_tokens, self._width)
        if self._stages.is_first:
            self._ops.embed(layout.token_ids, self._embedding, self._embedding_factor, residual)
        else:
            self._stages.receive(residual)
        if self._lora_scratch is not None and layout.adapters is not None:
            self._ops.group_by_adapter(layout.adapters, self._lora_scratch)
        pending = _Pending()
        tables = [(layout, block_table)]
        tables += [(replace(layout, slots=slots), table) for slots, table in layout.other_groups]
        for layer, cache, group in zip(self._layers, self._caches, self._group_of, strict=True):
            x = self._input(residual, pending, layer.attention_norm, layer.qkv)
            block = self._attention(layer, x, *tables[group], cache)
            pending = _Pending(block, layer.attention_out_norm, layer.residual_factor)
            x = self._input(residual, pending, layer.mlp_norm, layer.mlp.first)
            pending = _Pending(self._feed_forward(layer.mlp, x, layout), layer.mlp_out_norm, layer.residual_factor)
        self._ops.residual_norm(residual, pending.block, pending.norm, pending.factor, None, None)
        if not self._stages.is_last:
            self._stages.send(residual)

    def verify(self, checked: CheckedModel, block_size: int) -> None:
        """Compares the program with the model's own modules, in the first KV blocks. Raises ProgramUnsupportedError."""

        def all_logits(token_ids: torch.Tensor) -> torch.Tensor:
            num_groups, count = max(self._group_of) + 1, -(-len(token_ids) // block_size)
            blocks = torch.arange(num_groups * count, dtype=torch.int32, device=token_ids.device)
            tables = blocks.view(num_groups, 1, count)
            return self.forward(_whole_sequence(token_ids, tables, block_size), tables[0]).clone()

        checked.verify(all_logits)

    def _input(self, residual: torch.Tensor, pending: _Pending, norm: Norm | None, linear: _Linear) -> Rows:
        """Adds the output of the previous block to the residual stream. Returns the input of the next block."""
        x = self._normed.rows(len(residual), linear.weight)
        self._ops.residual_norm(residual, pending.block, pending.norm, pending.factor, norm, x)
        return x

    def _attention(
        self, layer: _Layer, x: Rows, layout: StepLayout, block_table: torch.Tensor, cache: LayerCache
    ) -> torch.Tensor:
        qkv = self._adapted_product(layer.qkv, x, layout, self._qkv)
        self._ops.rotary_and_write(qkv, layout, layer.rotary, cache)
        attended = self._attended.matrix(len(x), layer.attention_out.weight.k)
        self._ops.attend(qkv, layout, block_table, layer.attend, cache, attended)
        x = self._attended_rows(layer.attention_out, attended)
        return self._adapted_product(layer.attention_out, x, layout, self._block)

    def _attended_rows(self, linear: _Linear, attended: torch.Tensor) -> Rows:
        if linear.weight.input_dtype is None:
            return attended
        rows = self._gated.rows(len(attended), linear.weight)
        assert isinstance(rows, EightBitRows)
        self._ops.quantize(attended, rows)
        return rows

    def _feed_forward(self, mlp: _Mlp | _Experts, x: Rows, layout: StepLayout) -> torch.Tensor:
        first = self._adapted_product(mlp.first, x, layout, self._gate_up)
        if isinstance(mlp, _Mlp):
            gated = self._gated.rows(len(x), mlp.down.weight)
            self._ops.gate(first, mlp.activation, gated)
            return self._adapted_product(mlp.down, gated, layout, self._block)
        assert isinstance(x, torch.Tensor) and self._expert_scratch is not None
        out = self._block.matrix(*x.shape)
        self._ops.mix_experts(x, first, mlp.spec, mlp.activation, self._expert_scratch, out)
        if mlp.add_up is not None:
            mlp.add_up(out)
        return out

    @torch.inference_mode()
    def logits_behind(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, as in `forward`, after these tokens of the last batch, int32 [tokens]; at most as many as the largest
        step samples."""
        if not len(tokens):
            return self._logit_memory.matrix(0, self._head.n)
        residual = self._residual.matrix(self._max_tokens, self._width)
        x = self._sampled.matrix(len(tokens), self._width)
        self._ops.residual_norm(residual, None, None, 1.0, self._norm, x, tokens)
        return self._finished(self._product(self._head, x, self._logit_memory))

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        if self._wide_logits is None:
            return logits
        wide, cap = self._wide_logits.matrix(*logits.shape).copy_(logits), self._logit_softcap
        wide.mul_(self._logit_factor)
        return wide.div_(cap).tanh_().mul_(cap) if cap else wide

    def _adapted_product(self, linear: _Linear, x: Rows, layout: StepLayout, buffer: _Buffer) -> torch.Tensor:
        out = self._product(linear, x, buffer)
        if linear.lora is not None and layout.adapters is not None:
            assert isinstance(x, torch.Tensor) and self._lora_scratch is not None, "adapters multiply dense rows"
            self._ops.add_loras(x, layout.adapters, linear.lora, self._lora_scratch, out)
        return out

    def _product(self, linear: _Linear, x: Rows, buffer: _Buffer) -> torch.Tensor:
        out = buffer.matrix(len(x), linear.n)
        linear.weight.multiply(self._matmul, x, linear.bias, out)
        return out

    def _make_buffers(self, tokens: int, samples: int) -> None:
        def buffer(rows: int, width: int, dtype: torch.dtype = self._dtype) -> _Buffer:
            return _Buffer(rows, width, dtype, self._device)

        layers, width = self._layers, self._width
        self._residual = buffer(tokens, width, torch.float32)
        self._normed = self._inputs(tokens, [linear for layer in layers for linear in (layer.qkv, layer.mlp.first)])
        self._block = buffer(tokens, width)
        self._qkv = buffer(tokens, max(layer.qkv.n for layer in layers))
        self._attended = buffer(tokens, max(layer.attention_out.weight.k for layer in layers))
        self._gate_up = buffer(tokens, max(layer.mlp.first.n for layer in layers))
        downs = [layer.mlp.down for layer in layers if isinstance(layer.mlp, _Mlp)]
        self._gated = self._inputs(tokens, [*downs, *(layer.attention_out for layer in layers)])
        specs = [layer.mlp.spec for layer in layers if isinstance(layer.mlp, _Experts)]
        self._expert_scratch = ExpertScratch.of(tokens, specs, self._dtype, self._device) if specs else None
        self._lora_scratch = None if self._loras is None else LoraScratch.of(tokens, self._loras.specs)
        self._sampled = buffer(samples, width)
        self._logit_memory = buffer(samples, self._head.n)
        is_plain = self._logit_factor == 1.0 and not self._logit_softcap
        self._wide_logits = None if is_plain else buffer(samples, self._head.n, torch.float32)

    def _inputs(self, rows: int, linears: Sequence[_Linear]) -> _Inputs:
        return _Inputs(rows, [linear.weight for linear in linears], self._dtype, self._device)

    def _layer(self, layer: Layer, cache: LayerCache) -> _Layer:
        attention = layer.attending
        num_kv_heads, head_dim = cache.keys.shape[1], cache.keys.shape[3]
        if cache.values.shape != cache.keys.shape or attention.out.weight.k % head_dim:
            raise ProgramUnsupportedError("keys and values of its heads differ in length")
        heads = attention.out.weight.k // head_dim, num_kv_heads, head_dim
        options, sinks = attention.options, attention.options.sinks
        return _Layer(
            attention_norm=layer.attention_norm,
            qkv=self._linear(attention.qkv),
            rotary=RotarySpec(
                *heads,
                q_norm=attention.q_norm,
                k_norm=attention.k_norm,
                norm_whole=attention.norm_whole,
                cos_sin=attention.cos_sin,
            ),
            attend=AttendSpec(
                *heads,
                scaling=options.scaling,
                window=options.sliding_window or 0,
                softcap=options.softcap or 0.0,
                sinks=None if sinks is None else sinks.detach().float().contiguous(),
            ),
            attention_out=self._linear(attention.out),
            attention_out_norm=layer.attention_out_norm,
            mlp_norm=layer.mlp_norm,
            mlp=self._mlp(layer.mlp),
            mlp_out_norm=layer.mlp_out_norm,
            residual_factor=layer.residual_factor,
        )

    def _mlp(self, mlp: Mlp | PlainMlp | Experts | Mixture | None) -> _Mlp | _Experts:
        assert isinstance(mlp, Mlp | Experts), "an accelerator is given no other description"
        if isinstance(mlp, Mlp):
            return _Mlp(self._linear(_gate_up(mlp)), mlp.activation, self._linear(mlp.down))
        gate_up, down = (self._by_expert(each) for each in (mlp.gate_up, mlp.down))
        spec = ExpertSpec(gate_up, down, mlp.top_k, mlp.renormalises)
        return _Experts(self._linear(mlp.router), mlp.activation, spec, mlp.add_up)

    def _by_expert(self, projection: ExpertProjection) -> ExpertProjection:
        weight, bias = projection.weight, projection.bias
        if isinstance(weight, DenseExperts) and weight.tensor.dtype != self._dtype:
            raise ProgramUnsupportedError("its experts' weights do not have the model's dtype")
        return ExpertProjection(weight, None if bias is None else bias.to(self._dtype).contiguous())

    def _linear(self, projection: Projection) -> _Linear:
        """Allocates memory for adapters of the layers that it consists of."""
        base = self._base(projection)
        if self._loras is None or not projection.parts:
            return base
        return replace(base, lora=self._loras.for_product(projection.parts, base.weight.k))

    def _base(self, projection: Projection) -> _Linear:
        weight = projection.weight
        if isinstance(weight, DenseWeight) and weight.tensor.dtype != self._dtype:
            raise ProgramUnsupportedError("some of its weights do not have the model's dtype")
        if not isinstance(weight, DeviceWeight):
            raise ProgramUnsupportedError("some of its weights have a format that the device does not support")
        bias = None if projection.bias is None else projection.bias.to(self._dtype)
        return _Linear(weight, bias)


def _gate_up(mlp: Mlp) -> Projection:
    projection = joined(mlp.gate, mlp.up)
    if projection is None:
        raise ProgramUnsupportedError("gate and up are not adjacent, or only one of them has a bias")
    return projection


def _whole_sequence(token_ids: torch.Tensor, tables: torch.Tensor, block_size: int) -> StepLayout:
    """One sequence from its start, sampled after each of its tokens. tables int32 [groups, 1, blocks]."""

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=token_ids.device)

    length = len(token_ids)
    places = torch.arange(length, dtype=torch.int32, device=token_ids.device)
    slots = [table[0, places // block_size] * block_size + places % block_size for table in tables]
    return StepLayout(
        rows=numbers(0),
        query_start=numbers(0, length),
        seq_lens=numbers(length),
        token_ids=token_ids.to(torch.int32),
        positions=places,
        slots=slots[0],
        sampled_tokens=places,
        max_query_len=length,
        max_seq_len=length,
        other_groups=tuple(zip(slots[1:], tables[1:], strict=True)),
    )
