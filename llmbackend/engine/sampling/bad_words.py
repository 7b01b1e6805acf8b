"""Words of several tokens that may not be generated: the token that would complete one is banned.

For: samplers on the host. Does not know: logits, text. Invariants: what is banned is a function of the row's tokens
alone, prompt and output; the cost of a step grows with the number of different lengths, not of words.
Source: TensorRT-LLM's bad words, which may begin in the prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BadWords:
    """One request's words."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        """`words`: token ids, two or more each."""
        self._endings: dict[int, dict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
        for word in words:
            self._endings[len(word) - 1][word[:-1]].append(word[-1])
        self._max_length = max(self._endings, default=0)

    def banned(self, token_ids: npt.NDArray[np.int32]) -> list[int]:
        """The tokens that may not follow `token_ids`, int32 [n]."""
        tail = token_ids[-self._max_length :].tolist()
        found: list[int] = []
        for length, endings in self._endings.items():
            if length <= len(tail):
                found += endings.get(tuple(tail[-length:]), ())
        return found
