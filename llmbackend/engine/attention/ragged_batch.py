"""The ragged layout of one step: which rows lie where in the flattened batch, and which KV blocks they look at.

For: attention backends. Does not know: models, sampling, KV memory. Invariant: how a row is padded depends on that
row's own query length, context length and window, never on its neighbours, so that its result does not depend on them
either.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Int64Array = npt.NDArray[np.int64]

# Products over fewer keys than this take other paths through the CPU's matrix library, which round differently.
_MIN_KEYS = 32


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Neighbouring rows of equal query length whose keys are padded to the same number of blocks.

    The group's tokens are `first_token` … + num_rows * query_len. blocks: int64 [num_rows, padded_blocks] KV block ids.
    visible: bool [num_rows, query_len, padded_blocks * block_size], True where a query may look at a key.
    """

    first_token: int
    num_rows: int
    query_len: int
    blocks: torch.Tensor
    visible: torch.Tensor

    @property
    def end_token(self) -> int:
        return self.first_token + self.num_rows * self.query_len


def padded_blocks(num_blocks: Int64Array) -> Int64Array:
    """Rounds up to 1, 2, 3, 4, 6, 8, 12, 16, 24, …: few distinct lengths, at most a third of the work in vain."""
    power = 2 ** np.floor(np.log2(np.maximum(num_blocks, 1))).astype(np.int64)
    half_step = power + np.maximum(power // 2, 1)
    rounded = np.where(num_blocks <= power, power, np.where(num_blocks <= half_step, half_step, 2 * power))
    return rounded.astype(np.int64)


class RaggedBatch:
    """Rows in the order of their tokens in the flattened batch; rows of equal query length must be neighbours, sorted
    by context length.

    query_lens, seq_lens: int64 [rows]; the row's queries are the last query_len of its seq_len positions.
    block_table: [rows, max_blocks_per_seq]. slots: int64 [tokens], where each token's key and value are written.
    """

    def __init__(
        self,
        query_lens: Int64Array,
        seq_lens: Int64Array,
        block_table: npt.NDArray[np.int32],
        slots: Int64Array,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._query_lens = query_lens
        self._seq_lens = seq_lens
        self._block_table = block_table
        self._block_size = block_size
        self._device = device
        self._groups: dict[int | None, list[RowGroup]] = {}
        self.slots = torch.from_numpy(slots).to(device)

    def groups(self, sliding_window: int | None) -> list[RowGroup]:
        """The rows as groups for layers with this window; worked out once per step and window."""
        found = self._groups.get(sliding_window)
        if found is None:
            found = self._groups[sliding_window] = self._build_groups(sliding_window)
        return found

    def _build_groups(self, window: int | None) -> list[RowGroup]:
        padded, first_block = self._key_ranges(window)
        changes = (np.diff(self._query_lens) != 0) | (np.diff(padded) != 0)
        bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(padded)]
        token_starts = np.concatenate(([0], np.cumsum(self._query_lens)))
        return [
            self._group(slice(a, b), int(token_starts[a]), int(padded[a]), first_block[a:b], window)
            for a, b in itertools.pairwise(bounds)
        ]

    def _key_ranges(self, window: int | None) -> tuple[Int64Array, Int64Array]:
        """Per row: how many blocks of keys are read, and the first of them."""
        total = padded_blocks(-(-np.maximum(self._seq_lens, _MIN_KEYS) // self._block_size))
        if window is None:
            return total, np.zeros_like(total)
        # The oldest visible key may lie anywhere in its block, hence the second extra block.
        limit = (window + self._query_lens - 2) // self._block_size + 2
        first_key = np.maximum(self._seq_lens - self._query_lens - window + 1, 0)
        return np.minimum(total, limit), first_key // self._block_size

    def _group(self, rows: slice, first_token: int, padded: int, first: Int64Array, window: int | None) -> RowGroup:
        query_len, block_size = int(self._query_lens[rows.start]), self._block_size
        columns = first[:, None] + np.arange(padded)
        table = self._block_table[rows]
        blocks = np.take_along_axis(table, np.minimum(columns, table.shape[1] - 1), axis=1).astype(np.int64)
        key_positions = (first * block_size)[:, None] + np.arange(padded * block_size)
        query_positions = (self._seq_lens[rows] - query_len)[:, None] + np.arange(query_len)
        distance = query_positions[:, :, None] - key_positions[:, None, :]
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        return RowGroup(
            first_token=first_token,
            num_rows=len(first),
            query_len=query_len,
            blocks=torch.from_numpy(blocks).to(self._device),
            visible=torch.from_numpy(visible).to(self._device),
        )
