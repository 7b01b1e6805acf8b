"""Limits on a model's requests, and on what a generation may require to be compared or added per token.

Used by schemas, text and request conversion, which check a value before they do work proportional to it. Independent of
requests. Invariant: requests valid for OpenAI's API and vLLM are within the bounds: OpenAI accepts 4 stop
strings, vLLM's GPU runner 128 stop token ids and 1024 biased tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmbackend.core.backend_api import invalid_argument
from llmbackend.engine.config import StructuredOutputsConfig

MAX_STOPS = 256
MAX_STOP_LENGTH = 1024
MAX_STOPS_TOTAL_LENGTH = 16384
"""Lengths are characters for stop strings, tokens for stop sequences."""
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 15
MAX_LOGIT_BIAS = 1024
MAX_PROMPT_LOGPROBS = 1 << 18
"""Entries over all tokens of a prompt: about 20 MB of JSON and half a second of Python."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_CHOICES = 128
"""Generations per prompt."""
MAX_PARAMETERS = 256
MAX_MESSAGES_BYTES = 4 << 20
"""Default limit for the JSON in the input `messages`."""
MAX_SAMPLING_JSON_BYTES = 256 << 10
MAX_CACHE_SALT_CHARS = 1024
"""Host and engine remember the salts of many requests."""
_SHOWN_KEYS = 20
_SHOWN_KEY_CHARS = 24


def check_at_most(what: str, count: int, limit: int, unit: str, param: str | None = None) -> None:
    """Raises TritonError INVALID_ARG if `what` ("input 'x'", "sampling parameter 'y'") exceeds `limit` of `unit`."""
    if count > limit:
        raise invalid_argument(f"{what} has {count} {unit}, expected at most {limit}", param=param)


def check_stops(what: str, stops: Sequence[Sequence[object]], kind: str, unit: str) -> None:
    """Raises TritonError INVALID_ARG if there are too many stops, or if one or all of them are too long.

    kind: what a stop is ("strings")
    unit: the unit of its length ("characters")
    """
    check_at_most(what, len(stops), MAX_STOPS, kind)
    for index, stop in enumerate(stops):
        check_at_most(f"{what}[{index}]", len(stop), MAX_STOP_LENGTH, unit)
    check_at_most(what, sum(map(len, stops)), MAX_STOPS_TOTAL_LENGTH, f"{unit} in all")


def shown_keys(keys: Iterable[object]) -> str:
    """Keys for an error text, shortened to keep it readable."""
    texts = [key if len(key) <= _SHOWN_KEY_CHARS else f"{key[:_SHOWN_KEY_CHARS]}…" for key in map(str, keys)]
    more = len(texts) - _SHOWN_KEYS
    return ", ".join(f"'{text}'" for text in texts[:_SHOWN_KEYS]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits on a request. With several engines, the strictest limits apply."""

    max_tokens: int
    """Prompt and output together."""
    vocab_size: int
    max_prompt_tokens: int = 0
    """0 = limited only by max_tokens."""
    max_output_tokens: int = 0
    """0 = limited only by max_tokens."""
    kv_block_size: int = 1
    """Tokens per block."""
    trusts_request_templates: bool = False
    """Whether a conversation may contain its own chat template."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template; a request may override them."""
    max_logprobs: int = 20
    """Maximum number of logprobs per position."""
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    """Options for all JSON that is generated from a schema."""
    max_messages_bytes: int = MAX_MESSAGES_BYTES
    """Limit for the JSON in the input `messages`."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence tokens."""

    def remaining_tokens(self, num_prompt_tokens: int) -> int:
        """How many tokens can follow the prompt."""
        room = self.max_tokens - num_prompt_tokens
        return min(room, self.max_output_tokens) if self.max_output_tokens else room
