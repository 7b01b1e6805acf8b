"""One step on the host: logits, then tokens, then the logprobs that prompts need.

For: the runners of the host, whose logits are of one form or another. Does not know: what computes logits. Invariant:
a step changes KV slots alone, so that it can be repeated.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from ..step import Int32Array, RowTable, SampledTokens, StepPlan
from .prompt_logprobs import Float32Array, PromptSpan, logprobs_of_spans, prompt_spans
from .sampler import LogitsT, Sampler

_Logits = TypeVar("_Logits", covariant=True)


class Forward(Protocol[_Logits]):
    """A loaded model with its KV memory, from tokens to logits."""

    def logits(self, plan: StepPlan, table: RowTable) -> _Logits | None:
        """Computes the plan's tokens and writes their KV; logits [plan.num_samples, vocab] or None when that is 0."""

    def logits_behind(self, row: int, positions: Int32Array) -> Float32Array:
        """Logits [positions, vocab or more] behind these tokens of a row of the last step; valid until the next call.
        At most PIECE_TOKENS positions."""


class HostSteps(Generic[LogitsT]):
    def __init__(self, forward: Forward[LogitsT], sampler: Sampler[LogitsT], vocab_size: int) -> None:
        self._forward, self._sampler, self._vocab_size = forward, sampler, vocab_size

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        """As Runner.execute."""
        start_s = time.perf_counter()
        logits = self._forward.logits(plan, table)
        forward_s = time.perf_counter() - start_s
        sampled = SampledTokens(np.empty(0, np.int32))
        masks = None if plan.masks is None else plan.masks.result()
        if logits is not None:
            sampled = self._sampler.sample(*plan.samples(table), logits, table, masks)
        if spans := prompt_spans(plan, table):
            sampled = self._with_prompt_logprobs(sampled, spans, table)
        sample_s = time.perf_counter() - start_s - forward_s
        return dataclasses.replace(sampled, forward_s=forward_s, sample_s=sample_s)

    def _with_prompt_logprobs(
        self, sampled: SampledTokens, spans: Sequence[PromptSpan], table: RowTable
    ) -> SampledTokens:
        def logits_of(row: int, positions: Int32Array) -> Float32Array:
            return self._forward.logits_behind(row, positions)[:, : self._vocab_size]

        prompt_logprobs, errors = logprobs_of_spans(spans, table, logits_of)
        return dataclasses.replace(sampled, prompt_logprobs=prompt_logprobs, errors={**sampled.errors, **errors})
