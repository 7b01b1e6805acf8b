"""What a decoder with recurrent layers computes, read off its transformers modules like decoder_description.py.

Used by the loader, also for Granite 4 without such layers. The invariant of decoder_description.py holds, except that a
model with recurrent layers cannot fall back to its modules: a ProgramUnsupportedError refuses the model with its
message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from ..attention.interface import AttentionOptions
from ..errors import ProgramUnsupportedError
from ..gpu.ops.ops import Norm
from .compatibility import is_recurrent, layer_types, needs_program
from .decoder_description import Attention, Decoder, Experts, Layer, decoder_of, describe, experts_of, gates_of
from .mixture_description import Mixture
from .projections import (
    Mlp,
    PlainMlp,
    children_of,
    expect_children,
    halves_of,
    mlp_of,
    plain_mlp_of,
    projection_of,
    qkv_of,
)
from .recognition import mlp_activation, norm_of
from .recurrent_layers import reader_of
from .rotation import GATES, Heads, Rotation, Rotations
from .text_part import text_part

_MIXERS: Final = ("conv", "linear_attn", "mamba", "mixer")
_EMBEDDINGS: Final = ("embed_tokens", "embeddings")
_LAST_NORMS: Final = ("norm", "final_layernorm", "embedding_norm", "norm_f")
_ROTARY: Final = ("rotary_emb", "pos_emb")


def describe_any(
    model: Any, options: Mapping[nn.Module, AttentionOptions], max_model_len: int, with_experts: bool = False
) -> Decoder:
    """As `describe`, but also for models with recurrent layers, and those of their families without. Any other
    exception becomes a reason too, because an unknown module may break any assumption."""
    try:
        layers = getattr(text_part(model), "layers", ())
        if is_recurrent(model.config) or any(getattr(layer, "shared_mlp", None) is not None for layer in layers):
            return _describe_hybrid(model, options, max_model_len)
        return describe(model, options, max_model_len, with_experts)
    except ProgramUnsupportedError:
        raise
    except Exception as error:
        reason = f"its {type(model).__name__} is not recognised ({type(error).__name__}: {error})"
        raise ProgramUnsupportedError(reason) from error


def check_layers(model: Any) -> None:
    """For a model without memory for weights: raises ValueError if its layers have parts that cannot be described,
    before weights are read."""
    try:
        _layer_reader(model.base_model)
        for layer in model.base_model.layers:
            for module in (getattr(layer, name, None) for name in _MIXERS):
                if module is not None and _is_recurrent(module):
                    reader_of(module)
    except ProgramUnsupportedError as reason:
        raise needs_program(model.config, str(reason)) from reason


@torch.no_grad()
def _describe_hybrid(model: Any, options: Mapping[nn.Module, AttentionOptions], max_model_len: int) -> Decoder:
    config, base = model.config.get_text_config(decoder=True), text_part(model)
    read_layer = _layer_reader(base)
    embedding, norm = (_one_of(base, names) for names in (_EMBEDDINGS, _LAST_NORMS))
    expect_children(base, {embedding, "layers", norm}, frozenset(_ROTARY))
    embeddings = getattr(base, embedding)
    rotary = next((getattr(base, name) for name in _ROTARY if hasattr(base, name)), None)
    kinds = layer_types(config)
    tables = None if rotary is None else Rotations(rotary, max_model_len, embeddings.weight.device, kinds)
    layers = tuple(read_layer(layer, options, tables) for layer in base.layers)
    factor = float(getattr(config, "residual_multiplier", None) or 1.0)
    layers = tuple(replace(layer, residual_factor=factor * layer.residual_factor) for layer in layers)
    return decoder_of(model, embeddings, layers, norm_of(getattr(base, norm)))


def _one_of(base: Any, names: tuple[str, ...]) -> str:
    name = next((name for name in names if hasattr(base, name)), None)
    if name is None:
        raise ProgramUnsupportedError(f"{type(base).__name__} has none of {', '.join(names)}")
    return name


LayerReader = Callable[[Any, Mapping[nn.Module, AttentionOptions], Rotations | None], Layer]


@dataclass(frozen=True, slots=True)
class _Family:
    """How the parts of a layer are named, and the functions that read them."""

    norms: tuple[str, str]
    """Before attention or the recurrent module, and before the MLP."""
    mixer: str
    mlps: frozenset[str]
    """Alternative names of the MLP's parts; a layer has at least one of them."""
    mlp_of: Callable[[Any], Mlp | Experts | Mixture]
    """Reads the MLP of a layer."""
    attention_of: Callable[[Any, AttentionOptions, Rotations | None], Attention]
    out_norms: tuple[str, str] = ("", "")
    """After attention or the recurrent module, and after the MLP; "" = none. A layer may lack them."""

    def read(self, layer: Any, options: Mapping[nn.Module, AttentionOptions], tables: Rotations | None) -> Layer:
        attends = getattr(layer, "self_attn", None) is not None
        name = "self_attn" if attends else self.mixer
        expect_children(layer, {name, *self.norms}, self.mlps.union(self.out_norms))
        module, out_norms = getattr(layer, name), [self._out_norm(layer, each) for each in self.out_norms]
        return Layer(
            module=module,
            attention_norm=norm_of(getattr(layer, self.norms[0])),
            attention=self.attention_of(module, options[module], tables) if attends else None,
            attention_out_norm=out_norms[0],
            mlp_norm=norm_of(getattr(layer, self.norms[1])),
            mlp=self.mlp_of(layer),
            mlp_out_norm=out_norms[1],
            residual_factor=1.0,
            mixer=None if attends else reader_of(module)(module),
        )

    @staticmethod
    def _out_norm(layer: Any, name: str) -> Norm | None:
        module = getattr(layer, name, None)
        return None if module is None or isinstance(module, nn.Identity) else norm_of(module)


