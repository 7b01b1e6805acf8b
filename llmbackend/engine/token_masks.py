"""Which tokens may be sampled: bit masks of a step's samples, and words that must not be completed.

Row constraints make masks; samplers apply them. Invariant: a mask has one bit per token of the vocabulary, 32 to a
word; the tokens that bad words ban depend only on the tokens so far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]


FORBIDDEN: Final = -1e30
"""The logit of a forbidden token: below every logit, even banned ones, and finite, so that a vocabulary block without
an allowed token still has finite weights."""


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def all_tokens(vocab_size: int) -> Words:
    """uint32 [num_words]: every token is allowed."""
    words: Words = np.full(num_words(vocab_size), 0xFFFFFFFF, np.uint32)
    if vocab_size % 32:
        words[-1] = (1 << vocab_size % 32) - 1
    return words


def only(token_ids: Iterable[int], vocab_size: int) -> Words:
    """uint32 [num_words]: these tokens are allowed."""
    words: Words = np.zeros(num_words(vocab_size), np.uint32)
    for token_id in token_ids:
        words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return words


def has(words: Words, token_id: int) -> bool:
    return bool(int(words[token_id >> 5]) >> (token_id & 31) & 1)


def as_bools(words: Words, vocab_size: int) -> npt.NDArray[np.bool_]:
    """bool [vocab_size]; for words [n, …], [n, vocab_size]."""
    bits = np.unpackbits(words.view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of a step.

    index   int32 [samples]  rows of `words`; -1 = all tokens are allowed
    words   uint32 [n, num_words(vocab_size)]
    errors  by sample, why no token is allowed; its mask is to be ignored
    """

    index: npt.NDArray[np.int32]
    words: Words
    errors: Mapping[int, str] = field(default_factory=dict)

    def only(self, begin: int, end: int) -> TokenMasks:
        """The masks of the samples begin .. end - 1."""
        errors = {sample - begin: text for sample, text in self.errors.items() if begin <= sample < end}
        return TokenMasks(self.index[begin:end], self.words, errors)

    def result(self) -> TokenMasks:
        """Makes computed masks usable as `PendingMasks`."""
        return self


class PendingMasks(Protocol):
    """Masks that are computed in parallel with the forward pass."""

    def result(self) -> TokenMasks:
        """Waits for the masks. May be called again."""


class BadWords:
    """The bad words of one request that have several tokens: bans the token that would complete one.

    The cost per step grows with the number of distinct lengths, not of words. As in TensorRT-LLM, bad words may begin
    in the prompt.
    """

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        """words: token ids, at least two each."""
        self._endings: dict[int, dict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
        for word in words:
            self._endings[len(word) - 1][word[:-1]].append(word[-1])
        self._max_length = max(self._endings, default=0)

    def banned(self, token_ids: npt.NDArray[np.int32]) -> list[int]:
        """The tokens that must not follow `token_ids`, int32 [n]."""
        tail = token_ids[-self._max_length :].tolist()
        found: list[int] = []
        for length, endings in self._endings.items():
            if length <= len(tail):
                found += endings.get(tuple(tail[-length:]), ())
        return found
