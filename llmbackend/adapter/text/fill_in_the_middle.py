"""Prompts for filling in the middle: the text before a gap and the text behind it, in the form that a model knows.

For: request conversion (the sampling parameter `suffix`). Does not know: requests. The table of forms is FORMS.
Invariants: a form is used only where the tokenizer has each of its markers as a token; both texts are tokenised as any
prompt, so that only the markers come from here. What the tokenizer adds at a prompt's end is left out: the text is
generated there.
Sources: the model cards of Qwen2.5-Coder, StarCoder, SantaCoder, DeepSeek-Coder, CodeGemma; CodeLlama's generation.py;
mistral-common's encode_fim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .tokenizer import ModelTokenizer, TooManyTokensError

_PROBE: Final = "☺"
"""A character that SentencePiece merges with none behind it."""


@dataclass(frozen=True, slots=True)
class FimForm:
    """Marker texts, each one token."""

    before_prefix: str
    before_suffix: str
    middle: str = ""
    """At the end; "" = none: the suffix comes first, and the text goes on where the prefix ends."""
    strips_space: bool = False
    """Whether the suffix is tokenised without the space that SentencePiece puts before a text."""

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.before_prefix, self.before_suffix, self.middle)))


FORMS: Final = (
    FimForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    FimForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, Stable Code
    FimForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FimForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    FimForm("▁<PRE>", "▁<SUF>", "▁<MID>", strips_space=True),  # CodeLlama
    FimForm("[PREFIX]", "[SUFFIX]", strips_space=True),  # Codestral
)


class FimEncoder:
    """Read-only: any thread uses it."""

    def __init__(self, tokenizer: ModelTokenizer, form: FimForm, marker_ids: tuple[int, ...]) -> None:
        """marker_ids: of `form.markers`."""
        self._tokenizer = tokenizer
        self._form = form
        self._marker_ids = marker_ids

    def encode(self, prefix: str, suffix: str, *, add_special_tokens: bool, below: int) -> tuple[int, ...]:
        """The prompt's token ids. Raises TooManyTokensError when they are not fewer than `below`."""
        before_prefix, before_suffix, *middle = self._marker_ids
        ahead, behind = (before_prefix, *self._ids(prefix, below)), (before_suffix, *self._suffix_ids(suffix, below))
        parts = (*ahead, *behind) if middle else (*behind, *ahead)
        ids = (*(self._begin() if add_special_tokens else ()), *parts, *middle)
        if len(ids) >= below:
            raise TooManyTokensError(len(ids))
        return ids

    def _ids(self, text: str, below: int | None = None) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, below=below) if text else []

    def _suffix_ids(self, text: str, below: int) -> list[int]:
        if not self._form.strips_space:
            return self._ids(text, below)
        probe = self._ids(_PROBE)
        return self._ids(_PROBE + text, below + len(probe))[len(probe) :]

    def _begin(self) -> list[int]:
        """The tokens that the tokenizer puts before a text."""
        bare = self._ids(_PROBE)
        whole = self._tokenizer.encode(_PROBE, add_special_tokens=True)
        starts = range(len(whole) - len(bare) + 1)
        return next((whole[:start] for start in starts if whole[start : start + len(bare)] == bare), [])


def fim_encoder(tokenizer: ModelTokenizer, vocab_size: int) -> FimEncoder | None:
    """By the first form whose markers are all tokens of the model; None where there is none."""
    for form in FORMS:
        ids = [tokenizer.token_id(marker) for marker in form.markers]
        known = tuple(token_id for token_id in ids if token_id is not None and token_id < vocab_size)
        if len(known) == len(ids):
            return FimEncoder(tokenizer, form, known)
    return None
