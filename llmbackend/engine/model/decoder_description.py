"""What a decoder-only model computes, read off its transformers modules: numbers and weights, no code.

Used by cpu/decoder_program.py and gpu/program.py, which compute it with native kernels and on an accelerator.
Invariants: modules are read, never changed; anything not recognised, by name or by a probe, raises
ProgramUnsupportedError, and the model runs as its modules. What a description leaves out shows when the program's
logits are compared with the modules' (CheckedModel.verify), before the program is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..attention.interface import AttentionOptions, LayerShape
from ..errors import ProgramUnsupportedError
from ..gpu.ops.ops import Activation, Norm
from ..gpu.weights.dense import DenseWeight
from ..gpu.weights.experts import DenseExperts, ExpertProjection, QuantizedExperts
from .latent_attention import Latent, is_latent, latent_parts
from .mixture_description import OUT_NORM, Mixture, describe_mixture
from .native_experts import NativeExperts, activation_of
from .projections import (
    Mlp,
    PlainMlp,
    Projection,
    children_of,
    expect_children,
    mlp_of,
    plain_mlp_of,
    projection_of,
    qkv_of,
)
from .recognition import NORMS_BY_PLACE, NORMS_OF_PARALLEL, embedding_factor_of, finish_of, norm_of
from .recurrent_layers import Scan, ShortConv
from .rotation import GATES, GateFunction, Heads, Rotation, Rotations, query_scale_of
from .text_part import text_part


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention: projections, norms, rotation, options."""

    qkv: Projection
    """Query, key and value as one matrix, on a CPU also as a StackedWeight; for latent attention, what is cached per
    token."""
    out: Projection
    q_norm: Norm | None
    """Over each head, or with norm_whole over all heads together."""
    k_norm: Norm | None
    norm_whole: bool
    rotation: Rotation
    options: AttentionOptions
    is_gated: bool = False
    """In qkv, each head of queries is followed by as many gates; the head's output is multiplied by their sigmoid."""
    gate: Projection | None = None
    """A separate projection of gates instead: one per number of all heads, or one per head."""
    gate_function: GateFunction = "sigmoid"
    latent: Latent | None = None

    @property
    def cos_sin(self) -> torch.Tensor | None:
        return self.rotation.cos_sin


@dataclass(frozen=True, slots=True)
class Experts:
    """The sum over a token's experts of share * down(activation(gate) * up)"""

    router: Projection
    """[experts, width]: a token's experts are the top_k of its largest outputs."""
    top_k: int
    renormalises: bool
    """Whether a token's shares, from a softmax over all experts, are divided by their sum."""
    gate_up: ExpertProjection
    """Matrices [2 * n, width], gates and ups in the order that the activation expects."""
    down: ExpertProjection
    """Matrices [width, n]"""
    activation: Activation
    add_up: Callable[[torch.Tensor], None] | None = None
    """If each expert's n is split over ranks: sums the parts' results in place."""


@dataclass(frozen=True, slots=True)
class Layer:
    """h += factor * out_norm(block(in_norm(h))), for attention and then for the MLP. A norm or block that is None is
    omitted."""

    module: nn.Module
    """The attention module, the key of the layer's KV memory; in a recurrent layer, the module that replaces it."""
    attention_norm: Norm | None
    attention: Attention | None
    """None = replaced by a mixer, or absent."""
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | PlainMlp | Experts | Mixture | None
    """Mixture: only on a CPU."""
    mlp_out_norm: Norm | None
    residual_factor: float
    """For all blocks without a factor of their own."""
    mixer: ShortConv | Scan | None = None
    """A recurrent layer's replacement for attention. If there is attention too, both read the same input."""
    mixer_factor: float | None = None
    mlp_factor: float | None = None
    is_parallel: bool = False
    """Whether the MLP reads the output of attention's in_norm."""

    @property
    def attending(self) -> Attention:
        """The attention of a model without recurrent layers."""
        assert self.attention is not None, "a recurrent layer has no attention"
        return self.attention


