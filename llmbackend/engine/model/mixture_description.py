"""What a mixture of experts computes, read off its transformers modules, for the CPU's program.

Used by decoder_description.py. Invariant: how a router selects and weights experts is found by probing the module
itself; anything not recognised raises ProgramUnsupportedError.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, Literal

import torch
from torch import nn

from ..errors import ProgramUnsupportedError
from .native_experts import NativeExperts, router_linear, router_of
from .projections import Mlp, PlainMlp, Projection, mlp_of, plain_mlp_of, projection_of

Scores = Literal["softmax", "sigmoid"]
_SCORES: Final[tuple[Scores, ...]] = ("softmax", "sigmoid")
_SHARED: Final = ("shared_expert", "shared_experts", "shared_mlp")
_SHARED_GATE: Final = "shared_expert_gate"
OUT_NORM: Final = "post_mlp_layernorm"
"""Name of the layer's norm after the sum, in modules that have it."""
_EPSILONS: Final = {"softmax": (0.0,), "sigmoid": (1e-20, 1e-6)}
_OF_GROUP: Final = (2, 1, 0)
_PROBE_ROWS: Final = 64
"""Enough rows for ways of selecting by groups to differ."""
_LOW: Final = -12.0
"""Expert logits so low that an epsilon shows in the shares of their sigmoids."""
_CORRECTION: Final = "e_score_correction_bias"
_FACTORS: Final = ("routed_scaling_factor", "router_scaling_factor", "route_scale")


@dataclass(frozen=True, slots=True)
class Route:
    """Selects the top_k of scores + correction, among the best groups if there are groups. A share is the score,
    divided by epsilon + the sum of the selected scores if `renormalises`, times factor (native/step_experts.h)."""

    top_k: int
    scores: Scores
    renormalises: bool
    factor: float
    correction: torch.Tensor | None
    """float32 [experts]"""
    groups: int
    """0 = none."""
    top_groups: int
    of_group: int
    """A group's score is the sum of this many of its best experts."""
    epsilon: float

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """Shares [tokens, experts] from logits, both float32; 0 = not selected."""
        scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
        values = scores if self.correction is None else scores + self.correction
        if self.groups:
            by_group = values.view(len(values), self.groups, -1)
            best = by_group.topk(self.of_group, dim=-1)[0].sum(-1).topk(self.top_groups, dim=-1)[1]
            kept = torch.zeros(by_group.shape[:2], dtype=torch.bool).scatter_(1, best, True)
            values = by_group.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)
        chosen = values.topk(self.top_k, dim=-1)[1]
        shares = torch.zeros_like(scores).scatter_(1, chosen, scores.gather(1, chosen))
        return self.factor * (shares / (shares.sum(-1, keepdim=True) + self.epsilon) if self.renormalises else shares)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The sum over a token's experts of share * down(activation(gate) * up), and a shared expert."""

    router: Projection
    route: Route
    experts: NativeExperts
    shared: Mlp | PlainMlp | None
    shared_gate: Projection | None
    """[1, width]: the shared expert is multiplied by the sigmoid of this."""


def describe_mixture(module: Any) -> Mixture:
    """Raises ProgramUnsupportedError."""
    own = router_of(module)
    linear = router_linear(own)
    known = {"experts", "router", "gate", _SHARED_GATE, OUT_NORM, *_SHARED}
    if unknown := {name for name, child in module.named_children() if not isinstance(child, nn.Identity)} - known:
        raise ProgramUnsupportedError(
            f"{type(module).__name__} has {', '.join(sorted(unknown))} in addition to experts"
        )
    shared = next((getattr(module, name) for name in _SHARED if hasattr(module, name)), None)
    gate = getattr(module, _SHARED_GATE, None)
    bias = getattr(linear, "bias", None)
    route = _route(own, *_correction_of(module))
    return Mixture(
        router=Projection(module.experts.router, None if bias is None else bias.detach().float()),
        route=replace(route, factor=route.factor * _factor_of_sum(module, shared)),
        experts=module.experts,
        shared=None if shared is None else plain_mlp_of(shared) or mlp_of(shared),
        shared_gate=None if gate is None else projection_of(gate),
    )


def _correction_of(module: Any) -> tuple[torch.Tensor, ...]:
    """The correction that some blocks store for their router and pass to it."""
    held = getattr(module, _CORRECTION, getattr(module, "expert_bias", None))
    return () if held is None else (held,)


