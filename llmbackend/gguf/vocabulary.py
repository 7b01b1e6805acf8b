"""A file's tokens: their texts and kinds, and which of them begin, end or pad a text.

Invariant: texts are distinct, and ids are within the list. Source: the fields `tokenizer.ggml.*` as llama.cpp reads
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .errors import GgufError, short
from .fields import Fields

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MAX_TOKENS: Final = 1 << 21
_FIELDS: Final = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}
_SENTENCEPIECE: Final = {"bos": 1, "eos": 2, "unk": 0}
"""Defaults if the file does not say."""
_ENDS: Final = frozenset({
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<EOT>", "<end_of_utterance>", "<|return|>", "<|call|>", "<eos>",
})  # fmt: skip
"""Tokens that end a response even if the file does not say so."""
_HARMONY: Final = frozenset({"<|return|>", "<|call|>"})
"""A vocabulary with both (gpt-oss) has responses of several messages, and `<|end|>` ends a message."""

_PARSED: Final = ("<|tool_call", "<|/tool_call")
"""Prefixes of tokens that tool-call parsers look for in a response; the conversion marks all tokens <|…|> as
special."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    special: Mapping[str, int]
    """Ids by the keys of _FIELDS."""

    def text(self, name: str) -> str | None:
        return self.tokens[self.special[name]] if name in self.special else None

    @property
    def ends(self) -> list[int]:
        """Ids that end a response, eos first."""
        named = [self.special[name] for name in ("eos", "eot", "eom") if name in self.special]
        known = _ENDS - {"<|end|>"} if _HARMONY.issubset(self.tokens) else _ENDS
        return list(dict.fromkeys([*named, *(i for i, token in enumerate(self.tokens) if token in known)]))

    def added(self) -> Iterator[tuple[int, str, bool]]:
        """Tokens that are matched in text before it is split into words; and whether they are omitted from a
        response."""
        for index, kind in enumerate(self.kinds):
            if kind in (CONTROL, USER_DEFINED, UNKNOWN):
                text = self.tokens[index]
                yield index, text, kind != USER_DEFINED and not text.startswith(_PARSED)


def read_vocabulary(fields: Mapping[str, Any], is_sentencepiece: bool) -> Vocabulary:
    """Raises GgufError naming the field."""
    reader = Fields(fields, "tokenizer.ggml")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(reader.strings("tokens"))]
    if not 1 <= len(tokens) <= MAX_TOKENS:
        raise GgufError(f"its field 'tokenizer.ggml.tokens' has {len(tokens)} entries, expected 1 to {MAX_TOKENS}")
    if len(set(tokens)) != len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        raise GgufError(f"its field 'tokenizer.ggml.tokens' has '{short(twice)}' twice")
    kinds = [NORMAL] * len(tokens)
    if reader.has("token_type"):
        kinds = np.asarray(reader.numbers("token_type", len(tokens))).astype(np.int64).tolist()
    special = dict(_SENTENCEPIECE) if is_sentencepiece else {}
    for name, field in _FIELDS.items():
        if reader.has(field):
            special[name] = reader.integer(field, least=0, most=len(tokens) - 1)
    known = {name: index for name, index in special.items() if index < len(tokens)}
    return Vocabulary(tuple(tokens), tuple(kinds), known)
