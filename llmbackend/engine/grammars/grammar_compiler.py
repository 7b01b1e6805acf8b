"""Compiles grammars on a separate thread, within limits, and caches the most recently used.

Used by constraints.py, and by the adapter, which applies the same limits to refuse, with a path, what the engine could
not compile. Invariants: a grammar that is slow or fails costs time only on this thread; the memory and time of a
compiled grammar are bounded; a matcher belongs to one request.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from llmbackend.fork_server.process_resources import give_back_freed_memory
from llmbackend.waiting.large_stacks import LargeStackExecutor

from ..errors import BadInputError
from ..messages import ModelInfo, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits for one grammar, or for computing one of its masks."""

    initial_lexer_fuel: int = 1_000_000
    """About 20 ms for the regular expressions of a grammar."""
    step_lexer_fuel: int = 100_000
    """About 7 ms for those of one mask."""
    step_max_items: int = 50_000
    """About 3 ms of one mask."""
    max_items_in_row: int = 2_000
    """Alternatives in which the grammar may continue at one position."""
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
    """Owns the compiled grammars. Its thread starts with the first of them, or with the vocabulary."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._vocabulary: Vocabulary | None = None
        """Until it has been read."""
        self._tokenizer: LLTokenizer | None = None
        self._why_no_tokenizer = ""
        self._thread: LargeStackExecutor | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._num_cached_bytes = 0

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Must precede the first grammar. The vocabulary is read immediately, on the compiler's thread, which takes a
        second."""
        self._vocabulary = vocabulary
        self._started().submit(self._read_vocabulary)

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """A new matcher. The future raises BadInputError naming the field."""
        return self._started().submit(self._compile, grammar)

    def _started(self) -> LargeStackExecutor:
        if self._thread is None:
            self._thread = LargeStackExecutor(max_workers=1, thread_name_prefix="llm-grammars")
        return self._thread

    def _read_vocabulary(self) -> None:
        """An error is raised for the requests that need the vocabulary."""
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
    """A matcher's error, for the client."""
    return matcher.get_error().partition("\n")[0][:500]


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct, frozen=True):
    """The parts of a tokenizer.json that are read; skipping the vocabulary cuts the time to a fifteenth."""

    added_tokens: list[_AddedToken] | None = None


class _ByteTokens:
    """A vocabulary of bytes, in the library's format."""

    def __init__(self, token_bytes: tuple[bytes, ...], info: ModelInfo) -> None:
        """Tokens that end a sequence are special, whatever bytes they stand for."""
        self.tokens = [*token_bytes, *[b""] * info.vocab_size][: info.vocab_size]
        for token_id in info.eos_token_ids:
            self.tokens[token_id] = f"<{token_id}>".encode()
        self.eos_token_id = info.eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = list(info.eos_token_ids)
        self._ids = {token: token_id for token_id, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        return [self._ids[data[i : i + 1]] for i in range(len(data))]


class _FileTokens:
    """A tokenizer's vocabulary in the library's format, corrected to the tokenizer's behaviour in two cases on which
    the library gets stuck: an added token that looks like `<tool_call>` is special only if the file says so, and text
    that reads like a special token is text."""

    def __init__(self, whole: LLTokenizer, markers: dict[int, str], info: ModelInfo) -> None:
        token_ids = range(whole.vocab_size)
        self.tokens = [whole.decode_bytes([token_id]) for token_id in token_ids]
        for token_id, text in markers.items():
            self.tokens[token_id] = text.encode()
        self.eos_token_id = info.eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = [one for one in token_ids if one not in markers and whole.is_special_token(one)]
        self._special = frozenset(self.special_token_ids)
        self._whole = whole

    def __call__(self, text: bytes | str) -> list[int]:
        """Text that reads like a special token remains text."""
        text = text if isinstance(text, bytes) else text.encode()
        token_ids = self._whole.tokenize_bytes(text)
        return (
            token_ids
            if self._special.isdisjoint(token_ids)
            else self._whole.greedy_tokenize(text.decode(errors="ignore"))
        )


def make_tokenizer(vocabulary: Vocabulary, info: ModelInfo) -> LLTokenizer:
    """Takes about a second for a large vocabulary; the library holds the interpreter lock during both of its calls.
    Raises ValueError if the vocabulary cannot be used."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if not info.eos_token_ids:
        raise ValueError("the model has no end-of-sequence token")
    try:
        if vocabulary.token_bytes:
            return LLTokenizer(TokenizerWrapper(_ByteTokens(vocabulary.token_bytes, info)), slices=[])
        added = msgspec.json.decode(vocabulary.tokenizer_json, type=_TokenizerFile).added_tokens or ()
        markers = {
            token.id: token.content
            for token in added
            if not token.special and token.id not in info.eos_token_ids and token.id < info.vocab_size
        }
        eos_token_ids = list(info.eos_token_ids)
        # This one never makes a mask, so it needs no slices, which take a tenth of the time.
        whole = LLTokenizer(vocabulary.tokenizer_json, info.vocab_size, eos_token_ids, slices=[])
        tokens = _FileTokens(whole, markers, info)
        wrapper = TokenizerWrapper(tokens)
        tokenizer = LLTokenizer(wrapper, info.vocab_size, eos_token_ids)
        # The library has copied them, and calls the wrapper to tokenise.
        tokens.tokens = wrapper.tokens = []
        return tokenizer
    except Exception as error:  # the library raises various types
        raise ValueError(str(error).partition("\n")[0]) from error