def _attention(
    module: Any, options: AttentionOptions, tables: Rotations | None, out: str = "o_proj",
    norms: tuple[str, str] | None = None,
) -> Attention:  # fmt: skip
    """norms: names of the query and key norms."""
    expect_children(module, {"q_proj", "k_proj", "v_proj", out, *(norms or ())}, frozenset(GATES))
    q_norm, k_norm = (norm_of(getattr(module, name)) for name in norms) if norms else (None, None)
    projected = projection_of(getattr(module, out))
    num_queries = module.q_proj.weight.shape[0]
    if num_queries not in (projected.weight.k, 2 * projected.weight.k):
        raise ProgramUnsupportedError(f"{type(module).__name__} has {num_queries} queries for {projected.weight.k}")
    parts = [projection_of(each) for each in (module.q_proj, module.k_proj, module.v_proj)]
    layer, (gates, gate) = int(getattr(module, "layer_idx", 0)), gates_of(module)
    attention = Attention(
        qkv=qkv_of(parts),
        out=projected,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_whole=q_norm is not None and len(q_norm.weight) != int(module.head_dim),
        rotation=Rotation(None if tables is None else tables.table(tables.kind_of(layer), int(module.head_dim))),
        options=options,
        is_gated=num_queries != projected.weight.k,
        gate=gate,
    )
    if gate is None or tables is None:
        return attention
    sizes = [each.weight.n for each in (*parts, projected)]
    outputs = dict(zip(("q_proj", "k_proj", "v_proj", out), sizes, strict=True))
    num_kv_heads = parts[1].weight.n // int(module.head_dim)
    heads = Heads(outputs, int(module.head_dim), num_kv_heads, None, None, False, gates)
    return replace(attention, gate_function=tables.gate_function(layer, module, heads))


def _qwen_mlp(layer: Any) -> Mlp | Experts | Mixture:
    return experts_of(layer.mlp) if hasattr(layer.mlp, "experts") else mlp_of(layer.mlp)


def _lfm2_mlp(layer: Any) -> Mlp | Experts | Mixture:
    """Its activation is hard-coded in the module."""
    module = layer.feed_forward
    if hasattr(module, "experts"):
        return experts_of(module)
    expect_children(module, {"w1", "w2", "w3"})
    return Mlp(projection_of(module.w1), projection_of(module.w3), projection_of(module.w2), "silu")


def _granite_mlp(layer: Any) -> Mlp | Experts | Mixture:
    """Gate and up projections are one matrix; if there are experts, this MLP is the shared one."""
    module = layer.shared_mlp
    expect_children(module, {"input_linear", "output_linear"}, frozenset({"activation"}))
    gate, up = halves_of(module.input_linear)
    shared = Mlp(gate, up, projection_of(module.output_linear), mlp_activation(module))
    if (experts := getattr(layer, "block_sparse_moe", None)) is None:
        return shared
    mixture = experts_of(experts)
    if not isinstance(mixture, Mixture):
        raise ProgramUnsupportedError("its layers have experts that are not packed")
    return replace(mixture, shared=shared)


_USUAL_NORMS: Final = ("input_layernorm", "post_attention_layernorm")
_DELTA_NET: Final = _Family(
    _USUAL_NORMS, "linear_attn", frozenset({"mlp"}), _qwen_mlp, partial(_attention, norms=("q_norm", "k_norm"))
)
_FAMILIES: Final = (
    _Family(
        ("operator_norm", "ffn_norm"), "conv", frozenset({"feed_forward"}), _lfm2_mlp,
        partial(_attention, norms=("q_norm", "k_norm")), ("post_operator_norm", "post_ffn_norm"),
    ),
    _Family(
        ("operator_norm", "ffn_norm"), "conv", frozenset({"feed_forward"}), _lfm2_mlp,
        partial(_attention, out="out_proj", norms=("q_layernorm", "k_layernorm")),
    ),
    _DELTA_NET,
    _Family(_USUAL_NORMS, "mamba", frozenset({"shared_mlp", "block_sparse_moe"}), _granite_mlp, _attention),
    _Family(
        ("input_layernorm", "pre_ff_layernorm"), "mamba", frozenset({"feed_forward"}),
        lambda layer: mlp_of(layer.feed_forward), _attention,
    ),
)  # fmt: skip


