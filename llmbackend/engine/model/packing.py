"""From a loaded model to a native program as data: packed weights in one memory, tables that are looked up by row in
another.

Used by code that starts engines on CPU. Invariant: a packed model has reproduced the logits of the model's own modules
for the probes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import nn

from ..attention.interface import LayerShape
from ..config import EngineConfig
from ..cpu.decoder_program import DecoderProgram
from ..cpu.linear import HeadedLinear
from ..cpu.native_memory import can_hold
from ..cpu.native_runner import why_modules, why_no_adapters
from ..cpu.packed_decoder import (
    Memories,
    PackedAttention,
    PackedDecoder,
    PackedExpertMatrix,
    PackedExperts,
    PackedLayer,
    PackedMlp,
    PackedModel,
    PackingPlace,
)
from ..cpu.packed_latent import PackedLatent
from ..cpu.packed_parts import (
    TYPE_OF,
    ArrayAt,
    Bytes,
    Dtype,
    MatrixAt,
    PackedNorm,
    PackedPart,
    PackedProjection,
)
from ..cpu.packed_recurrent import PackedScan, PackedShortConv
from ..cpu.recurrent_operations import StepStates
from ..errors import ProgramUnsupportedError
from ..gpu.ops.ops import Norm
from ..kernels.library import ALIGN_BYTES, aligned
from ..kernels.operations import Type
from ..kernels.weights import PackedWeight, WeightStore
from ..load_progress import part
from ..step import RowTable, StepPlan, flatten
from . import native_experts
from .compatibility import MAX_PROBE_TOKENS
from .decoder_description import Attention, Experts, Layer
from .latent_attention import Latent, split_kept
from .loader import LoadedModel, library_choice
from .lora import adaptable_linears
from .mixture_description import Mixture
from .projections import Mlp, PlainMlp, Projection, parts_of
from .recurrent_layers import Scan, ShortConv

_NAME_OF: dict[Type, Dtype] = {kind: name for name, kind in TYPE_OF.items()}


def pack_model(config: EngineConfig, loaded: LoadedModel, place: PackingPlace | None = None) -> PackedModel:
    """The loaded model as a self-contained program. place: the one that provided the loader's memory. Raises
    ProgramUnsupportedError if it must run as modules."""
    if loaded.kernels is None or loaded.decoder is None or loaded.store is None:
        raise ProgramUnsupportedError(loaded.why_modules)
    if reason := why_modules(config):
        raise ProgramUnsupportedError(reason)
    shapes = loaded.decoder.shapes(loaded.layer_shapes)
    if not all(can_hold(each.key_dim, each.value_dim, config.block_size) for each in shapes.values()):
        raise ProgramUnsupportedError("its heads do not fit the native layout")
    packer = _Packer(loaded.store)
    choice = library_choice(config, loaded.dtype)
    decoder = _packed_decoder(loaded, shapes, packer, "" if choice is None else choice.report)
    if reason := why_no_adapters(config, decoder):
        raise ProgramUnsupportedError(reason)
    packed = PackedModel(decoder, Memories(loaded.store.used, packer.mapped(place)))
    with part("verify"):
        _verify(packed, loaded, config.block_size)
    return packed


def _verify(packed: PackedModel, loaded: LoadedModel, block_size: int) -> None:
    """Raises ProgramUnsupportedError if the program's results differ from those of the modules."""
    assert loaded.kernels is not None
    num_groups = packed.decoder.layer_groups.groups.count
    try:
        program = DecoderProgram(loaded.kernels, packed, num_groups, block_size, MAX_PROBE_TOKENS, MAX_PROBE_TOKENS)
    except ValueError as error:
        raise ProgramUnsupportedError(str(error)) from error

    def logits(token_ids: torch.Tensor) -> torch.Tensor:
        count = len(token_ids)
        table = RowTable(1, count, block_size, num_groups)
        table.token_ids[0] = token_ids.numpy()
        table.block_tables[:, 0, 0] = np.arange(num_groups)
        row, counts = np.zeros(1, np.int32), np.array([count], np.int32)
        step = flatten(StepPlan(row, counts, np.ones(1, np.bool_), counts - 1), table)  # samples at every token
        states = _first_states(count) if packed.decoder.state_bytes else None
        logits = program.forward(step, step.slots_of_groups(table), step.blocks_in_use(table), states)
        return torch.from_numpy(logits.copy())

    loaded.checked.verify(logits)


