"""A model's tokenizer: text to tokens, tokens to text (incrementally or at once), and conversations to prompts.

Used by the adapter; the engine sees only tokens. Independent of requests, stop strings and files
(tokenizer_loading.py). Invariants: a tokenizer is read-only once created, hence thread-safe; the pieces produced by a
detokenizer never end inside a character, and together they are the decoded text, streamed or not.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders

from llmbackend.core.backend_api import TritonError, invalid_argument
from llmbackend.engine.messages import Vocabulary

from .chat import Message

if TYPE_CHECKING:
    from .chat_template import ChatTemplate

REPLACEMENT = "\ufffd"
MAX_UTF8_BYTES = 4
CONTEXT_TOKENS = 6
"""Tokens at the end of the prompt that WindowDetokenizer decodes together with the output."""
_MAX_TEXTLESS = 64
"""Successive tokens without text that WindowDetokenizer decodes together with those after them; others add no text."""
_CACHED_TOKEN_TEXTS = 1 << 16
_FALLBACK_BYTE = re.compile("<0x([89A-F][0-9A-F])>")
"""The name of a token that represents one byte, in vocabularies with byte fallback."""
_SHORT_CHARS = 4096
"""Longer texts, and sequences of more tokens, are converted on the library's own threads, which release the GIL; a
short text would have to wait there for long ones."""


class TooManyTokensError(Exception):
    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens


def _check_length(num_tokens: int, below: int | None) -> None:
    if below is not None and num_tokens >= below:
        raise TooManyTokensError(num_tokens)


def no_tokenizer(what: str, param: str | None = None) -> TritonError:
    """The error for a request that needs text from a model without a tokenizer."""
    return invalid_argument(f"{what}, but this model has no tokenizer: it takes and gives token ids", param=param)


class Detokenizer:
    """Converts the tokens of one generation to text, one by one, each at a cost independent of the sequence's length.
    The base class is for generations whose text is not read."""

    __slots__ = ()

    def push(self, token_id: int) -> str:
        """The text completed by this token, possibly ""."""
        return ""

    def flush(self) -> str:
        """The rest at the end of the sequence; an unfinished character becomes U+FFFD."""
        return ""


class ModelTokenizer:
    """A model's tokenizer and chat template. The base class is for models whose clients exchange only token ids."""

    has_text = False
    max_token_chars = 1
    """Length of the longest token; bounds from below how many tokens a long text has."""
    chat_template = ""
    """Its source; "" = none."""
    config: Mapping[str, Any] = MappingProxyType({})
    """tokenizer_config.json, including `tokenizer_class`."""
    _template: ChatTemplate | None = None

    def encode(self, text: str, *, add_special_tokens: bool, below: int | None = None) -> list[int]:
        """The token ids of a text. Raises TooManyTokensError if there are `below` or more."""
        raise no_tokenizer("the request has a text")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text."""
        return ""

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
        template: str = "",
    ) -> str:
        """The prompt text of a conversation, to be encoded without special tokens. template: used instead of the
        model's. Raises TritonError INVALID_ARG."""
        if not self.has_text:
            raise no_tokenizer("'messages' was given")
        from .chat_template import request_template  # its library is not needed before a model has a tokenizer

        chosen = self._template
        if template:
            chosen = request_template(template, () if chosen is None else tuple(chosen.special_tokens.items()))
        if chosen is None:
            raise invalid_argument(
                "'messages' was given, but this model has no chat template: name one with --chat-template, or send "
                "'text_input' (to /v1/completions 'prompt')"
            )
        return chosen.render(messages, tools=tools, options=options)

    def token_text(self, token_id: int) -> str:
        """The text of a single token, for lists of logprobs; U+FFFD if the token holds only part of a
        character."""
        return ""

    def partial_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token that is not whole characters; None for other tokens."""
        return None

    def special_text(self, token_id: int) -> str | None:
        """The text of a special token; None for other tokens."""
        return None

    def token_id(self, token: str) -> int | None:
        """The id of the token with this name in the vocabulary."""
        return None

    def token_name(self, token_id: int) -> str:
        """The token's name in the vocabulary, "" if there is none. Not its text: it may represent a space by another
        character."""
        return ""

    def vocabulary(self) -> Vocabulary | None:
        """The tokens' bytes or tokenizer.json, for grammars; None if unknown."""
        return None

    def detokenizer(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True
    ) -> Detokenizer:
        return Detokenizer()