@dataclass(frozen=True, slots=True)
class Decoder:
    """Logits are x = head(norm(h)) * logit_factor, or with a softcap: softcap * tanh(x / softcap)."""

    embedding: torch.Tensor
    """[vocab, width], in the model's dtype"""
    embedding_factor: float
    layers: tuple[Layer, ...]
    norm: Norm
    head: Projection
    logit_factor: float
    logit_softcap: float
    """0 = off."""

    def shapes(self, of_modules: Mapping[nn.Module, LayerShape]) -> dict[nn.Module, LayerShape]:
        """The KV shape of each layer with attention, as a program caches it."""
        latents = {each.module: each.attention.latent for each in self.layers if each.attention is not None}
        found = ((module, latents.get(module)) for module in of_modules)
        return {module: of_modules[module] if latent is None else latent.shape for module, latent in found}

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence."""
        return 4 * sum(layer.mixer.state_floats for layer in self.layers if layer.mixer is not None)


def why_not_on_accelerator(decoder: Decoder) -> str:
    """What only the CPU's program supports; "" = nothing."""
    layers = decoder.layers
    rotations = [layer.attention.rotation for layer in layers if layer.attention is not None]
    norms = [decoder.norm]
    for layer in layers:
        norms += filter(None, (layer.attention_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm))
    found = {
        "its layer norms": any(norm.centred for norm in norms),
        "its rotation of adjacent pairs": any(rotation.pairs for rotation in rotations),
        "its scaled queries": any(rotation.q_cos_sin is not None for rotation in rotations),
        "its norms after the rotation": any(rotation.norm_last for rotation in rotations),
        "its MLPs without a gate": any(isinstance(layer.mlp, PlainMlp) for layer in layers),
        "its parallel attention and MLP": any(layer.is_parallel for layer in layers),
        "its gates of attention": any(layer.attention and layer.attention.gate for layer in layers),
    }
    names = [name for name, is_there in found.items() if is_there]
    return f"{' and '.join(names)}: supported only by the CPU's program" if names else ""


@torch.no_grad()
def describe(
    model: Any, options: Mapping[nn.Module, AttentionOptions], max_model_len: int, with_experts: bool = False
) -> Decoder:
    """options: what each attention module requested, in layer order. with_experts: whether layers may be mixtures of
    experts. Raises ProgramUnsupportedError."""
    config = model.config.get_text_config(decoder=True)
    base = text_part(model)
    expect_children(model, {"model", "lm_head"})
    norm_name = "final_layernorm" if hasattr(base, "final_layernorm") else "norm"
    expect_children(base, {"embed_tokens", "layers", norm_name, "rotary_emb"})
    kinds, scale = list(getattr(config, "layer_types", None) or ()), query_scale_of(config)
    rotations = Rotations(base.rotary_emb, max_model_len, base.embed_tokens.weight.device, kinds, scale)
    if not with_experts and any(_has_plain_experts(layer) for layer in base.layers):
        raise ProgramUnsupportedError("its layers have experts that are not packed")
    layers = tuple(_layer(i, layer, options, config, rotations) for i, layer in enumerate(base.layers))
    norm = norm_of(getattr(base, norm_name), base.embed_tokens.weight.shape[1])
    return decoder_of(model, base.embed_tokens, layers, norm)


def decoder_of(model: Any, embeddings: Any, layers: tuple[Layer, ...], norm: Norm) -> Decoder:
    """With the model's head, and what is done to embeddings and logits."""
    config = model.config.get_text_config(decoder=True)
    logit_factor, logit_softcap = finish_of(model, config)
    return Decoder(
        embedding=embeddings.weight.detach(),
        embedding_factor=embedding_factor_of(embeddings, config),
        layers=layers,
        norm=norm,
        head=projection_of(model.get_output_embeddings()),
        logit_factor=logit_factor,
        logit_softcap=logit_softcap,
    )


