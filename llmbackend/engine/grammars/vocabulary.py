"""A model's vocabulary as the library of grammars wants it.

For: grammar_compiler.py. Does not know: grammars, requests. Invariant: the library is imported here, and only when the
first request with a grammar comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..messages import ModelInfo, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct, frozen=True):
    """What is read of a tokenizer.json: its vocabulary is skipped, which takes a fifteenth of the time."""

    added_tokens: list[_AddedToken] | None = None


class _ByteTokens:
    """A vocabulary of bytes, in the form that the library asks for."""

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
    """A tokenizer's vocabulary, in the form that the library asks for, with two things as the tokenizer means them: an
    added token that looks like `<tool_call>` is special only where the file says so, and text that reads like a special
    token is text. The library by itself gets stuck at both."""

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
        """Text that reads like a special token is still text."""
        text = text if isinstance(text, bytes) else text.encode()
        token_ids = self._whole.tokenize_bytes(text)
        return (
            token_ids
            if self._special.isdisjoint(token_ids)
            else self._whole.greedy_tokenize(text.decode(errors="ignore"))
        )


def make_tokenizer(vocabulary: Vocabulary, info: ModelInfo) -> LLTokenizer:
    """Takes about a second for a large vocabulary; the library holds the interpreter's lock in each of its two calls.
    Raises ValueError saying why the vocabulary cannot be used."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if not info.eos_token_ids:
        raise ValueError("the model names no end-of-sequence token")
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
        # This one never makes a mask, and needs no slices, which take a tenth of its time.
        whole = LLTokenizer(vocabulary.tokenizer_json, info.vocab_size, eos_token_ids, slices=[])
        tokens = _FileTokens(whole, markers, info)
        wrapper = TokenizerWrapper(tokens)
        tokenizer = LLTokenizer(wrapper, info.vocab_size, eos_token_ids)
        # The library has copied them, and calls the wrapper to tokenise.
        tokens.tokens = wrapper.tokens = []
        return tokenizer
    except Exception as error:  # of whatever kind the library raises
        raise ValueError(str(error).partition("\n")[0]) from error
