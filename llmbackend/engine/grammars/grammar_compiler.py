"""Compiles grammars on a thread of its own, within limits, and keeps those that were used last.

For: constraints.py, and the adapter, which by the same limits refuses with a path what the engine could not follow.
Does not know: rows, steps, requests. Invariants: a grammar that takes long, or fails, costs time on this thread only;
what a compiled grammar may use of memory and time is bounded; a matcher belongs to one request.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..errors import BadInputError
from ..freed_memory import give_back_freed_memory
from ..messages import ModelInfo, Vocabulary
from .vocabulary import make_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Each of one grammar, or of one mask of it."""

    initial_lexer_fuel: int = 1_000_000
    """Some 20 ms for the regular expressions of a grammar."""
    step_lexer_fuel: int = 100_000
    """Some 7 ms for those of one mask."""
    step_max_items: int = 50_000
    """Some 3 ms of one mask."""
    max_items_in_row: int = 2_000
    """Ways in which the grammar may go on from one place."""
    max_lexer_states: int = 50_000
    """Up to 100 MB."""
    max_grammar_size: int = 500_000
    """Symbols."""

    def for_library(self) -> LLParserLimits:
        from llguidance import LLParserLimits

        return LLParserLimits(verbose_errors=False, **dataclasses.asdict(self))


ENGINE_LIMITS: Final = GrammarLimits()


MAX_GRAMMAR_BYTES: Final = 4 << 20
_MAX_CACHED_BYTES: Final = 16 << 20
_MAX_CACHED_GRAMMARS: Final = 128


class GrammarCompiler:
    """Owner of the compiled grammars. Its thread starts with the first of them, or with the vocabulary."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._vocabulary: Vocabulary | None = None
        """Until it is read."""
        self._tokenizer: LLTokenizer | None = None
        self._why_no_tokenizer = ""
        self._thread: ThreadPoolExecutor | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_cached_bytes = 0

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Before the first grammar. It is read at once, on the compiler's thread: that takes a second."""
        self._vocabulary = vocabulary
        self._started().submit(self._read_vocabulary)

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """A matcher of its own. The future raises BadInputError naming the field."""
        return self._started().submit(self._compile, grammar)

    def _started(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llm-grammars")
        return self._thread

    def _read_vocabulary(self) -> None:
        """What is wrong with it is told to those who need it."""
        with contextlib.suppress(BadInputError):
            self._get_tokenizer()
        self._vocabulary = None
        give_back_freed_memory()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._make(grammar)
            self._keep(grammar, matcher)
        self._compiled.move_to_end(grammar)
        return matcher.deep_copy()

    def _make(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise BadInputError(
                f"'structured_outputs' makes a grammar of {len(grammar)} characters, expected at most "
                f"{MAX_GRAMMAR_BYTES}"
            )
        matcher = LLMatcher(self._get_tokenizer(), grammar, log_level=0, limits=ENGINE_LIMITS.for_library())
        if matcher.is_error():
            raise BadInputError(f"'structured_outputs' cannot be compiled: {first_line(matcher)}")
        return matcher

    def _get_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None and self._vocabulary is not None:
            try:
                self._tokenizer = make_tokenizer(self._vocabulary, self._info)
            except ValueError as error:
                self._why_no_tokenizer = f" ({error})"
        if self._tokenizer is None:
            raise BadInputError(
                "'structured_outputs' is not supported: this model's tokenizer cannot be read" + self._why_no_tokenizer
            )
        return self._tokenizer

    def _keep(self, grammar: str, matcher: LLMatcher) -> None:
        self._compiled[grammar] = matcher
        self._num_cached_bytes += len(grammar)
        while len(self._compiled) > _MAX_CACHED_GRAMMARS or (
            self._num_cached_bytes > _MAX_CACHED_BYTES and len(self._compiled) > 1
        ):
            oldest, _ = self._compiled.popitem(last=False)
            self._num_cached_bytes -= len(oldest)


def first_line(matcher: LLMatcher) -> str:
    """A matcher's error, for its client."""
    return matcher.get_error().partition("\n")[0][:500]
