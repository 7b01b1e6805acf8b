"""Text and tokens of one model: tokenise, chat template, detokenise.

For: the adapter; the engine sees tokens only. Does not know: requests, stop strings. Invariant: a Text object is
read-only after it was made, so any thread may use it; text of a chat template never gets its special tokens twice.
Reads `tokenizer.json` with the `tokenizers` library; `transformers` is imported only for a checkpoint that has none.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders

from llmbackend.core.backend_api import invalid_argument

from .chat_template import ChatTemplate, Message
from .detokenizer import ByteDetokenizer, Detokenizer, NullDetokenizer, WindowDetokenizer
from .tokenizer_files import call_in, convert, download, remote_code

logger = logging.getLogger(__name__)

CONTEXT_TOKENS = 6
"""How many tokens of the prompt's end a window detokeniser sees."""
_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CACHED_TOKEN_TEXTS = 1 << 16
_SHORT_CHARS = 4096
"""A text up to here is tokenised where it is; a longer one on the library's own threads, which do not hold the
interpreter's lock and would let a short text wait for long ones."""


class TooManyTokensError(Exception):
    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens


def _check_length(num_tokens: int, below: int | None) -> None:
    if below is not None and num_tokens >= below:
        raise TooManyTokensError(num_tokens)


class Text(Protocol):
    """What the adapter needs to know about a model's text.

    max_token_chars: no token stands for more characters, which bounds the tokens of a text before it is tokenised.
    """

    max_token_chars: int

    def encode(self, text: str, *, add_special_tokens: bool, below: int | None = None) -> list[int]:
        """Raises TooManyTokensError when it is not fewer than `below` tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text, special tokens left out."""

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Any] | None, options: Mapping[str, Any]) -> str:
        """The prompt text of a conversation; encode it without special tokens. Raises TritonError INVALID_ARG."""

    def token_text(self, token_id: int) -> str:
        """One token on its own, for lists of logprobs; U+FFFD where it is part of a character."""

    def detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer: ...


class ByteText:
    """The mock model's text: ids 0 to 255 are bytes, 256 to 258 are special tokens without text, all others have
    none."""

    BOS, EOS, PAD = 256, 257, 258
    max_token_chars = 1
    _TEMPLATE = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    _NAMES = {BOS: b"<bos>", EOS: b"<eos>", PAD: b"<pad>"}  # noqa: RUF012  read-only

    def __init__(self, chat_template: str = "") -> None:
        self._template = ChatTemplate(chat_template or self._TEMPLATE, {})

    def encode(self, text: str, *, add_special_tokens: bool, below: int | None = None) -> list[int]:
        """One id per byte; there is no special token to add."""
        data = text.encode()
        _check_length(len(data), below)
        return list(data)

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._bytes(token_id) for token_id in token_ids).decode("utf-8", "replace")

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Any] | None, options: Mapping[str, Any]) -> str:
        return self._template.render(messages, tools=tools, options=options)

    def token_text(self, token_id: int) -> str:
        return self._with_special(token_id).decode("utf-8", "replace")

    def detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        return ByteDetokenizer(self._bytes if skip_special_tokens else self._with_special)

    @staticmethod
    def _bytes(token_id: int) -> bytes:
        return bytes((token_id,)) if token_id < 256 else b""

    def _with_special(self, token_id: int) -> bytes:
        return self._NAMES.get(token_id) or self._bytes(token_id)


class NoText:
    """For models whose clients send and get token ids alone; they need no tokenizer."""

    max_token_chars = 1

    def encode(self, text: str, *, add_special_tokens: bool, below: int | None = None) -> list[int]:
        raise invalid_argument("this model takes token ids, and has no tokenizer")

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Any] | None, options: Mapping[str, Any]) -> str:
        raise invalid_argument("this model takes token ids, and has no chat template")

    def token_text(self, token_id: int) -> str:
        return ""

    def detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        return NullDetokenizer()


