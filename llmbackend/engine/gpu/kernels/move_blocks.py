"""KV blocks of all layers gathered in one buffer, or spread from it, in one launch.

For: device_kv_memory.py. Does not know: hosts, what a block holds. Invariant: bytes are moved as they are; where a
block's part in each layer lies, and how long it is, does not change while this is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_WORD_BYTES = 8
_TILE = 1024
"""Words for one program."""


@triton.jit(do_not_specialize_on_alignment=["blocks"])
def move_blocks_kernel(parts, ends, staged, blocks, staged_words, IS_GATHER: tl.constexpr, TILE: tl.constexpr):
    """Program (place in the buffer, part of a block, tile). parts int64: the parts' addresses. ends int64: where each
    begins in a block, and the block's end, in words."""
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = tl.load(ends + part)
    size = tl.load(ends + part + 1) - begin
    word = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = word < size
    block = tl.load(blocks + place).to(tl.int64)
    in_cache = tl.load(parts + part).to(tl.pointer_type(tl.int64)) + block * size + word
    in_buffer = staged + place * staged_words + begin + word
    if IS_GATHER:
        tl.store(in_buffer, tl.load(in_cache, mask=inside, other=0), mask=inside)
    else:
        tl.store(in_cache, tl.load(in_buffer, mask=inside, other=0), mask=inside)


class BlockMoves:
    def __init__(self, parts: Sequence[torch.Tensor], ends: Sequence[int], staged: torch.Tensor) -> None:
        """parts uint8 [num_blocks, bytes of a block's part], contiguous; ends: where each begins in a block, and the
        block's end; staged uint8 [places, bytes of a block]. All are multiples of 8 bytes."""
        if any(end % _WORD_BYTES for end in ends):
            raise ValueError(f"parts of KV blocks begin at {list(ends)}, expected multiples of {_WORD_BYTES} bytes")
        self._kept, self._device = list(parts), staged.device
        self._parts = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=self._device)
        words = [end // _WORD_BYTES for end in ends]
        self._ends = torch.tensor(words, dtype=torch.int64, device=self._device)
        self._staged, self._block_words = staged.view(torch.int64), words[-1]
        self._tiles = max(triton.cdiv(part.shape[1], _WORD_BYTES * _TILE) for part in parts)

    def gather(self, blocks: Sequence[int]) -> None:
        """Device work: staged[i] = blocks[i]."""
        self._move(blocks, is_gather=True)

    def spread(self, blocks: Sequence[int]) -> None:
        """Device work: blocks[i] = staged[i]."""
        self._move(blocks, is_gather=False)

    def _move(self, blocks: Sequence[int], is_gather: bool) -> None:
        numbers = torch.tensor(blocks, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        move_blocks_kernel[(len(blocks), len(self._kept), self._tiles)](
            self._parts, self._ends, self._staged, numbers.to(self._device, non_blocking=True), self._block_words,
            IS_GATHER=is_gather, TILE=_TILE,
        )  # fmt: skip
