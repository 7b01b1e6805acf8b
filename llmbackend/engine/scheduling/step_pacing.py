"""Limits how many prefill tokens a step computes while other requests decode, so that the decodes do not stall.

The scheduler spends a step's budget; the engine core reports how long steps took. Invariants: a step without decodes is
limited only by its token budget; a step with prefill computes at least MIN_CHUNK_TOKENS of one prompt; the budget
affects only how prompts are chunked, never the generated tokens.

It measures the duration of decode-only steps, and the time that a prefill token adds to a step, by context length,
because attention costs more with longer contexts. Both are running means; each sample is clamped to between half and
twice the current mean, so a noisy machine moves them slowly.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIN_CHUNK_TOKENS = 2
"""Tokens. After many thousands of tokens of context, a CPU computes no more in the time of a step."""
TILE_TOKENS = 16
"""Tokens that kernels compute together; longer chunks are multiples of it."""
FIRST_CHUNK_TOKENS = 32
"""Tokens of the first chunk computed together with decodes, before anything has been measured."""
DEFAULT_STEP_RATIO = 2.4
"""Without a target, a step with prefill may take this many times as long as a decode-only step. If more requests wait
for their first token than decode, the prefill time is scaled by that ratio, so that a burst of requests does not wait
for the few that came first."""
DEFAULT_MIN_STEP_S = 0.018
"""Without a target, a step may always take this long: readers do not notice shorter gaps."""
STEPS_BETWEEN_MEASUREMENTS = 32
"""After this many steps with prefill, one step is decode-only, to measure it."""
STALE_BATCH_RATIO = 1.5
"""A measurement is stale once the number of decoding rows has changed by this factor."""

_SAMPLE_WEIGHT = 0.4
_MIN_BUCKET = 9
"""Contexts below 2**9 tokens share a bucket, because attention costs little there."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes.

    num_decodes  decoding rows
    chunks       (context, tokens) of each prompt chunk
    """

    num_decodes: int
    chunks: tuple[tuple[int, int], ...]


class StepBudget:
    """What remains of a step's budget: tokens, and seconds for prefill."""

    def __init__(self, tokens: int, seconds: float = math.inf, token_s: Callable[[int], float] | None = None) -> None:
        """token_s: seconds per token after a context of this many tokens; required if `seconds` is finite."""
        self.tokens = tokens
        self._seconds = seconds
        self._token_s = token_s
        self.is_shared = False
        """Whether a part of it was limited by `halved`."""

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left for prefill."""
        return self.tokens <= 0 or self._seconds <= 0

    def halved(self) -> StepBudget:
        """Half of what remains, but at least one token."""
        self.is_shared = True
        return StepBudget((self.tokens + 1) // 2, self._seconds / 2, self._token_s)

    def affordable_tokens(self, context: int, wanted: int) -> int:
        """How many of a prompt's next `wanted` tokens fit, after `context` others."""
        if self.is_spent:
            return 0
        count = min(self.tokens, wanted)
        if self._seconds < math.inf and self._token_s is not None:
            fitting = int(self._seconds / self._token_s(context))
            fitting -= fitting % TILE_TOKENS if fitting > 2 * TILE_TOKENS else 0
            count = min(count, max(fitting, MIN_CHUNK_TOKENS))
        return count

    def spend(self, context: int, tokens: int) -> None:
        """Subtracts a chunk from the budget."""
        self.tokens -= tokens
        if self._seconds < math.inf and self._token_s is not None:
            self._seconds -= tokens * self._token_s(context)