class HuggingFaceText:
    """The text of a checkpoint with a `tokenizers` tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, chat_template: ChatTemplate | None = None, directory: Path | None = None
    ) -> None:
        """directory: where its files are."""
        self.directory = directory
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.max_token_chars = max(map(len, tokenizer.get_vocab()), default=1)
        self._template = chat_template
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._bytes = functools.lru_cache(maxsize=_CACHED_TOKEN_TEXTS)(self._token_bytes)
        self.token_text = functools.lru_cache(maxsize=_CACHED_TOKEN_TEXTS)(self._decode_one)

    def with_tokenizer(self, tokenizer_json: str) -> HuggingFaceText:
        """The same with another tokenizer, given as the text of a tokenizer.json."""
        return HuggingFaceText(Tokenizer.from_str(tokenizer_json), self._template, self.directory)

    def encode(self, text: str, *, add_special_tokens: bool, below: int | None = None) -> list[int]:
        if len(text) <= _SHORT_CHARS:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        _check_length(len(encoding), below)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Any] | None, options: Mapping[str, Any]) -> str:
        if self._template is None:
            raise invalid_argument("'messages' was given, but this model has no chat template; use 'text_input'")
        return self._template.render(messages, tools=tools, options=options)

    def detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        skip = self._special_ids if skip_special_tokens else frozenset()
        if self._byte_level:
            token_bytes = self._bytes
            return ByteDetokenizer(lambda token_id: b"" if token_id in skip else token_bytes(token_id))
        return WindowDetokenizer(self._decode_all, prompt_token_ids[-CONTEXT_TOKENS:], skip)

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _decode_one(self, token_id: int) -> str:
        return self._decode_all([token_id])

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes of a byte-level token; a token with a character outside the alphabet (an added one) stands for
        itself."""
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
    """GPT-2's alphabet of byte-level BPE: printable bytes stand for themselves, the others for code points from 256
    on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def load_text(
    model: str,
    tokenizer: str = "",
    *,
    trust_remote_code: bool = False,
    interpreter: str = "",
    chat_template: str = "",
) -> Text:
    """The text of `model`, or of `tokenizer` when it is another one; both a directory, a hub id or "mock".

    interpreter: the Python that has the libraries which only a hub id and an old kind of tokenizer need; "" = this one.
    chat_template: a file, or a template itself, in the place of the checkpoint's.

    Raises ValueError or OSError saying what is missing.
    """
    source = tokenizer or model
    own_template = _given_template(chat_template)
    if source == "mock":
        return ByteText(own_template)
    directory = local_directory(source, interpreter)
    config = read_json(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(config, read_json(directory / "special_tokens_map.json"))
    source_text = own_template or _chat_template_source(directory, config)
    template = ChatTemplate(source_text, special_tokens) if source_text is not None else None
    return HuggingFaceText(_load_tokenizer(directory, trust_remote_code, interpreter), template, directory)


def local_directory(source: str, interpreter: str) -> Path:
    """The directory itself, or that of a hub id's small files. Raises ValueError or OSError."""
    path = Path(source)
    if path.is_dir():
        return path
    if path.is_absolute() or source.startswith("."):
        raise FileNotFoundError(f"the tokenizer's directory '{source}' does not exist")
    return Path(call_in(interpreter, download, source))


def _load_tokenizer(directory: Path, trust_remote_code: bool, interpreter: str) -> Tokenizer:
    path = directory / "tokenizer.json"
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise ValueError(f"'{path.name}' of the model cannot be read: {error}") from error
    logger.warning("no tokenizer.json in %s: converting with transformers, which takes seconds", directory)
    return Tokenizer.from_str(call_in(interpreter, convert, str(directory), remote_code(trust_remote_code)))


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"'{path.name}' is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """bos_token … as strings; a token is written as a string or as an object with `content`. The first source that has
    it wins."""
    tokens: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_TOKEN_NAMES:
            value = source.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens.setdefault(name, content)
    return tokens


def _given_template(chat_template: str) -> str:
    path = Path(chat_template)
    if any(character in chat_template for character in "{}\n") or not path.is_file():
        return chat_template
    return path.read_text(encoding="utf-8")


def _chat_template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template.json, else the tokenizer config's (its "default" one of several)."""
    jinja_file = directory / "chat_template.jinja"
    if jinja_file.is_file():
        return jinja_file.read_text(encoding="utf-8")
    template = read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
