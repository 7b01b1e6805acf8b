"""The constraints of all live requests: their compilation before they run, and their masks for each step.

Used by the engine core. Invariants: a request whose grammar is being compiled delays no other; masks are computed on a
thread during the forward pass, one step after the other; a constraint that fails is an error of its own request only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import BadInputError
from ..messages import InferRequest, ModelInfo, Vocabulary
from ..step import Int32Array, RowTable, StepPlan
from ..token_masks import PendingMasks, TokenMasks, Words, num_words
from .grammar_compiler import GrammarCompiler
from .row_constraint import RowConstraint, is_constrained

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    """A row's masks in one step.

    sample         index of its first sample
    first_word     index of its first words
    new_token_ids  output tokens that the constraint has not seen yet
    drafts
    tokens         int32 [n]  all tokens, if there are bad words
    """

    constraint: RowConstraint
    sample: int
    first_word: int
    new_token_ids: list[int]
    drafts: list[int]
    tokens: Int32Array | None


class Constraints:
    """One thread calls it."""

    def __init__(self, info: ModelInfo, table: RowTable) -> None:
        self._info, self._table = info, table
        self._compiler = GrammarCompiler(info)
        self._compiling: dict[str, tuple[InferRequest, Future[LLMatcher]]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._latest: Future[TokenMasks] | None = None
        self._words: Words = np.empty((0, num_words(info.vocab_size)), np.uint32)

    @property
    def is_compiling(self) -> bool:
        return bool(self._compiling)

    @property
    def compiling(self) -> Collection[str]:
        """The requests whose grammars are being compiled."""
        return self._compiling.keys()

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        self._compiler.set_vocabulary(vocabulary)

    def of(self, request: InferRequest) -> RowConstraint | None:
        """The constraint of a request without a grammar; None = it has none."""
        return RowConstraint(request, self._info, None) if is_constrained(request) else None

    def compile(self, request: InferRequest) -> None:
        """Starts compiling a request's grammar; `take_compiled` returns its constraint."""
        self._compiling[request.request_id] = request, self._compiler.compile(request.grammar)

    def take_compiled(self) -> list[tuple[str, RowConstraint | str]]:
        """Requests whose grammar was compiled, or cannot be: id, and constraint or reason."""
        done = [(request, future) for request, future in self._compiling.values() if future.done()]
        return [(request.request_id, self._finish(request, future)) for request, future in done]

    def wait(self, timeout_s: float) -> None:
        """Waits until a grammar has been compiled."""
        wait([future for _, future in self._compiling.values()], timeout_s, "FIRST_COMPLETED")

    def forget(self, request_id: str) -> None:
        """The request has ended, perhaps before its grammar was compiled."""
        if self._compiling and (waiting := self._compiling.pop(request_id, None)) is not None:
            waiting[1].cancel()

    def masks(self, plan: StepPlan, constraints: Mapping[int, RowConstraint]) -> PendingMasks | None:
        """The masks of the step's samples, computed on another thread and valid until the next call. None = all tokens
        are allowed for all samples. constraints: by row."""
        if self._latest is not None:
            self._latest.result()  # even of an abandoned step: a constraint has one user at a time
        jobs, count = self._jobs(plan, constraints)
        if not jobs:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llm-masks")
        if len(self._words) < count:
            self._words = np.empty((count * 2, self._words.shape[1]), np.uint32)
        self._latest = self._thread.submit(_compute, jobs, self._words[:count], plan.num_samples)
        return self._latest

    def close(self) -> None:
        self._compiler.close()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _finish(self, request: InferRequest, future: Future[LLMatcher]) -> RowConstraint | str:
        del self._compiling[request.request_id]
        try:
            return RowConstraint(request, self._info, future.result())
        except BadInputError as error:
            return str(error)
        except Exception as error:
            logger.exception("a grammar could not be compiled")
            return f"'structured_outputs' cannot be compiled: {type(error).__name__}: {error}"

    def known(self, row: int, constraint: RowConstraint) -> None:
        """Advances the row's constraint over all its known tokens. Raises BadInputError."""
        constraint.advance(self._new_token_ids(row, constraint))

    def _new_token_ids(self, row: int, constraint: RowConstraint) -> list[int]:
        table = self._table
        begin = table.num_prompt_tokens[row] + constraint.num_output
        token_ids: list[int] = table.token_ids[row, begin : table.num_tokens[row]].tolist()
        return token_ids

    def _jobs(self, plan: StepPlan, constraints: Mapping[int, RowConstraint]) -> tuple[list[_Job], int]:
        """What to compute, and the number of samples."""
        jobs: list[_Job] = []
        table, sample, first_word = self._table, 0, 0
        counts = _num_drafts(plan)
        for row, num_drafts in zip(plan.rows[plan.sample_rows].tolist(), counts, strict=True):
            constraint = constraints.get(row)
            if constraint is not None and not constraint.has_grammar:
                self.known(row, constraint)  # cheap, and may make masks unnecessary
            if constraint is not None and not constraint.is_free(num_drafts + 1):
                num_tokens = int(table.num_tokens[row])
                drafts = table.token_ids[row, num_tokens : num_tokens + num_drafts].tolist()
                tokens = table.token_ids[row, :num_tokens].copy() if constraint.has_bad_words else None
                jobs.append(_Job(constraint, sample, first_word, self._new_token_ids(row, constraint), drafts, tokens))
                first_word += 1 + num_drafts
            sample += 1 + num_drafts
        return jobs, first_word


def _num_drafts(plan: StepPlan) -> list[int]:
    if plan.num_draft_tokens is None:
        return [0] * int(np.count_nonzero(plan.sample_rows))
    counts: list[int] = plan.num_draft_tokens[plan.sample_rows].tolist()
    return counts


def _compute(jobs: Sequence[_Job], words: Words, num_samples: int) -> TokenMasks:
    """Runs on the mask thread."""
    index, errors = np.full(num_samples, -1, np.int32), dict[int, str]()
    for job in jobs:
        count = 1 + len(job.drafts)
        part = slice(job.first_word, job.first_word + count)
        index[job.sample : job.sample + count] = range(part.start, part.stop)
        for i, error in enumerate(_compute_row(job, words[part])):
            if error:
                errors[job.sample + i] = error
                index[job.sample + i] = -1
    return TokenMasks(index, words, errors)


def _compute_row(job: _Job, words: Words) -> list[str]:
    try:
        started_s = time.perf_counter()
        job.constraint.advance(job.new_token_ids)
        errors = job.constraint.masks(job.drafts, words, job.tokens)
        job.constraint.mask_s += (time.perf_counter() - started_s - job.constraint.mask_s) / 2
        return errors
    except BadInputError as error:
        return [str(error)] * len(words)
    except Exception as error:
        logger.exception("the mask of a row could not be computed")
        return [f"'structured_outputs' failed: {type(error).__name__}: {error}"] * len(words)
