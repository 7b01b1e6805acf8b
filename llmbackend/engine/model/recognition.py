"""Recognises what small parts of a model compute by probing them: norms, activations, what follows the head.

Used by decoder_description.py. Invariant: modules are called, never changed; an output that no known function matches
raises ProgramUnsupportedError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeVar

import torch
from torch import nn
from torch.nn import functional

from ..errors import ProgramUnsupportedError
from ..gpu.ops.ops import ACTIVATIONS, Activation, Norm, gated

PlainActivation = Literal["gelu_tanh", "relu2"]
"""For MLPs without a gate; relu2 is max(0, x)²."""

T = TypeVar("T")

_INPUT: Final = torch.linspace(-6, 6, 49)
_USUAL_EPS: Final = (1e-5, 1e-6)
_SMALL: Final = 1e-3
"""A factor on a norm's input that makes its eps visible."""


# Names of the norms before attention, after it, before the MLP and after it, by the set of names in the layer.
NORMS_BY_PLACE: Final[dict[frozenset[str], tuple[str, str, str, str]]] = {
    frozenset({"input_layernorm", "post_attention_layernorm"}): ("input_layernorm", "", "post_attention_layernorm", ""),
    frozenset({"post_attention_layernorm", "post_feedforward_layernorm"}): (
        "", "post_attention_layernorm", "", "post_feedforward_layernorm",
    ),
    frozenset(
        {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}
    ): ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    frozenset({"input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"}): (
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm",
    ),
    frozenset({"input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"}): (
        "input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2",
    ),
    frozenset({"input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"}): (
        "input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm",
    ),
    frozenset({"input_layernorm", "pre_feedforward_layernorm"}): (
        "input_layernorm", "", "pre_feedforward_layernorm", "",
    ),
    frozenset({"attention_layernorm", "feedforward_layernorm"}): (
        "attention_layernorm", "", "feedforward_layernorm", "",
    ),
    frozenset({"input_layernorm"}): ("input_layernorm", "", "", ""),
}  # fmt: skip
NORMS_OF_PARALLEL: Final = frozenset({"input_layernorm"})
"""The norms of a layer whose attention and MLP read the same input."""


def norm_of(module: Any, width: int | None = None) -> Norm:
    """An RMS norm or a layer norm with factor w, 1 + w or none, distinguished by its output. width: None = that of its
    weight."""
    if list(module.children()):  # packed modules have no weights yet while a load is forecast
        raise ProgramUnsupportedError(f"{type(module).__name__} is neither an RMS norm nor a layer norm")
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    if width is None:
        if weight is None:
            raise ProgramUnsupportedError(f"{type(module).__name__} has no weight")
        width = int(weight.shape[-1])
    device = None if weight is None else weight.device
    factor = torch.ones(width, device=device) if weight is None else weight.detach().float()
    added = None if bias is None else bias.detach().float()
    is_exact = bias is None or bias.dtype == torch.float32
    given = _probed(module, width, 1.0)
    for eps in _eps_of(module):
        small = _probed(module, width, _SMALL)
        for is_centred in (False, True):
            for candidate in (factor,) if weight is None else (factor, 1.0 + factor):
                norm = Norm(candidate.contiguous(), float(eps), added, is_centred)
                if _is_near(norm, given, 1.0, is_exact) and _is_near(norm, small, _SMALL, is_exact):
                    return norm
    raise ProgramUnsupportedError(f"{type(module).__name__} is neither an RMS norm nor a layer norm")


def _eps_of(module: Any) -> tuple[float, ...]:
    stated = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return _USUAL_EPS if stated is None else (float(stated),)


def _probe(width: int, scale: float, like: torch.Tensor | None) -> torch.Tensor:
    return scale * torch.linspace(-2, 3, width, device=None if like is None else like.device)[None]


def _probed(module: Any, width: int, scale: float) -> torch.Tensor:
    """With a bias, torch's layer norm accepts only rows of its weights' type."""
    weight = getattr(module, "weight", None)
    x = _probe(width, scale, weight)
    if isinstance(module, nn.LayerNorm) and weight is not None:
        x = x.to(weight.dtype)
    output: torch.Tensor = module(x)
    return output.float()