class ByteTokenizer(ModelTokenizer):
    """The mock model's: ids 0 to 255 are bytes, 256 to 258 special tokens; all others have no text."""

    has_text = True
    BOS, EOS, PAD = 256, 257, 258
    _TEMPLATE = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    _NAMES = {BOS: b"<bos>", EOS: b"<eos>", PAD: b"<pad>"}  # noqa: RUF012  read-only

    def __init__(self, chat_template: str = "") -> None:
        from .chat_template import ChatTemplate

        self.chat_template = chat_template or self._TEMPLATE
        self._template = ChatTemplate(self.chat_template, {})
        self._texts, self._texts_with_special = TokenTexts(self._bytes), TokenTexts(self._with_special)

    def encode(self, text: str, *, add_special_tokens: bool, below: int | None = None) -> list[int]:
        """One id per byte; there is no special token to add."""
        data = text.encode()
        _check_length(len(data), below)
        return list(data)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text_of = self._bytes if skip_special_tokens else self._with_special
        return b"".join(text_of(token_id) for token_id in token_ids).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return self._with_special(token_id).decode("utf-8", "replace")

    def partial_bytes(self, token_id: int) -> bytes | None:
        return self._bytes(token_id) if 0x80 <= token_id < 256 else None

    def special_text(self, token_id: int) -> str | None:
        name = self._NAMES.get(token_id)
        return None if name is None else name.decode()

    def token_id(self, token: str) -> int | None:
        return next((token_id for token_id, name in self._NAMES.items() if name.decode() == token), None)

    def token_name(self, token_id: int) -> str:
        return self._with_special(token_id).decode("latin-1")

    def detokenizer(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True
    ) -> Detokenizer:
        return ByteDetokenizer(self._texts if skip_special_tokens else self._texts_with_special)

    def vocabulary(self) -> Vocabulary | None:
        return Vocabulary(token_bytes=tuple(bytes((byte,)) for byte in range(256)))

    @staticmethod
    def _bytes(token_id: int) -> bytes:
        return bytes((token_id,)) if token_id < 256 else b""

    def _with_special(self, token_id: int) -> bytes:
        return self._NAMES.get(token_id) or self._bytes(token_id)


def _longest_name(tokenizer: Tokenizer) -> int:
    """In characters. Reads get_vocab(), a dict of all tokens, only if the ids have gaps."""
    size = tokenizer.get_vocab_size()
    lengths = [len(name) for name in map(tokenizer.id_to_token, range(size)) if name is not None]
    return max(lengths if len(lengths) == size else map(len, tokenizer.get_vocab()), default=1)


