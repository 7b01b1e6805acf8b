"""How sampling kernels read logits: the model's own, or the float32 copy in which a request changed some.

For: the sampling kernels. Does not know: who changed them. Invariants: NaN reads as plus infinity, so that a maximum
shows it; beyond the vocabulary all is minus infinity. Work is done in blocks of BLOCK tokens; what was summed up of a
copy lies behind what was summed up of the samples' own logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(256)

NO_SLOT = tl.constexpr(-1)
"""The slot of a sample whose logits nobody changes."""

NO_ROOM = tl.constexpr(-2)
"""The slot of a sample whose copy found no room: a padding sample, for there is one copy per row that wants one."""


@triton.jit
def slot_of(slots, sample, EDITED: tl.constexpr):
    """Which copy a sample's logits are in."""
    if EDITED:
        slot = tl.load(slots + sample).to(tl.int64)
    else:
        slot = sample * 0 + NO_SLOT
    return slot


@triton.jit
def load_logits(logits, stride, copies, sample, slot, vocab_size, ids, mask, EDITED: tl.constexpr):
    """float32, of the ids where mask is true; sample, slot int64."""
    inside = mask & (ids < vocab_size)
    infinity = float("inf")
    if EDITED:
        own = tl.load(logits + sample * stride + ids, mask=inside & (slot < 0), other=-infinity).to(tl.float32)
        copied = tl.load(copies + slot * vocab_size + ids, mask=inside & (slot >= 0), other=-infinity)
        x = tl.where(slot >= 0, copied, own)
    else:
        x = tl.load(logits + sample * stride + ids, mask=inside, other=-infinity).to(tl.float32)
    return tl.where(x == x, x, infinity)