def _has_plain_experts(layer: Any) -> bool:
    experts = getattr(_feed_forward(layer), "experts", None)
    return experts is not None and not isinstance(experts, NativeExperts)


def _feed_forward(layer: Any) -> Any:
    """None = it has another name."""
    return getattr(layer, "mlp", getattr(layer, "block_sparse_moe", None))


def _layer(
    index: int, layer: Any, options: Mapping[nn.Module, AttentionOptions], config: Any, rotations: Rotations
) -> Layer:
    names, mlp = frozenset(children_of(layer) - {"self_attn", "mlp", "block_sparse_moe"}), _feed_forward(layer)
    placed = NORMS_BY_PLACE.get(names)
    if placed is None or not hasattr(layer, "self_attn") or mlp is None:
        raise ProgramUnsupportedError(f"{type(layer).__name__} has the norms {', '.join(sorted(names))}")
    if names == NORMS_OF_PARALLEL and hasattr(mlp, "experts"):
        raise ProgramUnsupportedError(f"{type(layer).__name__} has experts beside attention")
    width = int(config.hidden_size)
    norms = [norm_of(getattr(layer, name), width) if name else None for name in placed]
    return Layer(
        module=layer.self_attn,
        attention_norm=norms[0],
        attention=_attention(index, layer.self_attn, options[layer.self_attn], rotations),
        attention_out_norm=norms[1],
        mlp_norm=norms[2],
        mlp=experts_of(mlp) if hasattr(mlp, "experts") else plain_mlp_of(mlp) or mlp_of(mlp),
        mlp_out_norm=norm_of(getattr(mlp, OUT_NORM)) if hasattr(mlp, OUT_NORM) else norms[3],
        residual_factor=float(
            getattr(config, "residual_multiplier", None) or getattr(layer, "residual_scale", None) or 1
        ),
        is_parallel=names == NORMS_OF_PARALLEL,
    )


def _attention(index: int, module: Any, options: AttentionOptions, rotations: Rotations) -> Attention:
    if is_latent(module):
        parts = latent_parts(index, module, rotations)
        return Attention(parts.kept, parts.out, None, None, False, parts.rotation, options, latent=parts.latent)
    out_name = "dense" if hasattr(module, "dense") else "o_proj"
    names = ["qkv_proj"] if hasattr(module, "qkv_proj") else ["q_proj", "k_proj", "v_proj"]
    norm_names = ("query_layernorm", "key_layernorm") if hasattr(module, "query_layernorm") else ("q_norm", "k_norm")
    expect_children(module, {*names, out_name}, frozenset((*norm_names, *GATES)))
    projections = {name: projection_of(getattr(module, name)) for name in (*names, out_name)}
    gates, gate = gates_of(module)
    if len(names) == 3 and projections["k_proj"].weight.n != projections["v_proj"].weight.n:
        raise ProgramUnsupportedError(f"{type(module).__name__} has keys and values of different sizes")
    qkv = projections["qkv_proj"] if len(names) == 1 else qkv_of([projections[name] for name in names])
    out = projections[out_name]
    head_dim = int(module.head_dim)
    num_kv_heads = (qkv.weight.n - out.weight.k) // (2 * head_dim)
    widths = (out.weight.k, num_kv_heads * head_dim)
    norms = [_head_norm(getattr(module, name, None), *each) for name, *each in zip(norm_names, widths, strict=True)]
    norm_whole = norms[0] is not None and len(norms[0].weight) != head_dim
    outputs = {name: projection.weight.n for name, projection in projections.items()}
    heads = Heads(outputs, head_dim, num_kv_heads, norms[0], norms[1], norm_whole, gates)
    return Attention(
        qkv=qkv,
        out=out,
        q_norm=norms[0],
        k_norm=norms[1],
        norm_whole=norm_whole,
        rotation=rotations.of(index, module, heads),
        options=options,
        gate=gate,
        gate_function="sigmoid" if gate is None else rotations.gate_function(index, module, heads),
    )


