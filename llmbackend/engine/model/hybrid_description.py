"""What a decoder with recurrent layers computes, read off its transformers modules as decoder_description.py does.

For: the loader. Does not know: kernels, slots of states. Invariant: as there; a layer that is not understood raises
ProgramUnsupportedError, and since no modules compute such a model here, it is refused with that text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..attention.interface import AttentionOptions
from ..errors import ProgramUnsupportedError
from .compatibility import is_recurrent, needs_program
from .decoder_description import Attention, Decoder, Experts, Layer, describe, experts_of
from .mixture_description import Mixture
from .projections import Mlp, children_of, expect_children, halves_of, mlp_of, projection_of, qkv_of
from .recognition import embedding_factor_of, logit_factor_of, mlp_activation, norm_of
from .recurrent_layers import PARTS, Scan, ShortConv, delta_net_of, mamba_of, short_conv_of
from .rotation import Rotation, Rotations
from .text_part import text_part


def describe_any(
    model: Any, options: Mapping[nn.Module, AttentionOptions], max_model_len: int, with_experts: bool = False
) -> Decoder:
    """As `describe`, also of models with recurrent layers. What else goes wrong is a reason, too: an unknown module may
    break any assumption."""
    try:
        if not is_recurrent(model.config):
            return describe(model, options, max_model_len, with_experts)
        return _describe_hybrid(model, options, max_model_len)
    except ProgramUnsupportedError:
        raise
    except Exception as error:
        reason = f"its {type(model).__name__} is not understood ({type(error).__name__}: {error})"
        raise ProgramUnsupportedError(reason) from error


def check_layers(model: Any) -> None:
    """Of a model without memory for weights: raises ValueError where its layers have other parts than those that can be
    described, before their weights are read."""
    try:
        family = _family(model.base_model)
        for layer in model.base_model.layers:
            if (module := getattr(layer, family.mixer, None)) is not None:
                expect_children(module, PARTS[family.mixer_of], frozenset({"act"}))
    except ProgramUnsupportedError as reason:
        raise needs_program(model.config, str(reason)) from reason


@torch.no_grad()
def _describe_hybrid(model: Any, options: Mapping[nn.Module, AttentionOptions], max_model_len: int) -> Decoder:
    config, base = model.config.get_text_config(decoder=True), text_part(model)
    family = _family(base)
    expect_children(model, {"model", "lm_head"})
    expect_children(base, {"embed_tokens", "layers", family.norm}, frozenset({"rotary_emb"}))
    rotary = getattr(base, "rotary_emb", None)
    tables = None if rotary is None else Rotations(rotary, max_model_len, base.embed_tokens.weight.device)
    layers = tuple(_layer(layer, family, options, tables) for layer in base.layers)
    factor = float(getattr(config, "residual_multiplier", None) or 1.0)
    return Decoder(
        embedding=base.embed_tokens.weight.detach(),
        embedding_factor=embedding_factor_of(base.embed_tokens, config),
        layers=tuple(replace(layer, residual_factor=factor) for layer in layers),
        norm=norm_of(getattr(base, family.norm)),
        head=projection_of(model.get_output_embeddings()),
        logit_factor=logit_factor_of(config),
        logit_softcap=0.0,
    )


@dataclass(frozen=True, slots=True)
class _Family:
    """How the parts of a model and of its layers are named, and who reads them."""

    norm: str
    """The last one."""
    attention_norm: str
    mlp_norm: str
    mlp: str
    mlp_of: Callable[[Any], Mlp | Experts | Mixture]
    mixer: str
    mixer_of: Callable[[Any], ShortConv | Scan]
    attention_of: Callable[[Any, AttentionOptions, Rotations | None], Attention]


def _layer(
    layer: Any, family: _Family, options: Mapping[nn.Module, AttentionOptions], tables: Rotations | None
) -> Layer:
    attends = getattr(layer, "self_attn", None) is not None
    name = "self_attn" if attends else family.mixer
    expect_children(layer, {name, family.mlp, family.attention_norm, family.mlp_norm})
    module = getattr(layer, name)
    return Layer(
        module=module,
        attention_norm=norm_of(getattr(layer, family.attention_norm)),
        attention=family.attention_of(module, options[module], tables) if attends else None,
        attention_out_norm=None,
        mlp_norm=norm_of(getattr(layer, family.mlp_norm)),
        mlp=family.mlp_of(getattr(layer, family.mlp)),
        mlp_out_norm=None,
        residual_factor=1.0,
        mixer=None if attends else family.mixer_of(module),
    )


def _attention(
    module: Any, options: AttentionOptions, tables: Rotations | None, out: str = "o_proj",
    norms: tuple[str, str] | None = None,
) -> Attention:  # fmt: skip
    """norms: names of those of queries and keys."""
    expect_children(module, {"q_proj", "k_proj", "v_proj", out, *(norms or ())})
    q_norm, k_norm = (norm_of(getattr(module, name)) for name in norms) if norms else (None, None)
    projected = projection_of(getattr(module, out))
    num_queries = module.q_proj.weight.shape[0]
    if num_queries not in (projected.weight.k, 2 * projected.weight.k):
        raise ProgramUnsupportedError(f"{type(module).__name__} has {num_queries} queries for {projected.weight.k}")
    return Attention(
        qkv=qkv_of([projection_of(each) for each in (module.q_proj, module.k_proj, module.v_proj)]),
        out=projected,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_whole=False,
        rotation=Rotation(None if tables is None else tables.table(None, int(module.head_dim))),
        options=options,
        is_gated=num_queries != projected.weight.k,
    )


def _mlp_or_experts(module: Any) -> Mlp | Experts | Mixture:
    return experts_of(module) if hasattr(module, "experts") else mlp_of(module)


def _lfm2_mlp(module: Any) -> Mlp:
    """Its activation is written into its code."""
    expect_children(module, {"w1", "w2", "w3"})
    return Mlp(projection_of(module.w1), projection_of(module.w3), projection_of(module.w2), "silu")


def _granite_mlp(module: Any) -> Mlp:
    """Gate and up as one matrix."""
    expect_children(module, {"input_linear", "output_linear"}, frozenset({"activation"}))
    gate, up = halves_of(module.input_linear)
    down = projection_of(module.output_linear)
    return Mlp(gate, up, down, mlp_activation(module))


_LFM2 = _Family(
    "embedding_norm", "operator_norm", "ffn_norm", "feed_forward", _lfm2_mlp, "conv", short_conv_of,
    partial(_attention, out="out_proj", norms=("q_layernorm", "k_layernorm")),
)  # fmt: skip
_QWEN = _Family(
    "norm", "input_layernorm", "post_attention_layernorm", "mlp", _mlp_or_experts, "linear_attn", delta_net_of,
    partial(_attention, norms=("q_norm", "k_norm")),
)  # fmt: skip
_GRANITE = _Family(
    "norm", "input_layernorm", "post_attention_layernorm", "shared_mlp", _granite_mlp, "mamba", mamba_of, _attention
)
_BAMBA = _Family(
    "final_layernorm", "input_layernorm", "pre_ff_layernorm", "feed_forward", mlp_of, "mamba", mamba_of, _attention
)


def _family(base: Any) -> _Family:
    names = {name for layer in base.layers for name in children_of(layer)}
    for family in (_LFM2, _QWEN, _GRANITE, _BAMBA):
        if hasattr(base, family.norm) and {family.mixer, family.mlp, family.mlp_norm} <= names:
            return family
    raise ProgramUnsupportedError(f"its layers consist of {', '.join(sorted(names))}")
