"""Bounds of what one generation may ask to compare or add per token, and of the JSON that asks for it.

For: schemas and text, which check a value before they do work in proportion to it. Does not know: requests, models.
Invariant: clients of OpenAI's API and of vLLM stay below every bound: OpenAI takes 4 stop strings, vLLM's GPU runner
128 stop token ids and 1024 biased tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmbackend.core.backend_api import invalid_argument

MAX_STOPS = 256
MAX_STOP_LENGTH = 1024
MAX_STOPS_TOTAL_LENGTH = 16384
"""Lengths are in characters for stop strings, in tokens for stop sequences."""
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 15
MAX_LOGIT_BIAS = 1024
MAX_PROMPT_LOGPROBS = 1 << 18
"""Entries of all tokens of a prompt together: as JSON some 20 MB, and half a second of Python in all."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_CHOICES = 64
"""Generations of one prompt."""
MAX_PARAMETERS = 256
MAX_SAMPLING_JSON_BYTES = 256 << 10
_SHOWN_KEYS = 20
_SHOWN_KEY_CHARS = 24


def check_at_most(what: str, count: int, limit: int, unit: str, param: str | None = None) -> None:
    """Raises TritonError INVALID_ARG when `what` ("input 'x'", "sampling parameter 'y'") has more than `most`
    `unit`."""
    if count > limit:
        raise invalid_argument(f"{what} has {count} {unit}, expected at most {limit}", param=param)


def check_stops(what: str, stops: Sequence[Sequence[object]], kind: str, unit: str) -> None:
    """Raises TritonError INVALID_ARG for stops that are too many, too long, or too long together.

    kind: what a stop is ("strings")
    unit: what its length counts ("characters")
    """
    check_at_most(what, len(stops), MAX_STOPS, kind)
    for index, stop in enumerate(stops):
        check_at_most(f"{what}[{index}]", len(stop), MAX_STOP_LENGTH, unit)
    check_at_most(what, sum(map(len, stops)), MAX_STOPS_TOTAL_LENGTH, f"{unit} in all")


def shown_keys(keys: Iterable[object]) -> str:
    """Keys for an error's text, shortened to stay readable."""
    texts = [key if len(key) <= _SHOWN_KEY_CHARS else f"{key[:_SHOWN_KEY_CHARS]}…" for key in map(str, keys)]
    more = len(texts) - _SHOWN_KEYS
    return ", ".join(f"'{text}'" for text in texts[:_SHOWN_KEYS]) + (f" and {more} more" if more > 0 else "")
