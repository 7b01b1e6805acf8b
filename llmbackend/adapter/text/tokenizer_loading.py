"""Loads a model's tokenizer and chat template, and verifies them against transformers before the first request.

Used by ModelState. Independent of requests and engines. Invariants: `TokenizerLoader.verified` produces the token ids
of AutoTokenizer, or a warning says why that could not be verified. The verdict is cached next to the packed weights,
and used only for the same file contents and the same library versions; a cache file is not used if it is damaged or
writable by other users; failure to write one never fails a start.
Source: AutoTokenizer.from_pretrained and TokenizersBackend.convert_to_native_format of transformers 5.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from llmbackend import __version__
from llmbackend.core.backend_api import TritonError, invalid_argument
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.weight_cache.cache_folder import (
    CacheFolder,
    FolderRefusedError,
    limit_bytes_of,
    usable_directory,
)
from llmbackend.fork_server.client import is_this
from llmbackend.gguf.tokenizer_files import MARKER

from .tokenizer import ByteTokenizer, HuggingFaceTokenizer, ModelTokenizer
from .tokenizer_files import (
    FILES,
    TOKENIZER_FILE,
    convert,
    download,
    rebuilt,
    remote_code_argument,
    result_of,
    run_in,
    start_in,
)

logger = logging.getLogger(__name__)

_AS_IN_THE_FILE = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Tokenizer classes that load tokenizer.json unchanged."""
_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
REBUILT_MODEL_TYPES = frozenset(
    ("hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "siglip2")
)
"""Model types for which AutoTokenizer uses its own class even if the checkpoint names another one."""


class TokenizerLoader:
    """Owner of the verifying process. `_lock`: instances that start concurrently wait for one result.

    Reads `tokenizer.json` with the `tokenizers` library; if a checkpoint has none, transformers converts it in the
    engine's environment (tokenizer_files.py). AutoTokenizer rebuilds some tokenizers from a class of its own, which
    shows only when it is run. That takes seconds, in a separate process during the engine's start, unless the
    checkpoint's class uses the file unchanged or the verdict is cached.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Reads the small files. Raises TritonError INVALID_ARG that says what is missing."""
        self._config = config
        self._lock = threading.Lock()
        self._check: subprocess.Popen[bytes] | None = None
        self._verdicts: Verdicts | None = None
        self._tokenizer: ModelTokenizer | None = None
        try:
            source = config.tokenizer or config.model
            self._files = TokenizerSource.of(source, config.engine_python, config.chat_template)
        except (ValueError, OSError, ImportError) as error:
            raise self._unloadable(error) from error

    @property
    def chat_template(self) -> str:
        """The source of the chat template; "" = none."""
        return self._files.chat_template or ""

    @property
    def kind(self) -> str:
        """The tokenizer's source, for display."""
        directory = self._files.directory
        if directory is None:
            return "bytes"
        file = TOKENIZER_FILE if (directory / TOKENIZER_FILE).is_file() else "converted by transformers"
        name = read_json(directory / "tokenizer_config.json").get("tokenizer_class")
        return f"{file} ({name})" if name else file

    def load(self) -> None:
        """Loads the tokenizer and starts to verify it. Further calls do nothing. Raises TritonError INVALID_ARG."""
        with self._lock:
            self._load()

    def verified(self) -> ModelTokenizer:
        """The tokenizer; waits until it has been verified."""
        with self._lock:
            tokenizer = self._load()
            check, self._check = self._check, None
            if check is not None:
                tokenizer = self._tokenizer = self._verify(tokenizer, check)
            return tokenizer

    def close(self) -> None:
        if self._check is not None:
            _end(self._check)
            self._check = None

    def _load(self) -> ModelTokenizer:
        if self._tokenizer is not None:
            return self._tokenizer
        config, directory = self._config, self._files.directory
        try:
            verdict = self._look_up(directory) if directory is not None and may_be_rebuilt(directory) else ""
            self._tokenizer = self._files.load(config.trust_remote_code, config.engine_python, verdict or "")
        except (ValueError, OSError, ImportError) as error:
            self.close()
            raise self._unloadable(error) from error
        return self._tokenizer

    def _look_up(self, directory: Path) -> str | None:
        """The cached verdict; if there is none, starts verification and returns None. Verdicts that depend on a
        checkpoint's own code, or on another Python's libraries, are not cached."""
        trust = self._config.trust_remote_code
        if is_this(self._config.engine_python) and not trust:
            self._verdicts = Verdicts(self._config, directory)
            verdict = self._verdicts.read()
            if verdict is not None:
                return verdict
        self._check = start_in(self._config.engine_python, rebuilt, str(directory), remote_code_argument(trust))
        return None

    def _verify(self, tokenizer: ModelTokenizer, check: subprocess.Popen[bytes]) -> ModelTokenizer:
        config, directory = self._config, self._files.directory
        try:
            tokenizer_json = result_of(check, config.load_timeout_s)
            if tokenizer_json:
                tokenizer = self._files.load(config.trust_remote_code, config.engine_python, tokenizer_json)
                logger.info("%s: transformers rebuilds this tokenizer with other token ids, which are used", directory)
            if self._verdicts is not None:
                self._verdicts.keep(tokenizer_json)
        except Exception as error:  # raised by transformers or by a checkpoint's code, or a timeout
            _end(check)
            logger.warning("%s: tokenizer.json is used unverified: AutoTokenizer fails: %s", directory, error)
        return tokenizer

    def _unloadable(self, error: Exception) -> TritonError:
        source = self._config.tokenizer or self._config.model
        return invalid_argument(f"the tokenizer of '{source}' cannot be loaded: {error}")


def may_be_rebuilt(directory: Path) -> bool:
    """Whether AutoTokenizer might change this tokenizer.json."""
    if not (directory / TOKENIZER_FILE).is_file():
        return False  # transformers converts it
    tokenizer, model = read_json(directory / "tokenizer_config.json"), read_json(directory / "config.json")
    if MARKER in tokenizer:  # transformers converts a GGUF file's tokenizer in its own way
        return False
    tokenizer_class = tokenizer.get("tokenizer_class") or model.get("tokenizer_class")
    if tokenizer_class not in _AS_IN_THE_FILE or model.get("model_type") in REBUILT_MODEL_TYPES:
        return True
    return any(name in tokenizer for name in ("add_bos_token", "add_eos_token", "auto_map"))


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """The source of a tokenizer. Only small files have been read."""

    directory: Path | None
    """None = the mock model's."""
    chat_template: str | None
    """Its text; None = there is none."""
    special_tokens: Mapping[str, str]
    """Variables of the template."""
    config: Mapping[str, Any]
    """tokenizer_config.json."""

    @classmethod
    def of(cls, source: str, interpreter: str, chat_template: str) -> TokenizerSource:
        """source: a directory, a hub id, or "mock". Raises ValueError or OSError that says what is missing."""
        given = _given_template(chat_template)
        if source == "mock":
            return cls(None, given, {}, {})
        directory = local_directory(source, interpreter)
        _check_files(directory)
        config = read_json(directory / "tokenizer_config.json")
        special_tokens = _special_tokens(config, read_json(directory / "special_tokens_map.json"))
        return cls(directory, given or _chat_template_source(directory, config), special_tokens, config)

    def load(self, trust_remote_code: bool, interpreter: str, tokenizer_json: str = "") -> ModelTokenizer:
        """tokenizer_json: used in place of the file. Raises ValueError or OSError."""
        tokenizer = self._made(trust_remote_code, interpreter, tokenizer_json)
        default = "ByteTokenizer" if self.directory is None else "PreTrainedTokenizerFast"
        tokenizer.config = {"tokenizer_class": default, **self.config}
        return tokenizer

    def _made(self, trust_remote_code: bool, interpreter: str, tokenizer_json: str) -> ModelTokenizer:
        if self.directory is None:
            return ByteTokenizer(self.chat_template or "")
        from .chat_template import ChatTemplate

        template = None if self.chat_template is None else ChatTemplate(self.chat_template, self.special_tokens)
        if tokenizer_json:
            return HuggingFaceTokenizer(Tokenizer.from_str(tokenizer_json), template, self.directory, tokenizer_json)
        tokenizer = _read_tokenizer(self.directory, trust_remote_code, interpreter)
        return HuggingFaceTokenizer(tokenizer, template, self.directory)


def local_directory(source: str, interpreter: str) -> Path:
    """A model's directory; for a hub id, one with its small files. Raises ValueError or OSError."""
    path = Path(source)
    if path.is_dir():
        return path
    if path.is_absolute() or source.startswith("."):
        raise FileNotFoundError(f"the tokenizer's directory '{source}' does not exist")
    return Path(run_in(interpreter, download, source))


def _check_files(directory: Path) -> None:
    """Raises ValueError for a tokenizer file on which a library would block, such as a pipe."""
    for pattern in FILES:
        for path in directory.glob(pattern):
            if not path.is_file() and not path.is_dir():
                raise ValueError(f"'{path.name}' is not a regular file")


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object; {} if there is no file. Raises ValueError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"'{path.name}' is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _read_tokenizer(directory: Path, trust_remote_code: bool, interpreter: str) -> Tokenizer:
    path = directory / TOKENIZER_FILE
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise ValueError(f"'{path.name}' of the model cannot be read: {error}") from error
    logger.warning("no tokenizer.json in %s: converting with transformers, which takes seconds", directory)
    return Tokenizer.from_str(run_in(interpreter, convert, str(directory), remote_code_argument(trust_remote_code)))


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """bos_token … as strings, from the first source that has it; a token is a string or an object with `content`."""
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
    """chat_template.jinja, else chat_template.json, else that of the tokenizer config; one template of two if there is
    also one for conversations with tools. Source of the names: transformers' get_chat_template."""
    jinja_file, tool_file = directory / "chat_template.jinja", directory / "additional_chat_templates/tool_use.jinja"
    if jinja_file.is_file():
        default = jinja_file.read_text(encoding="utf-8")
        return _by_tools(default, tool_file.read_text(encoding="utf-8")) if tool_file.is_file() else default
    template = read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template, with_tools = named.get("default"), named.get("tool_use")
        if isinstance(template, str) and isinstance(with_tools, str):
            return _by_tools(template, with_tools)
    return template if isinstance(template, str) else None


def _by_tools(default: str, with_tools: str) -> str:
    """Each renders as it would alone: Jinja drops the newline after a tag (trim_blocks) and the one at the end of a
    template, and `+` keeps white space before a tag (lstrip_blocks)."""
    default, with_tools = default.removesuffix("\n"), with_tools.removesuffix("\n")
    return f"{{% if tools %}}\n{with_tools}{{%+ else %}}\n{default}{{%+ endif %}}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


_FORMAT: Final = b"llmbackend tokenizer verdict 1\n"
_DIGEST_BYTES: Final = 32
_ENDING: Final = ".tokenizer"
MAX_VERDICTS: Final = 32
"""When there are more, the oldest are removed."""


class Verdicts:
    """The cached verdict on one tokenizer: the text of another tokenizer.json, "" if the file is used unchanged."""

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        """directory: that of the tokenizer's files"""
        self._config = config
        self._path = usable_directory(config)
        self._name = ""
        try:
            self._name = f"{_key(directory)}{_ENDING}"
        except (OSError, ImportError):  # a library is missing
            self._path = None

    def read(self) -> str | None:
        """None if there is none."""
        try:
            with contextlib.ExitStack() as stack:
                descriptor = self._folder(stack).open_image(self._name)
                if descriptor is None:
                    return None
                content = stack.enter_context(os.fdopen(descriptor, "rb")).read()
        except (OSError, FolderRefusedError):
            return None
        text = content[len(_FORMAT) + _DIGEST_BYTES :]
        if content[: len(_FORMAT) + _DIGEST_BYTES] != _FORMAT + hashlib.sha256(text).digest():
            logger.warning("'%s' is damaged; verifying the tokenizer again", self._name)
            return None
        return text.decode()

    def keep(self, verdict: str) -> None:
        text = verdict.encode()
        try:
            with contextlib.ExitStack() as stack:
                folder = self._folder(stack)
                descriptor, unfinished = folder.new_file()
                with os.fdopen(descriptor, "wb", closefd=True) as file:
                    file.write(_FORMAT + hashlib.sha256(text).digest() + text)
                    file.flush()
                    folder.publish(descriptor, unfinished, self._name)
                folder.keep_newest(_ENDING, MAX_VERDICTS)
        except (OSError, FolderRefusedError) as error:
            logger.info("the tokenizer's verification is not cached: %s", error)

    def _folder(self, stack: contextlib.ExitStack) -> CacheFolder:
        """Raises FolderRefusedError if there is none."""
        if self._path is None:
            raise FolderRefusedError("there is no cache")
        folder = CacheFolder(self._path, limit_bytes_of(self._config))
        stack.callback(folder.close)
        return folder


def _key(directory: Path) -> str:
    """A digest of the files read by AutoTokenizer and of the libraries' versions."""
    digest = hashlib.sha256(f"{__version__} {version('tokenizers')} {version('transformers')}".encode())
    for path in sorted(directory.iterdir()):
        if any(fnmatch(path.name, pattern) for pattern in FILES) and path.is_file():
            content = path.read_bytes()
            digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