def _is_near(norm: Norm, given: torch.Tensor, scale: float, is_exact: bool) -> bool:
    expected = normalised(_probe(len(norm.weight), scale, norm.weight), norm)
    rtol, atol = (1e-4, 1e-5) if is_exact else (3e-2, 3e-2)
    return given.shape == expected.shape and torch.allclose(given, expected, rtol=rtol, atol=atol)


def normalised(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """x: rows of float32."""
    if norm.centred:
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
    return y if norm.bias is None else y + norm.bias


def mlp_activation(module: Any) -> Activation:
    """For a gated MLP."""
    return _same(module, {name: gated(torch.cat((_INPUT, torch.ones_like(_INPUT))), name) for name in ACTIVATIONS})


def plain_activation_of(module: Any) -> PlainActivation:
    """For an MLP without a gate."""
    known: dict[PlainActivation, torch.Tensor] = {
        "gelu_tanh": functional.gelu(_INPUT, approximate="tanh"),
        "relu2": _INPUT.relu().square(),
    }
    return _same(module, known)


def _same(module: Any, known: Mapping[T, torch.Tensor]) -> T:
    """The name of the known function whose output for _INPUT equals that of the module's activation."""
    names = ("act_fn", "activation_fn", "act", "activation")
    function = next((getattr(module, name) for name in names if getattr(module, name, None) is not None), None)
    if function is None:
        raise ProgramUnsupportedError(f"{type(module).__name__} has no activation")
    if not isinstance(function, nn.Module) or not list(function.parameters()):  # more than the activation would be read
        given = function(_INPUT)
        for name, expected in known.items():
            if torch.allclose(given, expected, atol=1e-6):
                return name
    raise ProgramUnsupportedError(f"{type(module).__name__} has the unsupported activation {type(function).__name__}")


def finish_of(model: Any, config: Any) -> tuple[float, float]:
    """Factor and softcap of the logits after the head, as stated in the config."""
    cap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    names = ("logit_scale", "lm_head_multiplier", "logits_scaling")
    *scales, scaling = (float(getattr(config, name, None) or 1.0) for name in names)
    scale = math.prod(scales)
    x = torch.tensor([0.01, -40.0, 40.0], device=model.get_input_embeddings().weight.device)
    given = _finished(model, x)
    for factor in (scale / scaling, scale * scaling):
        expected = cap * torch.tanh(x * factor / cap) if cap else x * factor
        if torch.allclose(given, expected, rtol=1e-4, atol=1e-6):
            return factor, cap
    raise ProgramUnsupportedError(f"{type(model).__name__} scales its logits in an unknown way")


class _Hidden(tuple[torch.Tensor]):
    """The output of the layers; any other attribute that a model reads is None."""

    def __new__(cls, hidden: torch.Tensor) -> _Hidden:
        return super().__new__(cls, (hidden,))

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


def _finished(model: Any, logits: torch.Tensor) -> torch.Tensor:
    """What the model makes of these logits of its head, before or after it."""
    base, head = model.base_model, model.get_output_embeddings()
    base.forward = lambda *_args, **_kwargs: _Hidden(torch.ones(1, 1, 1, device=logits.device))
    head.forward = lambda hidden: logits * hidden
    try:
        output = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=logits.device), use_cache=False)
    finally:
        del base.forward, head.forward
    finished: torch.Tensor = output.logits[0, 0].float()
    return finished


def embedding_factor_of(module: Any, config: Any) -> float:
    if type(module) is nn.Embedding and getattr(config, "mup_enabled", None):
        return math.sqrt(module.weight.shape[1])
    if type(module) is nn.Embedding:
        return float(getattr(config, "embedding_multiplier", None) or 1.0)
    row = module(torch.tensor([[1]], device=module.weight.device))[0, 0].float()
    raw = module.weight[1].detach().float()
    return float((row @ raw) / (raw @ raw))