def gates_of(module: Any) -> tuple[dict[str, int], Projection | None]:
    """The projection that yields attention's gates, or None; before it, its number of outputs by its name, or {}."""
    name = next((name for name in GATES if getattr(module, name, None) is not None), None)
    gate = None if name is None else projection_of(getattr(module, name))
    return {} if name is None or gate is None else {name: gate.weight.n}, gate


def _head_norm(module: Any, whole: int) -> Norm | None:
    """Over each head, or over all heads together, which have `whole` numbers."""
    if module is None:
        return None
    weight = getattr(module, "weight", None)
    norm = norm_of(module, whole if weight is None else weight.shape[-1])
    if norm.centred or (weight is not None and weight.dim() != 1):
        raise ProgramUnsupportedError(f"{type(module).__name__} of heads is not an RMS norm")
    return norm


def experts_of(module: Any) -> Experts | Mixture:
    if isinstance(module.experts, NativeExperts):
        return describe_mixture(module)
    router_name = "router" if hasattr(module, "router") else "gate"
    expect_children(module, {router_name, "experts"})
    router, experts = getattr(module, router_name), module.experts
    _expect_parameters(router, {"weight"}, {"bias"})
    if not isinstance(experts, QuantizedExperts):
        _expect_parameters(experts, {"gate_up_proj", "down_proj"}, {"gate_up_proj_bias", "down_proj_bias"})
    gate_up, down = (_by_expert(experts, name) for name in ("gate_up_proj", "down_proj"))
    sizes = gate_up.weight.num_experts, down.weight.n
    if router.weight.shape != sizes or (gate_up.weight.k, gate_up.weight.n) != (down.weight.n, 2 * down.weight.k):
        raise ProgramUnsupportedError(f"{type(experts).__name__} stores its weights in another order")
    bias = getattr(router, "bias", None)
    return Experts(
        router=Projection(DenseWeight(router.weight.detach()), None if bias is None else bias.detach().float()),
        top_k=int(router.top_k),
        renormalises=_renormalises(router),
        gate_up=gate_up,
        down=down,
        activation=_gate(experts),
    )


def _expect_parameters(module: nn.Module, names: set[str], optional: set[str]) -> None:
    found = {name for name, _ in module.named_parameters()}
    if not names <= found <= names | optional:
        raise ProgramUnsupportedError(f"{type(module).__name__} has the weights {', '.join(sorted(found))}")


def _by_expert(experts: Any, name: str) -> ExpertProjection:
    if isinstance(experts, QuantizedExperts):
        return experts.projection(name)
    weight, bias = getattr(experts, name).detach(), getattr(experts, f"{name}_bias", None)
    if getattr(experts, "is_transposed", False):
        weight = weight.transpose(1, 2)
    return ExpertProjection(DenseExperts(weight), None if bias is None else bias.detach())


def _gate(experts: Any) -> Activation:
    name = activation_of(experts)
    if name is None or name == "relu2":
        raise ProgramUnsupportedError(f"{type(experts).__name__} has its own gates")
    return name


def _renormalises(router: Any) -> bool:
    """Whether a token's shares from the softmax over all experts are divided by their sum, found by probing."""
    weight = router.weight
    x = torch.linspace(-2, 3, 4 * weight.shape[1], device=weight.device).view(4, -1).to(weight.dtype)
    _, given, chosen = router(x)
    shares = nn.functional.linear(x, weight, getattr(router, "bias", None)).float().softmax(-1).gather(1, chosen)
    for renormalises, expected in ((False, shares), (True, shares / shares.sum(-1, keepdim=True))):
        if chosen.shape[1] == router.top_k and torch.allclose(given.float(), expected, rtol=1e-2, atol=1e-5):
            return renormalises
    raise ProgramUnsupportedError(f"{type(router).__name__} is not a softmax over all experts")
