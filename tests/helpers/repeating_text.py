"""A mock model that repeats itself, so that drafts are often accepted, and often rejected.

Used by tests of speculation. Independent of engines. Invariant: like the mock model's, its logits are a function of all
tokens so far, so that a wrong KV slot changes the tokens soon.
"""

from __future__ import annotations

import zlib

import pytest

from llmbackend.engine.step import Int32Array
from llmbackend.testing import mock_model
from llmbackend.testing.mock_model import FloatArray

NUM_WORDS = 12
SURPRISE_PERIOD = 7
_plain_logits = mock_model.mock_logits


def repeating_logits(token_ids: Int32Array, vocab_size: int) -> FloatArray:
    """A clear favourite that follows from the last token, but at one text in SURPRISE_PERIOD the mock model's own
    logits."""
    logits = _plain_logits(token_ids, vocab_size)
    if zlib.crc32(token_ids.astype("<i4").tobytes(), 1) % SURPRISE_PERIOD:
        logits[40 + zlib.crc32(bytes([int(token_ids[-1]) % 256])) % NUM_WORDS] += 30.0
    return logits


def repeat_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the mock runner and its oracle repeat themselves from now on."""
    monkeypatch.setattr(mock_model, "mock_logits", repeating_logits)
