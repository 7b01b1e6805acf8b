"""How a BPE tokenizer splits text into words, by the field `tokenizer.ggml.pre`.

For tokenizer.json. Invariant: each entry is what the tokenizer.json of the models with that name says, not llama.cpp's
rewrite of it. Sources: llama.cpp's table of names, which quotes those files' patterns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    parts: tuple[Part, ...]
    """Parts of tokenizer.json, in order."""
    composes: bool = False
    """Whether text is normalised to Unicode's composed form (NFC) first."""
    ignore_merges: bool = False
    """Whether a word in the vocabulary is one token even if no merges produce it."""
    adds_bos: bool = False
    """Default if the file does not say."""


def _split(pattern: str) -> Part:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> Part:
    """use_regex: splits like GPT-2."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_DIGITS: Final[Part] = {"type": "Digits", "individual_digits": True}
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHER = r" ?[^\s\p{L}\p{N}]+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

_LLAMA3 = _split(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_OTHER}[\r\n]*|{_SPACES}"), _byte_level(False)
_QWEN2 = _split(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_OTHER}[\r\n]*|{_SPACES}"), _byte_level(False)
_QWEN35 = (
    _split(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    _byte_level(False),
)
_TEKKEN = _split(rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_OTHER}[\r\n/]*|{_SPACES}"), _byte_level(False)
_GPT_4O = (
    _split(
        rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_OTHER}[\r\n/]*|{_SPACES}",
    ),
    _byte_level(False),
)
_DEEPSEEK_CODER = (
    _split(r"[\r\n]"),
    _split(r"\s?\p{L}+"),
    _split(r"\s?\p{P}+"),
    _split("[一-龥ࠀ-一가-\ud7ff]+"),
    _DIGITS,
    _byte_level(False),
)

_KINDS: Final = (
    (
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2"),
        PreTokenizer(_LLAMA3, ignore_merges=True, adds_bos=True),
    ),
    (("dbrx", "smaug-bpe"), PreTokenizer(_LLAMA3)),
    (("qwen2", "deepseek-r1-qwen"), PreTokenizer(_QWEN2, composes=True)),
    (("qwen35",), PreTokenizer(_QWEN35, composes=True)),
    (("smollm", "starcoder", "refact"), PreTokenizer((_DIGITS, _byte_level(True)))),
    (("gpt-2",), PreTokenizer((_byte_level(True),))),
    (("tekken",), PreTokenizer(_TEKKEN, ignore_merges=True, adds_bos=True)),
    (("gpt-4o",), PreTokenizer(_GPT_4O)),
    (("deepseek-coder",), PreTokenizer(_DEEPSEEK_CODER)),
)
PRE_TOKENIZERS: Final = {name: kind for names, kind in _KINDS for name in names}
