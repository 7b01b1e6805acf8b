"""The scripted model's logits: the next byte of its line, then the end of the sequence.

Used by the engine's process. Independent of agents and formats. Invariant: a function of all tokens so far.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .scripts import END_OF_PROMPT, line_after, read_script

CERTAIN = 1000.0
"""What the scripted byte's logit has over all others; a token that a grammar forbids is forbidden nevertheless."""


def follow(mock_model: Any, script: str) -> None:
    """`mock_model`: the engine's module of that name."""
    turns = read_script(Path(script))
    line = lru_cache(maxsize=64)(lambda prompt: line_after(prompt, turns))
    plain, (end,) = mock_model.mock_logits, END_OF_PROMPT.encode()

    def scripted(token_ids: Any, vocab_size: int) -> Any:
        ends = np.flatnonzero(token_ids == end)
        if not len(ends):
            return plain(token_ids, vocab_size)
        text = line(token_ids[: ends[-1]].astype(np.uint8).tobytes())
        said = len(token_ids) - int(ends[-1]) - 1
        logits = np.zeros(vocab_size)
        logits[text[said] if said < len(text) else mock_model.mock_eos_token_id(vocab_size)] = CERTAIN
        return logits

    mock_model.mock_logits = scripted
