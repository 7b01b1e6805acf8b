"""What a request adds to the logits of tokens, said by token id or by word, and the words that it bans.

For: schemas, which read it, and the converter, which has the tokenizer. Does not know: tensors, the engine's sampler.
Invariant: what is resolved names tokens of the vocabulary alone, at most MAX_LOGIT_BIAS of them with a bias. A banned
word of one token is a bias; one of several is left to the sampler, which knows the tokens before.
Source: TensorRT-LLM's embedding bias, and the words that its preprocessing makes token ids of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from llmbackend.core.backend_api import invalid_argument
from llmbackend.engine.infer_request import BANNED_BIAS

from .request_bounds import MAX_LOGIT_BIAS, check_count, check_stops
from .text import Text


@dataclass(frozen=True, slots=True)
class TokenBias:
    """`bad_words` and `bad_ids` are the same thing, as text and as token ids."""

    by_id: Mapping[int, float] = field(default_factory=dict)
    by_word: Sequence[tuple[str, float]] = ()
    bad_words: Sequence[str] = ()
    bad_ids: Sequence[tuple[int, ...]] = ()

    def __bool__(self) -> bool:
        return bool(self.by_id or self.by_word or self.bad_words or self.bad_ids)

    def resolve(self, text: Text, vocab_size: int) -> tuple[dict[int, float], tuple[tuple[int, ...], ...]]:
        """The bias of each token, and the banned words of several tokens. Raises TritonError INVALID_ARG."""
        check_stops("input 'bad_words'", self.bad_words, "words", "characters")
        check_stops("input 'embedding_bias_words'", [word for word, _ in self.by_word], "words", "characters")
        bias = dict(self.by_id)
        for word, weight in self.by_word:
            for token_id in text.encode(word, add_special_tokens=False):
                bias[token_id] = bias.get(token_id, 0.0) + weight
        encoded = (tuple(text.encode(word, add_special_tokens=False)) for word in self.bad_words)
        words = [ids for ids in (*encoded, *self.bad_ids) if ids]
        check_stops("the request's bad words", words, "words", "tokens")
        bias.update({ids[0]: BANNED_BIAS for ids in words if len(ids) == 1})
        long_words = tuple(ids for ids in words if len(ids) > 1)
        _check(bias, vocab_size)
        _check_ids((token_id for ids in long_words for token_id in ids), vocab_size)
        return bias, long_words


NO_BIAS: Final = TokenBias()


def _check(bias: Mapping[int, float], vocab_size: int) -> None:
    check_count("the request", len(bias), MAX_LOGIT_BIAS, "tokens with a bias or a ban")
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
