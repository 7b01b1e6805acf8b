"""What a request adds to the logits of tokens, said by token id or by word, and the words that it bans.

For: schemas, which read it, and the converter, which has the tokenizer. Does not know: tensors, the engine's sampler.
Invariant: what is resolved names tokens of the vocabulary alone, at most MAX_LOGIT_BIAS of them. A banned word must be
one token: the bias of a token is the same at every position, and a longer word would need one that follows the tokens
before it.
Source: TensorRT-LLM's embedding bias, and the words that its preprocessing makes token ids of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from llmbackend.core.backend_api import invalid_argument, shown, unsupported

from .request_bounds import MAX_LOGIT_BIAS, check_count, check_stops
from .text import Text

BANNED: Final = -1e9
"""No logit is high enough to make up for it, and products with a penalty stay finite."""


@dataclass(frozen=True, slots=True)
class TokenBias:
    """`bad_words` and `bad_ids` are the same thing, as text and as token ids."""

    by_id: Mapping[int, float] = field(default_factory=dict)
    by_word: Sequence[tuple[str, float]] = ()
    bad_words: Sequence[str] = ()
    bad_ids: Sequence[tuple[int, ...]] = ()

    def __bool__(self) -> bool:
        return bool(self.by_id or self.by_word or self.bad_words or self.bad_ids)

    def resolve(self, text: Text, vocab_size: int) -> dict[int, float]:
        """The bias of each token. Raises TritonError INVALID_ARG, or UNSUPPORTED for a banned word of several
        tokens."""
        check_stops("input 'bad_words'", self.bad_words, "words", "characters")
        check_stops("input 'embedding_bias_words'", [word for word, _ in self.by_word], "words", "characters")
        bias = dict(self.by_id)
        for word, weight in self.by_word:
            for token_id in text.encode(word, add_special_tokens=False):
                bias[token_id] = bias.get(token_id, 0.0) + weight
        words = [(word, tuple(text.encode(word, add_special_tokens=False))) for word in self.bad_words]
        for word, ids in (*words, *((str(list(ids)), ids) for ids in self.bad_ids)):
            if len(ids) > 1:
                raise unsupported(
                    f"the bad word {shown(word)} has {len(ids)} tokens, only words of one token can be banned"
                )
            bias.update(dict.fromkeys(ids, BANNED))
        _check(bias, vocab_size)
        return bias


NO_BIAS: Final = TokenBias()


def _check(bias: Mapping[int, float], vocab_size: int) -> None:
    check_count("the request", len(bias), MAX_LOGIT_BIAS, "tokens with a bias or a ban")
    for token_id, weight in bias.items():
        if not 0 <= token_id < vocab_size:
            raise invalid_argument(
                f"a bias or a bad word names token {token_id}, expected token ids from 0 to {vocab_size - 1}"
            )
        if not math.isfinite(weight):
            raise invalid_argument(f"the bias of token {token_id} is {weight}, expected a finite number")
