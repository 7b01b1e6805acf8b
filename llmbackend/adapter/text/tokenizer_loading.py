"""A model's tokenizer and chat template from its files, verified against transformers' before the first request.

For: ModelState. Does not know: requests, engines. Invariant: `TokenizerLoader.verified` makes the token ids of
AutoTokenizer, or a warning says why that could not be verified.
Source: AutoTokenizer.from_pretrained and TokenizersBackend.convert_to_native_format of transformers 5.
"""

from __future__ import annotations

import json
import logging
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llmbackend.core.backend_api import invalid_argument
from llmbackend.engine.config import EngineConfig

from .tokenizer import ByteTokenizer, HuggingFaceTokenizer, ModelTokenizer
from .tokenizer_files import (
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
"""Tokenizer classes that load tokenizer.json as it is."""
_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
REBUILT_MODEL_TYPES = frozenset(
    {
        "hyperclovax_vision_v2",
        "qwen2",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen4_exp",
        "siglip2",
    }
)
"""Model types for which AutoTokenizer uses its own class, even if the checkpoint names another one."""


class TokenizerLoader:
    """Owner of the process that verifies. `_lock`: instances that start side by side wait for one result.

    Reads `tokenizer.json` with the `tokenizers` library; a checkpoint that has none is converted by transformers, in
    the engine's environment (tokenizer_files.py). AutoTokenizer rebuilds some tokenizers from a class of its own; only
    running it tells which. That takes seconds, in a process beside the engine's start, and is left out where the
    checkpoint's class uses the file as it is.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Loads the tokenizer and starts verifying it. Raises TritonError INVALID_ARG saying what is missing."""
        try:
            self._tokenizer = load_tokenizer(
                config.model,
                config.tokenizer,
                trust_remote_code=config.trust_remote_code,
                interpreter=config.engine_python,
                chat_template=config.chat_template,
            )
        except (ValueError, OSError, ImportError) as error:
            source = config.tokenizer or config.model
            raise invalid_argument(f"the tokenizer of '{source}' cannot be loaded: {error}") from error
        self._timeout_s = config.load_timeout_s
        self._lock = threading.Lock()
        self._check: subprocess.Popen[bytes] | None = None
        directory = self._tokenizer.directory if isinstance(self._tokenizer, HuggingFaceTokenizer) else None
        if directory is not None and may_be_rebuilt(directory):
            trust = remote_code_argument(config.trust_remote_code)
            self._check = start_in(config.engine_python, rebuilt, str(directory), trust)

    @property
    def chat_template(self) -> str:
        """The source of the chat template; "" where there is none, or none was given to the mock model."""
        return self._tokenizer.chat_template

    def verified(self) -> ModelTokenizer:
        """The tokenizer to use from now on; waits until it is verified."""
        with self._lock:
            check, self._check = self._check, None
            if check is not None and isinstance(self._tokenizer, HuggingFaceTokenizer):
                self._tokenizer = self._verify(self._tokenizer, check)
            return self._tokenizer

    def close(self) -> None:
        if self._check is not None:
            _end(self._check)
            self._check = None

    def _verify(self, tokenizer: HuggingFaceTokenizer, check: subprocess.Popen[bytes]) -> HuggingFaceTokenizer:
        directory = tokenizer.directory
        try:
            tokenizer_json = result_of(check, self._timeout_s)
            if tokenizer_json:
                tokenizer = tokenizer.with_tokenizer(tokenizer_json)
                logger.info("%s: transformers rebuilds this tokenizer with other token ids, which are used", directory)
        except Exception as error:  # of transformers, of a checkpoint's code, or a timeout
            _end(check)
            logger.warning("%s: tokenizer.json is used unverified: AutoTokenizer fails: %s", directory, error)
        return tokenizer


def may_be_rebuilt(directory: Path) -> bool:
    """Whether AutoTokenizer might not use this tokenizer.json as it is."""
    if not (directory / TOKENIZER_FILE).is_file():
        return False  # transformers has made the tokenizer
    tokenizer, model = read_json(directory / "tokenizer_config.json"), read_json(directory / "config.json")
    tokenizer_class = tokenizer.get("tokenizer_class") or model.get("tokenizer_class")
    if tokenizer_class not in _AS_IN_THE_FILE or model.get("model_type") in REBUILT_MODEL_TYPES:
        return True
    return any(name in tokenizer for name in ("add_bos_token", "add_eos_token", "auto_map"))


def load_tokenizer(
    model: str,
    tokenizer: str = "",
    *,
    trust_remote_code: bool = False,
    interpreter: str = "",
    chat_template: str = "",
) -> ModelTokenizer:
    """The tokenizer of `model`, or `tokenizer` when it is given; both a directory, a hub id or "mock".

    interpreter: the Python that has the libraries which only a hub id and an old kind of tokenizer need; "" = this one.
    chat_template: a file or a template, used instead of the checkpoint's.

    Raises ValueError or OSError saying what is missing.
    """
    source = tokenizer or model
    given_template = _given_template(chat_template)
    if source == "mock":
        return ByteTokenizer(given_template)
    from .chat_template import ChatTemplate

    directory = local_directory(source, interpreter)
    config = read_json(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(config, read_json(directory / "special_tokens_map.json"))
    template_source = given_template or _chat_template_source(directory, config)
    template = ChatTemplate(template_source, special_tokens) if template_source is not None else None
    return HuggingFaceTokenizer(_read_tokenizer(directory, trust_remote_code, interpreter), template, directory)


def local_directory(source: str, interpreter: str) -> Path:
    """A model's directory; of a hub id, one with its small files. Raises ValueError or OSError."""
    path = Path(source)
    if path.is_dir():
        return path
    if path.is_absolute() or source.startswith("."):
        raise FileNotFoundError(f"the tokenizer's directory '{source}' does not exist")
    return Path(run_in(interpreter, download, source))


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object; {} when there is none. Raises ValueError."""
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
    """chat_template.jinja, else chat_template.json, else the tokenizer config's (its "default" one of several)."""
    jinja_file = directory / "chat_template.jinja"
    if jinja_file.is_file():
        return jinja_file.read_text(encoding="utf-8")
    template = read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