class HuggingFaceTokenizer(ModelTokenizer):
    """A checkpoint's tokenizer, implemented by the library `tokenizers`."""

    has_text = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None = None,
        directory: Path | None = None,
        tokenizer_json: str = "",
    ) -> None:
        """directory: the checkpoint's; None for a tokenizer created in memory. tokenizer_json: its source; "" = read
        the file in the directory."""
        self._json = tokenizer_json.encode()
        self.directory = directory
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.max_token_chars = _longest_name(tokenizer)
        self._template = chat_template
        self.chat_template = "" if chat_template is None else chat_template.source
        added = tokenizer.get_added_tokens_decoder()
        self._special_texts = {token_id: str(token.content) for token_id, token in added.items() if token.special}
        self._special_ids = frozenset(self._special_texts)
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._texts, self._texts_with_special = TokenTexts(self._shown_bytes), TokenTexts(self._token_bytes)
        self.token_text = functools.lru_cache(_CACHED_TOKEN_TEXTS)(lambda token_id: self._decode_all([token_id]))  # type: ignore[method-assign]

    def encode(self, text: str, *, add_special_tokens: bool, below: int | None = None) -> list[int]:
        if len(text) <= _SHORT_CHARS:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        _check_length(len(encoding), below)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(token_ids) <= _SHORT_CHARS:
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))
        (text,) = self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def detokenizer(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True
    ) -> Detokenizer:
        if self._byte_level:
            return ByteDetokenizer(self._texts if skip_special_tokens else self._texts_with_special)
        skip = self._special_ids if skip_special_tokens else frozenset()
        window = WindowDetokenizer(self._decode_window, prompt_token_ids[-CONTEXT_TOKENS:], skip)
        is_plain = spaces_between_special_tokens or skip_special_tokens
        return window if is_plain else UnspacedSpecialTokens(window, self.special_text)

    def partial_bytes(self, token_id: int) -> bytes | None:
        if not self._byte_level:
            byte = _FALLBACK_BYTE.fullmatch(self.token_name(token_id))
            return None if byte is None else bytes.fromhex(byte[1])
        return self._token_bytes(token_id) if self._texts_with_special[token_id] is None else None

    def special_text(self, token_id: int) -> str | None:
        return self._special_texts.get(token_id)

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def token_name(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

    def vocabulary(self) -> Vocabulary | None:
        path = self.directory and self.directory / "tokenizer.json"
        if not self._json and path and path.is_file():
            return Vocabulary(tokenizer_json=path.read_text(encoding="utf-8"))
        return Vocabulary(tokenizer_json=self._json.decode() or self._tokenizer.to_str())

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _decode_window(self, token_ids: Sequence[int]) -> str:
        """As `_decode_all`. Half of the windows are a single token, whose text is kept."""
        return self.token_text(token_ids[0]) if len(token_ids) == 1 else self._decode_all(token_ids)

    def _shown_bytes(self, token_id: int) -> bytes:
        """Like `_token_bytes`, but empty for special tokens."""
        return b"" if token_id in self._special_ids else self._token_bytes(token_id)

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes of a byte-level token, or the text of a token with other characters (an added one)."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        alphabet = byte_of_character()
        try:
            return bytes(alphabet[character] for character in token)
        except KeyError:
            return token.encode()


@functools.cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet for byte-level BPE: printable bytes represent themselves, others are code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class TokenTexts(dict[int, str | None]):
    """Caches the texts of byte-string tokens; None for one whose bytes are not whole characters. Thread-safe."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self.bytes_of = token_bytes

    def __missing__(self, token_id: int) -> str | None:
        if len(self) >= _CACHED_TOKEN_TEXTS:
            self.clear()
        try:
            text = self.bytes_of(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class ByteDetokenizer(Detokenizer):
    """For vocabularies whose tokens are byte strings (byte-level BPE, bytes). Exact for all sequences, including
    invalid UTF-8."""

    __slots__ = ("_decoder", "_is_inside_character", "_texts")

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_inside_character = False

    def push(self, token_id: int) -> str:
        if not self._is_inside_character:  # nearly all tokens are whole characters and need no decoder
            text = self._texts[token_id]
            if text is not None:
                return text
        text = self._decoder.decode(self._texts.bytes_of(token_id))
        self._is_inside_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    """For all other decoders (byte fallback, WordPiece …), where a token's text depends on its neighbours.

    Decodes a window that consists of some tokens already shown and those not yet shown; the difference between their
    texts is new. The window starts with the end of the prompt, so that a space before the first word is preserved.
    Tokens in `skip` add no text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = (), skip: frozenset[int] = frozenset()
    ) -> None:
        self._decode = decode
        self._skip = skip
        self._window = [token_id for token_id in context if token_id not in skip]
        self._context_text = decode(self._window) if self._window else ""
        if self._context_text.endswith(REPLACEMENT):
            self._window, self._context_text = [], ""
        self._context_length = len(self._window)
        self._incomplete = 0

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            # The start of a character, or invalid bytes: the fourth byte decides.
            self._incomplete += 1
            if self._incomplete < MAX_UTF8_BYTES:
                return ""
        return self._show(text)

    def flush(self) -> str:
        if len(self._window) == self._context_length:
            return ""
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        new = text[len(self._context_text) :]
        self._incomplete = 0
        if new:
            self._window = self._window[self._context_length :]
            self._context_length = len(self._window)
            self._context_text = self._decode(self._window)
        else:
            del self._window[self._context_length + _MAX_TEXTLESS :]
        return new


class UnspacedSpecialTokens(Detokenizer):
    """Omits spaces between consecutive special tokens: vLLM's `spaces_between_special_tokens: false`."""

    def __init__(self, detokenizer: Detokenizer, special_text: Callable[[int], str | None]) -> None:
        self._detokenizer = detokenizer
        self._special_text = special_text
        self._follows_special = False

    def push(self, token_id: int) -> str:
        text, special = self._detokenizer.push(token_id), self._special_text(token_id)
        follows, self._follows_special = self._follows_special, special is not None
        return special if special is not None and follows else text

    def flush(self) -> str:
        return self._detokenizer.flush()