def _factor_of_sum(module: Any, shared: Any) -> float:
    """The factor by which a block multiplies the output of its experts, found by probing."""
    if not any(hasattr(module, name) for name in _FACTORS):
        return 1.0
    weight = router_linear(router_of(module)).weight
    parts = {module.experts: torch.ones_like} | ({} if shared is None else {shared: torch.zeros_like})
    for part, given in parts.items():
        part.forward = lambda x, *_choice, given=given: given(x)
    try:
        output = module(torch.zeros(1, 2, weight.shape[1], dtype=weight.dtype))
    finally:
        for part in parts:
            del part.forward
    return float((output if isinstance(output, torch.Tensor) else output[0]).flatten()[0])


def _own_correction(router: Any) -> torch.Tensor | None:
    held = (*router.named_parameters(), *router.named_buffers())
    return next((tensor.flatten() for name, tensor in held if name.endswith(_CORRECTION)), None)


def _route(router: Any, *given: torch.Tensor) -> Route:
    """The route that reproduces the router's outputs, found by probing. given: the correction, if the router takes
    it."""
    names = {name.rpartition(".")[2]: name for name, _ in router.named_parameters()}
    if unknown := [name for last, name in names.items() if last not in ("weight", "bias", _CORRECTION)]:
        raise ProgramUnsupportedError(
            f"{type(router).__name__} has {', '.join(sorted(unknown))} in addition to its weight"
        )
    correction = _float(given[0] if given else _own_correction(router))
    logits, expected = _probed(router, *given)
    for scores, renormalises, of_group in product(_SCORES, (False, True), _OF_GROUP):
        for epsilon in _EPSILONS[scores]:
            route = _candidate(router, scores, renormalises, correction, of_group, epsilon)
            if torch.allclose(route.of(logits), expected, rtol=1e-2, atol=1e-5):
                return route
    raise ProgramUnsupportedError(f"{type(router).__name__} selects experts in an unknown way")


def _probed(router: Any, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of some rows, and a share for each expert. Computed in float32, so that rounding does not change the
    selection, with logits so small that several experts have significant shares, or with all of them low."""
    linear = router_linear(router)
    weight, bias = linear.weight, getattr(linear, "bias", None)
    x = torch.arange(1.0, _PROBE_ROWS * weight.shape[1] + 1).sin().view(_PROBE_ROWS, -1)
    x /= nn.functional.linear(x, weight.float()).std().clamp(min=1e-6)
    low = ((_LOW - 0.01 * torch.arange(len(weight))) / weight.shape[1])[:, None].expand(weight.shape)
    logits, shares_of = [], []
    try:
        if bias is not None:
            linear.bias = nn.Parameter(bias.float(), requires_grad=False)
        for tried, rows in ((weight.float(), x), (low, torch.ones(1, weight.shape[1]))):
            linear.weight = nn.Parameter(tried, requires_grad=False)
            _, shares, chosen = router(rows if linear is router else rows[None], *given)
            if chosen.shape != shares.shape or chosen.dim() != 2:
                raise ProgramUnsupportedError(f"{type(router).__name__} returns no shares of the selected experts")
            logits.append(nn.functional.linear(rows, tried, _float(bias)))
            shares_of.append(torch.zeros(len(rows), weight.shape[0]).scatter_(1, chosen, shares.float()))
    finally:
        linear.weight = weight
        if bias is not None:
            linear.bias = bias
    return torch.cat(logits), torch.cat(shares_of)


def _candidate(
    router: Any, scores: Scores, renormalises: bool, correction: torch.Tensor | None, of_group: int, epsilon: float
) -> Route:
    """of_group: 0 = the stated groups are not used."""
    groups = int(getattr(router, "num_group", None) or getattr(router, "n_group", None) or 1)
    return Route(
        top_k=int(router.top_k),
        scores=scores,
        renormalises=renormalises,
        factor=next((float(value) for name in _FACTORS if (value := getattr(router, name, None))), 1.0),
        correction=correction,
        groups=groups if groups > 1 and of_group else 0,
        top_groups=int(getattr(router, "topk_group", None) or 1) if groups > 1 and of_group else 0,
        of_group=of_group or 2,
        epsilon=epsilon,
    )


def _float(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().float()
