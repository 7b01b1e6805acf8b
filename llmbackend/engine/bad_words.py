"""Words of several tokens that must not be generated, as bans of the token that would complete one.

For: the samplers of the host, the mock model, row constraints. Does not know: requests, logits. Invariant: what is
banned follows from the tokens so far alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .step import Int32Array


class BadWords:
    """One request's words of several tokens that may not be generated: the token that would complete one is banned.

    A step's cost grows with the number of different lengths, not of words. Source: TensorRT-LLM's bad words, which may
    begin in the prompt.
    """

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        """`words`: token ids, two or more each."""
        self._endings: dict[int, dict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
        for word in words:
            self._endings[len(word) - 1][word[:-1]].append(word[-1])
        self._max_length = max(self._endings, default=0)

    def banned(self, token_ids: Int32Array) -> list[int]:
        """The tokens that may not follow `token_ids`, int32 [n]."""
        tail = token_ids[-self._max_length :].tolist()
        found: list[int] = []
        for length, endings in self._endings.items():
            if length <= len(tail):
                found += endings.get(tuple(tail[-length:]), ())
        return found
