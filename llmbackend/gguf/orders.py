"""The permutations of rows and columns that llama.cpp's conversion applies to heads.

Invariant: if `why_not(count)` is empty, `of(count)` maps each row (or column) of the model to one of the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


class Order(Protocol):
    def why_not(self, count: int) -> str:
        """What is expected of their number; "" = it fits."""

    def of(self, count: int) -> Indices: ...


@dataclass(frozen=True, slots=True)
class Pairs:
    """In the file, the two rows of each rotary pair are adjacent; in the model, the first rows of all pairs of a head
    come first."""

    num_heads: int

    def why_not(self, count: int) -> str:
        return f"a multiple of {2 * self.num_heads}" if count % (2 * self.num_heads) else ""

    def of(self, count: int) -> Indices:
        return np.arange(count).reshape(self.num_heads, -1, 2).transpose(0, 2, 1).reshape(-1)


@dataclass(frozen=True, slots=True)
class Turns:
    """Value heads after `first` other rows. In the file, those of different key heads are interleaved; in the model,
    those of one key head are adjacent."""

    first: int
    num_key_heads: int
    width: int

    def why_not(self, count: int) -> str:
        unit = self.num_key_heads * self.width
        return f"{self.first} and a multiple of {unit}" if count < self.first or (count - self.first) % unit else ""

    def of(self, count: int) -> Indices:
        found = np.arange(count)
        turns = found[self.first :].reshape(-1, self.num_key_heads, self.width)
        return np.concatenate((found[: self.first], turns.transpose(1, 0, 2).reshape(-1)))