def _normed_after(layer: Any, options: Mapping[nn.Module, AttentionOptions], tables: Rotations | None) -> Layer:
    """OLMo Hybrid: a layer with attention applies its norms after its blocks."""
    if not hasattr(layer, "self_attn"):
        return _DELTA_NET.read(layer, options, tables)
    expect_children(layer, {"self_attn", "mlp", "post_attention_layernorm", "post_feedforward_layernorm"})
    module = layer.self_attn
    return Layer(
        module=module,
        attention_norm=None,
        attention=_attention(module, options[module], tables, norms=("q_norm", "k_norm")),
        attention_out_norm=norm_of(layer.post_attention_layernorm),
        mlp_norm=None,
        mlp=mlp_of(layer.mlp),
        mlp_out_norm=norm_of(layer.post_feedforward_layernorm),
        residual_factor=1.0,
    )


def _falcon_h1(layer: Any, options: Mapping[nn.Module, AttentionOptions], tables: Rotations | None) -> Layer:
    """Attention and Mamba2 in parallel, with factors."""
    expect_children(layer, {"self_attn", "mamba", "feed_forward", "input_layernorm", "pre_ff_layernorm"})
    module, feed_forward = layer.self_attn, layer.feed_forward
    of_input, mlp = float(layer.attention_in_multiplier), mlp_of(feed_forward)
    attention = _attention(module, options[module], tables)
    return Layer(
        module=module,
        attention_norm=norm_of(layer.input_layernorm),
        attention=_factored(attention, of_input, float(module.key_multiplier)),
        attention_out_norm=None,
        mlp_norm=norm_of(layer.pre_ff_layernorm),
        mlp=replace(mlp, gate_factor=float(feed_forward.gate_multiplier)),
        mlp_out_norm=None,
        residual_factor=of_input * float(layer.attn_out_multiplier),
        mixer=reader_of(layer.mamba)(layer.mamba),
        mixer_factor=float(layer.ssm_out_multiplier),
        mlp_factor=float(feed_forward.down_multiplier),
    )


def _factored(attention: Attention, of_input: float, of_keys: float) -> Attention:
    """Applies factors to the input and the keys. Both go into the scaling of scores; the factor of values is left to
    the sum to which the output is added. Biases are not scaled by the input's factor."""
    projections = (attention.qkv, attention.out)
    qkv, out = (replace(each, bias=None if each.bias is None else each.bias / of_input) for each in projections)
    scaling = attention.options.scaling * of_input**2 * of_keys
    return replace(attention, qkv=qkv, out=out, options=replace(attention.options, scaling=scaling))


def _one_block(layer: Any, options: Mapping[nn.Module, AttentionOptions], tables: Rotations | None) -> Layer:
    """Nemotron-H and Mamba2: a layer is only attention, recurrent, an MLP, or experts."""
    expect_children(layer, {"norm", "mixer"})
    module, norm = layer.mixer, norm_of(layer.norm)
    attends, mixes = module in options, _is_recurrent(module)
    is_first = attends or mixes
    return Layer(
        module=module,
        attention_norm=norm if is_first else None,
        attention=_attention(module, options[module], tables) if attends else None,
        attention_out_norm=None,
        mlp_norm=None if is_first else norm,
        mlp=None if is_first else _mlp_or_experts(module),
        mlp_out_norm=None,
        residual_factor=1.0,
        mixer=reader_of(module)(module) if mixes else None,
    )


def _mlp_or_experts(module: Any) -> Mlp | PlainMlp | Experts | Mixture:
    return experts_of(module) if hasattr(module, "experts") else plain_mlp_of(module) or mlp_of(module)


def _is_recurrent(module: Any) -> bool:
    return hasattr(module, "conv1d") or hasattr(module, "conv")


def _layer_reader(base: Any) -> LayerReader:
    of_layers = [children_of(layer) for layer in base.layers]
    names = set().union(*of_layers)
    if names == {"norm", "mixer"}:
        return _one_block
    if all({"self_attn", "mamba"} <= parts for parts in of_layers):
        return _falcon_h1
    if {"linear_attn", "post_feedforward_layernorm"} <= names:
        return _normed_after
    for family in _FAMILIES:
        wanted = {
            *family.norms,
            *filter(None, family.out_norms),
            *({family.mixer} if is_recurrent(base.config) else ()),
        }
        if wanted <= names and not names.isdisjoint(family.mlps):
            return family.read
    raise ProgramUnsupportedError(f"its layers consist of {', '.join(sorted(names))}")
