"""Token biases and banned words of one request, given as token ids or text.

Used by schemas, which read them, and by request conversion, which has the tokenizer. Independent of tensors and the
sampler. Invariant: a resolved bias names only tokens of the vocabulary, at most MAX_LOGIT_BIAS of them. A banned word
of one token becomes a bias; words of several tokens are banned by the sampler, which knows earlier tokens.
Source: TensorRT-LLM's embedding bias, and the words that its preprocessing turns into token ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from llmbackend.core.backend_api import invalid_argument
from llmbackend.engine.messages import BANNED_BIAS

from ..limits import MAX_LOGIT_BIAS, check_at_most, check_stops
from .tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class TokenBias:
    by_id: Mapping[int, float] = field(default_factory=dict)
    by_word: Sequence[tuple[str, float]] = ()
    bad_words: Sequence[str] = ()
    """Banned words given as text."""
    bad_ids: Sequence[tuple[int, ...]] = ()
    """Banned words as token ids; their reader has checked their number and lengths."""

    def __bool__(self) -> bool:
        return bool(self.by_id or self.by_word or self.bad_words or self.bad_ids)

    def resolve(
        self, tokenizer: ModelTokenizer, vocab_size: int
    ) -> tuple[dict[int, float], tuple[tuple[int, ...], ...]]:
        """The bias by token id, and the banned words of several tokens. Raises TritonError INVALID_ARG."""
        check_stops("input 'bad_words'", self.bad_words, "words", "characters")
        check_stops("input 'embedding_bias_words'", [word for word, _ in self.by_word], "words", "characters")
        bias = dict(self.by_id)
        for word, weight in self.by_word:
            for token_id in tokenizer.encode(word, add_special_tokens=False):
                bias[token_id] = bias.get(token_id, 0.0) + weight
        encoded = (tuple(tokenizer.encode(word, add_special_tokens=False)) for word in self.bad_words)
        words = [ids for ids in (*encoded, *self.bad_ids) if ids]
        bias.update({ids[0]: BANNED_BIAS for ids in words if len(ids) == 1})
        long_words = tuple(ids for ids in words if len(ids) > 1)
        _check(bias, vocab_size)
        _check_ids((token_id for ids in long_words for token_id in ids), vocab_size)
        return bias, long_words


def banned_texts(words: Iterable[str], tokenizer: ModelTokenizer) -> list[tuple[int, ...]]:
    """Banned words as vLLM reads them: at the start of a text and, if that gives as many tokens with a different first
    token, also after a space."""
    found: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
        found.append(bare)
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            found.append(spaced)
    return found


NO_BIAS: Final = TokenBias()


def _check(bias: Mapping[int, float], vocab_size: int) -> None:
    check_at_most("the request", len(bias), MAX_LOGIT_BIAS, "tokens with a bias or a ban")
    _check_ids(bias, vocab_size)
    for token_id, weight in bias.items():
        if not math.isfinite(weight):
            raise invalid_argument(f"the bias of token {token_id} is {weight}, expected a finite number")


def _check_ids(token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise invalid_argument(
                f"a bias or a bad word names token {token_id}, expected token ids from 0 to {vocab_size - 1}"
            )
