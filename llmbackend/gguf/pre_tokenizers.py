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
_CASED_LETTERS: Final = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-"
    "\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-"
    "\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-"
    "\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-"
    "\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-"
    "\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters of Latin, Greek, Cyrillic and other scripts with two cases."""
_DEEPSEEK_LLM = (
    _split(r"[\r\n]"),
    _split(rf"\s?[{_CASED_LETTERS}]+"),
    _split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
    _split(r"\s+$"),
    _split("[一-龥ࠀ-一가-\ud7ff]+"),
    _DIGITS,
    _byte_level(False),
)
_DEEPSEEK_V3 = (
    _split(r"\p{N}{1,3}"),
    _split("[一-龥\u3040-ゟ゠-ヿ]+"),
    _split(
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
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
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral"),
        PreTokenizer(_LLAMA3, ignore_merges=True, adds_bos=True),
    ),
    (("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer(_LLAMA3)),
    (("glm4",), PreTokenizer(_LLAMA3, ignore_merges=True)),
    (("deepseek-v3",), PreTokenizer(_DEEPSEEK_V3)),
    (("deepseek-llm",), PreTokenizer(_DEEPSEEK_LLM)),
    (("qwen2", "deepseek-r1-qwen"), PreTokenizer(_QWEN2, composes=True)),
    (("qwen35",), PreTokenizer(_QWEN35, composes=True)),
    (("smollm", "starcoder", "refact"), PreTokenizer((_DIGITS, _byte_level(True)))),
    (("gpt-2",), PreTokenizer((_byte_level(True),))),
    (("tekken",), PreTokenizer(_TEKKEN, ignore_merges=True, adds_bos=True)),
    (("gpt-4o",), PreTokenizer(_GPT_4O)),
    (("deepseek-coder",), PreTokenizer(_DEEPSEEK_CODER)),
)
PRE_TOKENIZERS: Final = {name: kind for names, kind in _KINDS for name in names}
