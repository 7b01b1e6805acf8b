"""A model's text while its engine loads: its own tokenizer at once, verified against transformers' before the first
request.

For: ModelState. Does not know: requests, engines. Invariant: what `settled` gives makes the token ids of AutoTokenizer,
or a warning says why that could not be verified. AutoTokenizer rebuilds some tokenizers from a class of its own, which
is not the same as tokenizer.json; which, is known for sure by asking it. That takes seconds in a process of its own,
beside the engine's start; a checkpoint that names a class which uses the file as it is costs nothing.
Source: AutoTokenizer.from_pretrained and TokenizersBackend.convert_to_native_format of transformers 5.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from pathlib import Path

from llmbackend.core.backend_api import invalid_argument
from llmbackend.engine.config import EngineConfig

from .text import HuggingFaceText, Text, load_text, read_json
from .tokenizer_files import TOKENIZER_FILE, answer_of, rebuilt, remote_code, start_in

logger = logging.getLogger(__name__)

_AS_IN_THE_FILE = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Tokenizer classes that load tokenizer.json as it is."""
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
"""Model types whose tokenizer class is their own, whatever a checkpoint says."""


class LoadingText:
    """Owner of the process that verifies. `_lock`: instances that start side by side wait for one answer."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises TritonError INVALID_ARG saying what is missing."""
        try:
            self._text = load_text(
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
        directory = self._text.directory if isinstance(self._text, HuggingFaceText) else None
        if directory is not None and may_be_rebuilt(directory):
            trust = remote_code(config.trust_remote_code)
            self._check = start_in(config.engine_python, rebuilt, str(directory), trust)

    def settled(self) -> Text:
        """The text to use from now on; waits for what verifies it."""
        with self._lock:
            return self._settle()

    def close(self) -> None:
        if self._check is not None:
            _end(self._check)
            self._check = None

    def _settle(self) -> Text:
        check, self._check = self._check, None
        if check is None or not isinstance(self._text, HuggingFaceText):
            return self._text
        directory = self._text.directory
        try:
            tokenizer_json = answer_of(check, self._timeout_s)
            if tokenizer_json:
                self._text = self._text.with_tokenizer(tokenizer_json)
                logger.info("%s: transformers rebuilds this tokenizer with other token ids, which are used", directory)
        except Exception as error:  # of transformers, of a checkpoint's code, or the time was over
            _end(check)
            logger.warning("%s: tokenizer.json is used unverified: AutoTokenizer fails: %s", directory, error)
        return self._text


def may_be_rebuilt(directory: Path) -> bool:
    """Whether AutoTokenizer might not use this tokenizer.json as it is."""
    if not (directory / TOKENIZER_FILE).is_file():
        return False  # transformers has made the tokenizer
    tokenizer, model = read_json(directory / "tokenizer_config.json"), read_json(directory / "config.json")
    tokenizer_class = tokenizer.get("tokenizer_class") or model.get("tokenizer_class")
    if tokenizer_class not in _AS_IN_THE_FILE or model.get("model_type") in REBUILT_MODEL_TYPES:
        return True
    return any(name in tokenizer for name in ("add_bos_token", "add_eos_token", "auto_map"))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
