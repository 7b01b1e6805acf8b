"""Constraints compiled and matched over bytes, without a model.

Used by tests of structured outputs. The compiler is the adapter's own; special tokens are those of SPECIAL_TOKENS.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmbackend.adapter.structured_outputs.compilation import GrammarCompiler
from llmbackend.adapter.structured_outputs.constraint import read

SPECIAL_TOKENS = {300: "<tool_call>", 301: "</tool_call>"}
_NAMES = re.compile("(" + "|".join(map(re.escape, SPECIAL_TOKENS.values())) + ")")
_IDS = {text: token_id for token_id, text in SPECIAL_TOKENS.items()}
EOS = 256


def compiler() -> GrammarCompiler:
    return GrammarCompiler(SPECIAL_TOKENS.get, 400)


def grammar(compiler: GrammarCompiler, **parameters: Any) -> str:
    constraint = read(parameters)
    assert constraint is not None
    return compiler.grammar(constraint).text


def not_enforced(compiler: GrammarCompiler, **parameters: Any) -> tuple[str, ...]:
    constraint = read(parameters)
    assert constraint is not None
    return compiler.grammar(constraint).not_enforced


def accepts(compiler: GrammarCompiler, text: str, *, special: bool = False, **parameters: Any) -> bool:
    """Whether the whole text can be generated and may end there. special: markers are special tokens."""
    matcher = compiler.matcher(grammar(compiler, **parameters))
    tokens = _tokens(text) if special else list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def _tokens(text: str) -> list[int]:
    return [token for part in _NAMES.split(text) for token in ([_IDS[part]] if part in _IDS else part.encode())]


def walk(
    compiler: GrammarCompiler, rng: random.Random, grammar_text: str, most: int = 400, hints: Sequence[str] = ()
) -> str | None:
    """A random text of the grammar, drawn byte by byte from the masks; None when it is cut off after `most` bytes.

    hints: texts that are written often, where the grammar allows them: without them, free text would hardly end
    """
    matcher = compiler.matcher(grammar_text)
    out = bytearray()
    while len(out) < most:
        if hints and rng.random() < 0.3:
            hint = rng.choice(hints).encode()
            num_written = matcher.try_consume_tokens(list(hint))
            out += hint[:num_written]
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[: EOS + 1]
        allowed = np.flatnonzero(mask).tolist()
        assert allowed, f"no token is left after {bytes(out)!r}: {matcher.get_error()}"
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return out.decode()
        token = _choose(rng, [token for token in allowed if token != EOS])
        assert matcher.consume_token(token), matcher.get_error()
        out.append(token)
    return None


def _choose(rng: random.Random, allowed: list[int]) -> int:
    """Closing marks more often than others, so that most walks come to an end."""
    closing = [token for token in allowed if token in b'"}],:']
    return rng.choice(closing if closing and rng.random() < 0.5 else allowed)