def _first_states(num_tokens: int) -> StepStates:
    """For one sequence from its start, in slot 0."""
    none = np.full(num_tokens, -1, np.int32)
    return StepStates(np.zeros(1, np.int32), none[:1], none)


class _Packer:
    """Assigns locations to weights: arrays read by every step after the packed matrices, sparsely read ones
    separately."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._tables: list[torch.Tensor] = []
        self._places: dict[int, ArrayAt] = {}
        """Of tables, by their addresses; layers share tables."""
        self._mapped_bytes = 0

    def matrix(self, weight: object) -> MatrixAt:
        assert isinstance(weight, PackedWeight), "native kernels read packed weights"
        base = int(self._store.memory.ctypes.data)
        further = (address - base if address else None for address in (weight.scale, weight.sums, weight.order))
        return MatrixAt(weight.address - base, weight.n, weight.k, _NAME_OF[weight.type], *further)

    def array(self, tensor: torch.Tensor) -> ArrayAt:
        offset_bytes = self._store.add(_bytes(tensor))
        return ArrayAt("resident", offset_bytes, tuple(tensor.shape), _float_dtype(tensor.dtype))

    def table(self, tensor: torch.Tensor) -> ArrayAt:
        """An array of which a step reads only a few rows."""
        tensor = tensor.contiguous()
        if (known := self._places.get(tensor.data_ptr())) is not None:
            return known
        place = ArrayAt("mapped", self._mapped_bytes, tuple(tensor.shape), _float_dtype(tensor.dtype))
        self._tables.append(tensor)
        self._places[tensor.data_ptr()] = place
        self._mapped_bytes += aligned(place.size_bytes)
        return place

    def mapped(self, place: PackingPlace | None) -> Bytes:
        """The memory of all tables, once all arrays have been placed."""
        tables = [(self._places[tensor.data_ptr()].offset_bytes, _bytes(tensor)) for tensor in self._tables]
        if place is not None:
            memory = place.write_tables(self._store.used, tables, self._mapped_bytes)
            if memory is not None:
                return memory
        memory = np.empty(self._mapped_bytes + ALIGN_BYTES, np.uint8)
        memory = memory[-memory.ctypes.data % ALIGN_BYTES :][: self._mapped_bytes]
        for begin, data in tables:
            memory[begin : begin + len(data)] = data
        return memory


def _bytes(tensor: torch.Tensor) -> Bytes:
    data: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return data


def _packed_decoder(
    loaded: LoadedModel, shapes: Mapping[nn.Module, LayerShape], packer: _Packer, kernel_report: str
) -> PackedDecoder:
    decoder, library = loaded.decoder, loaded.kernels
    assert decoder is not None and library is not None
    names = {module: name for name, module in loaded.model.named_modules()}
    layers = tuple(_layer(layer, shapes.get(layer.module), packer, names) for layer in decoder.layers)
    made = PackedDecoder(
        model_type=loaded.model_type,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        dtype=_float_dtype(loaded.dtype),
        kernel_variant=library.library.variant,
        linear_kind=loaded.linear_kind,
        kernel_report=kernel_report,
        embedding=packer.table(decoder.embedding),
        embedding_factor=decoder.embedding_factor,
        layers=layers,
        norm=_packed_norm(decoder.norm, packer),
        head=_projection(decoder.head, packer, ()),
        logit_factor=decoder.logit_factor,
        logit_softcap=decoder.logit_softcap,
    )
    adapted = {part.layer for part, _ in made.parts}
    adaptable = (name for name, each in adaptable_linears(loaded.model) if not isinstance(each, HeadedLinear))
    others = (name for name in adaptable if name not in adapted)
    return msgspec.structs.replace(made, unadapted=next(others, ""))


def _float_dtype(dtype: torch.dtype) -> Literal["float32", "bfloat16"]:
    return "bfloat16" if dtype == torch.bfloat16 else "float32"


_Names = Mapping[nn.Module, str]


def _layer(layer: Layer, shape: LayerShape | None, packer: _Packer, names: _Names) -> PackedLayer:
    factor, attention = layer.residual_factor, layer.attention
    mlp_factor = factor if layer.mlp_factor is None else layer.mlp_factor
    return PackedLayer(
        attention_norm=_norm(layer.attention_norm, packer),
        attention=None if attention is None or shape is None else _attention(attention, shape, packer, names),
        attention_out_norm=_norm(layer.attention_out_norm, packer, factor),
        mlp_norm=_norm(layer.mlp_norm, packer),
        mlp=_mlp(layer.mlp, packer, names),
        experts=_experts(layer.mlp, packer, names) if isinstance(layer.mlp, Mixture) else None,
        mlp_out_norm=_norm(layer.mlp_out_norm, packer, mlp_factor),
        residual_factor=factor,
        mixer_factor=factor if layer.mixer_factor is None else layer.mixer_factor,
        mlp_factor=mlp_factor,
        mixer=None if layer.mixer is None else _mixer(layer.mixer, packer, names),
        is_parallel=layer.is_parallel,
    )


def _mixer(mixer: ShortConv | Scan, packer: _Packer, names: _Names) -> PackedShortConv | PackedScan:
    if isinstance(mixer, Scan):
        return _scan(mixer, packer, names)
    return PackedShortConv(
        project=_projection(mixer.project, packer, _named_parts(mixer.project, names)),
        taps=packer.array(mixer.taps),
        bias=_optional(mixer.bias, packer),
        out=_projection(mixer.out, packer, _named_parts(mixer.out, names)),
    )


def _scan(scan: Scan, packer: _Packer, names: _Names) -> PackedScan:
    return PackedScan(
        is_delta=scan.is_delta,
        projects=tuple(_projection(each, packer, _named_parts(each, names)) for each in scan.projects),
        taps=packer.array(scan.taps),
        conv_bias=_optional(scan.conv_bias, packer),
        columns=scan.columns,
        num_heads=scan.num_heads,
        num_key_heads=scan.num_key_heads,
        key_dim=scan.key_dim,
        value_dim=scan.value_dim,
        decay=packer.array(scan.decay),
        rate_bias=packer.array(scan.rate_bias),
        skip=_optional(scan.skip, packer),
        rate_limits=scan.rate_limits,
        norm=_norm(scan.norm, packer),
        norm_groups=scan.norm_groups,
        norm_is_last=scan.norm_is_last,
        out=_projection(scan.out, packer, _named_parts(scan.out, names)),
        by_key_head=scan.by_key_head,
        factors=_optional(scan.factors, packer),
        beta=scan.beta,
    )


def _optional(tensor: torch.Tensor | None, packer: _Packer) -> ArrayAt | None:
    return None if tensor is None else packer.array(tensor)


def _attention(attention: Attention, shape: LayerShape, packer: _Packer, names: _Names) -> PackedAttention:
    options, gate = attention.options, attention.gate
    return PackedAttention(
        qkv=_qkv(attention, packer, names),
        latent=None if attention.latent is None else _latent(attention.latent, packer, names),
        out=_projection(attention.out, packer, _named_parts(attention.out, names)),
        q_norm=_norm(attention.q_norm, packer),
        k_norm=_norm(attention.k_norm, packer),
        norm_whole=attention.norm_whole,
        cos_sin=None if attention.cos_sin is None else packer.table(attention.cos_sin),
        q_cos_sin=None if attention.rotation.q_cos_sin is None else packer.table(attention.rotation.q_cos_sin),
        pairs=attention.rotation.pairs,
        norm_last=attention.rotation.norm_last,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.key_dim,
        scaling=options.scaling,
        sliding_window=options.sliding_window or 0,
        softcap=options.softcap or 0.0,
        sinks=None if options.sinks is None else packer.array(options.sinks.detach().float()),
        is_gated=attention.is_gated,
        gate=None if gate is None else _projection(gate, packer, _named_parts(gate, names)),
        gate_function=attention.gate_function,
    )


def _qkv(attention: Attention, packer: _Packer, names: _Names) -> tuple[PackedProjection, ...]:
    layers = _named_parts(attention.qkv, names)
    if attention.latent is None:
        parts = list(parts_of(attention.qkv))
        return tuple(_projection(part, packer, _first_of(layers, part.weight.n)) for part in parts)
    split = split_kept(attention.latent, attention.qkv)
    firsts = (0, split[0].weight.n)
    return tuple(
        _projection(part, packer, [PackedPart(layers[0].layer, first, part.weight.n)])
        for part, first in zip(split, firsts, strict=True)
    )


def _latent(latent: Latent, packer: _Packer, names: _Names) -> PackedLatent:
    down, q = latent.q_down, latent.q
    return PackedLatent(
        q_down=None if down is None else _projection(down, packer, _named_parts(down, names)),
        q_norm=_norm(latent.q_norm, packer),
        q=_projection(q, packer, _named_parts(q, names)),
        norm=_packed_norm(latent.norm, packer),
        up=packer.matrix(latent.up),
        down=packer.matrix(latent.down),
    )


def _mlp(mlp: Mlp | PlainMlp | Experts | Mixture | None, packer: _Packer, names: _Names) -> PackedMlp | None:
    """For a mixture, its shared expert."""
    if isinstance(mlp, Mixture):
        mlp = mlp.shared
    if mlp is None:
        return None
    if isinstance(mlp, PlainMlp):
        up, down = (_projection(each, packer, _named_parts(each, names)) for each in (mlp.up, mlp.down))
        return PackedMlp(None, up, down, mlp.activation)
    assert isinstance(mlp, Mlp), "native kernels are given no description with experts that are not packed"
    parts = [_named_parts(each, names) for each in (mlp.gate, mlp.up, mlp.down)]
    if parts[0][0].layer == parts[1][0].layer:  # one layer contains both
        parts[1] = [PackedPart(part.layer, mlp.gate.weight.n + part.first, part.n) for part in parts[1]]
    projections = zip((mlp.gate, mlp.up, mlp.down), parts, strict=True)
    gate, up, down = (_projection(each, packer, own) for each, own in projections)
    return PackedMlp(gate, up, down, "silu" if mlp.activation == "silu" else "gelu_tanh", mlp.gate_factor)


def _experts(mixture: Mixture, packer: _Packer, names: _Names) -> PackedExperts:
    route, experts, shared_gate = mixture.route, mixture.experts, mixture.shared_gate
    gate = None if experts.gate is None else _expert_matrix(experts.gate, packer)
    return PackedExperts(
        router=_projection(mixture.router, packer, ()),
        top_k=route.top_k,
        scores=route.scores,
        renormalises=route.renormalises,
        factor=route.factor,
        correction=None if route.correction is None else packer.array(route.correction),
        groups=route.groups,
        top_groups=route.top_groups,
        of_group=route.of_group,
        gate=gate,
        up=_expert_matrix(experts.up, packer),
        down=_expert_matrix(experts.down, packer),
        activation=experts.activation,
        shared_gate=None if shared_gate is None else _projection(shared_gate, packer, _named_parts(shared_gate, names)),
        epsilon=route.epsilon,
    )


def _expert_matrix(experts: native_experts.PackedExperts, packer: _Packer) -> PackedExpertMatrix:
    bias = None if experts.bias is None else packer.array(experts.bias)
    return PackedExpertMatrix(packer.matrix(experts.first), bias)


def _norm(norm: Norm | None, packer: _Packer, factor: float = 1.0) -> PackedNorm | None:
    return None if norm is None else _packed_norm(norm, packer, factor)


def _packed_norm(norm: Norm, packer: _Packer, factor: float = 1.0) -> PackedNorm:
    bias = None if norm.bias is None else packer.array(norm.bias * factor)
    return PackedNorm(packer.array(norm.weight * factor), norm.eps, bias, norm.centred)


def _projection(projection: Projection, packer: _Packer, parts: Sequence[PackedPart]) -> PackedProjection:
    bias = None if projection.bias is None else packer.array(projection.bias)
    return PackedProjection(packer.matrix(projection.weight), bias, tuple(parts))


def _named_parts(projection: Projection, names: _Names) -> list[PackedPart]:
    return [PackedPart(names[layer], 0, n) for layer, n in projection.parts]


def _first_of(parts: list[PackedPart], n: int) -> list[PackedPart]:
    """Removes and returns the first parts, which have n outputs in total."""
    taken: list[PackedPart] = []
    while n > 0:
        taken.append(parts.pop(0))
        n -= taken[-1].n
    return taken