class StepPacer:
    """Owns the measurements of one engine. One thread calls it."""

    def __init__(self, target_s: float | None) -> None:
        """target_s: duration limit of a step with prefill; None = at least DEFAULT_STEP_RATIO decode-only steps and
        DEFAULT_MIN_STEP_S."""
        self._target_s = target_s
        self._decode_s: float | None = None
        self._decodes_measured = 0
        """Number of rows in that step."""
        self._token_s: dict[int, float] = {}
        """By bucket: contexts of about 2**bucket tokens."""
        self._in_flight: deque[StepWork] = deque()
        self._steps_since_measured = 0

    def budget(self, tokens: int, num_decodes: int, num_prompts: int = 1) -> StepBudget:
        """The prefill budget of a step with `tokens` left after `num_decodes` decodes. num_prompts: prompts being
        computed, and waiting requests for which a row is free."""
        if not num_decodes:
            return StepBudget(tokens)
        if self._is_measurement_due(num_decodes):
            return StepBudget(tokens, 0.0)
        return StepBudget(tokens, self._seconds_for_prompts(num_prompts / num_decodes), self.token_s)

    def begin(self, work: StepWork) -> None:
        self._in_flight.append(work)
        self._steps_since_measured = self._steps_since_measured + 1 if work.chunks else 0

    def end(self, step_s: float) -> None:
        """The oldest launched step took `step_s`."""
        work = self._in_flight.popleft()
        if not work.chunks:
            known_s = None if self._is_stale_for(work.num_decodes) else self._decode_s
            self._decode_s = step_s if known_s is None else _updated_mean(known_s, step_s)
            self._decodes_measured = work.num_decodes
            return
        num_tokens = sum(tokens for _, tokens in work.chunks)
        if num_tokens < MIN_CHUNK_TOKENS:
            return
        prompts_s = max(step_s - (self._decode_s or 0.0), step_s / 10)
        self._learn(work.chunks, prompts_s, num_tokens)

    def token_s(self, context: int) -> float:
        """Seconds that a prefill token adds to a step, after `context` others."""
        expected = self._expected(_bucket(context))
        return self._seconds_for_prompts(0.0) / FIRST_CHUNK_TOKENS if expected is None else expected

    def _is_measurement_due(self, num_decodes: int) -> bool:
        if self._decode_s is None:
            return all(work.chunks for work in self._in_flight)
        if self._is_stale_for(num_decodes):
            # Only after a step with prefill: if the number of rows alternates, each measurement is stale at once.
            return self._steps_since_measured > len(self._in_flight)
        return self._steps_since_measured >= STEPS_BETWEEN_MEASUREMENTS

    def _is_stale_for(self, num_decodes: int) -> bool:
        ratio = num_decodes / max(self._decodes_measured, 1)
        return not 1 / STALE_BATCH_RATIO < ratio < STALE_BATCH_RATIO

    def _seconds_for_prompts(self, prompts_per_decode: float) -> float:
        decode_s = self._decode_s or 0.0
        target_s = self._target_s
        if target_s is None:
            factor = max(DEFAULT_STEP_RATIO, 1.0 + prompts_per_decode)
            target_s = max(factor * decode_s, DEFAULT_MIN_STEP_S)
        # If decodes alone exceed the target, prompts get their smallest chunk.
        return max(target_s - decode_s, 1e-6)

    def _learn(self, chunks: Sequence[tuple[int, int]], prompts_s: float, num_tokens: int) -> None:
        buckets = [_bucket(context) for context, _ in chunks]
        known = [self._expected(bucket) for bucket in buckets]
        if any(token_s is None for token_s in known):
            self._token_s.update(dict.fromkeys(buckets, prompts_s / num_tokens))
            return
        expected = [token_s or 0.0 for token_s in known]
        ratio = prompts_s / sum(tokens * token_s for (_, tokens), token_s in zip(chunks, expected, strict=True))
        for bucket, token_s in dict(zip(buckets, expected, strict=True)).items():
            self._token_s[bucket] = _updated_mean(token_s, token_s * ratio)

    def _expected(self, bucket: int) -> float | None:
        """The measurement for this bucket, else for the next shorter contexts, else for the shortest measured."""
        found = self._token_s.get(bucket)
        if found is not None or not self._token_s:
            return found
        below = [each for each in self._token_s if each < bucket]
        return self._token_s[max(below) if below else min(self._token_s)]


def _bucket(context: int) -> int:
    return max(context.bit_length(), _MIN_BUCKET)


def _updated_mean(mean: float, value: float) -> float:
    value = min(max(value, mean / 2), mean * 2)
    return mean + _SAMPLE_WEIGHT * (value - mean)
