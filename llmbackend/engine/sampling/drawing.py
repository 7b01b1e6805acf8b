"""Choosing a token from a distribution with one uniform number.

For: the sampler. Does not know: requests, penalties, where the number comes from. Invariant: a row's token is a
function of its logits, its number and its own limits; equal logits are ordered by token id, so that the result does not
depend on a sorting algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

# Truncated rows look at this many of the most likely tokens first; only if the kept set does not end among them is the
# whole vocabulary sorted.
_NUM_CANDIDATES = 1024
_CDF_BLOCK = 1024
_MAX_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be drawn, per row. Applied as in vLLM: min_p, then top_k, then top_p."""

    top_k: torch.Tensor
    """int [rows]: keeps this many of the most likely tokens; 0: no limit."""
    top_p: torch.Tensor
    """float64 [rows]: keeps the fewest most likely tokens whose share of what is left reaches this; 1: no limit."""
    min_p: torch.Tensor
    """float64 [rows]: keeps tokens at least this many times as likely as the likeliest; 0: no limit."""

    def rows(self, index: torch.Tensor) -> Limits:
        return Limits(self.top_k[index], self.top_p[index], self.min_p[index])


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row and its token id, the first of equals; NaN counts as the largest.

    First over blocks of tokens, then inside one: on CPU, only a plain maximum over neighbours is vectorised.
    """
    rows, vocab_size = logits.shape
    if vocab_size % _MAX_BLOCK or not rows:
        plain = logits.max(dim=-1)
        return plain.values, plain.indices
    blocks = logits.reshape(rows, -1, _MAX_BLOCK)
    peaks, block = blocks.amax(-1).max(dim=-1)
    inside = torch.take_along_dim(blocks, block[:, None, None], 1)[:, 0].max(dim=-1).indices
    return peaks, block * _MAX_BLOCK + inside


def draw(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids int64 [rows] for float32 logits [rows, vocab] and float64 uniforms [rows], without limits.

    Inverts the distribution function in the order of token ids: first over blocks of tokens, then inside one block.
    """
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    blocks = functional.pad(weights, (0, -weights.shape[-1] % _CDF_BLOCK)).view(len(weights), -1, _CDF_BLOCK)
    mass = blocks.sum(-1, dtype=torch.float64)
    upto = mass.cumsum(-1)
    target = uniforms[:, None] * upto[:, -1:]
    block = _first_above(upto, target)
    inside = torch.take_along_dim(blocks, block[:, None, None], 1)[:, 0].double().cumsum(-1)
    before = torch.take_along_dim(upto - mass, block[:, None], 1)
    return block * _CDF_BLOCK + _first_above(inside, target - before)


def draw_limited(logits: torch.Tensor, uniforms: torch.Tensor, limits: Limits) -> torch.Tensor:
    """As `draw`, among the tokens that the limits keep, in the order of likelihood."""
    num_candidates = min(_NUM_CANDIDATES, logits.shape[-1])
    tokens, complete = _draw_among(logits, uniforms, limits, num_candidates)
    redo = torch.nonzero(~complete)[:, 0]
    if len(redo):
        tokens[redo], _ = _draw_among(logits[redo], uniforms[redo], limits.rows(redo), logits.shape[-1])
    return tokens


def most_likely(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest logits [rows, count] and their token ids, largest first, equal ones by ascending token id.

    Which of several equal logits at the very end of the list are in it is not determined.
    """
    values, ids = torch.topk(logits, count, dim=-1, sorted=False)
    by_id = ids.argsort(-1)
    values, ids = values.gather(-1, by_id), ids.gather(-1, by_id)
    values, order = torch.sort(values, stable=True, dim=-1, descending=True)
    return values, ids.gather(-1, order)


def _draw_among(
    logits: torch.Tensor, uniforms: torch.Tensor, limits: Limits, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and whether `count` candidates were enough to know the kept set (bool [rows])."""
    values, ids = most_likely(logits, count)
    peak = values[:, :1]
    weights = torch.exp(values - peak).double()
    rank = torch.arange(count, device=logits.device)
    top_k = torch.where(limits.top_k > 0, limits.top_k, logits.shape[-1])
    kept = (weights >= limits.min_p[:, None]) & (rank < top_k[:, None])
    everything = torch.exp(logits - peak).sum(-1, dtype=torch.float64)
    unlimited = (limits.top_k == 0) & (limits.min_p == 0)
    total = torch.where(unlimited, everything, (weights * kept).sum(-1))
    cut_short = ~unlimited & kept[:, -1] & (top_k > count)
    kept &= weights.cumsum(-1) - weights < (limits.top_p * total)[:, None]
    kept[:, 0] = True
    last_kept = torch.take_along_dim(values, kept.sum(-1, keepdim=True) - 1, 1)
    complete = (~cut_short & (last_kept > values[:, -1:])[:, 0]) | (count == logits.shape[-1])
    upto = (weights * kept).cumsum(-1)
    chosen = _first_above(upto, uniforms[:, None] * upto[:, -1:])
    return ids.gather(-1, chosen[:, None])[:, 0], complete


def _first_above(upto: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index of the first running sum above the target [rows, 1]; never one past the last entry with any weight, which
    rounding could otherwise reach."""
    last_with_weight = (upto < upto[:, -1:]).sum(-1)
    return torch.minimum((upto <= target).sum(-1), last_with_weight)
