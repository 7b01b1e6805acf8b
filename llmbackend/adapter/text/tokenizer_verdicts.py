"""What transformers said of a tokenizer in an earlier start, kept beside the cached weights.

For: tokenizer_loading.py. Does not know: how a tokenizer is verified. Invariants: a verdict is used only for files with
the same bytes, under the same versions of the libraries; a file that others may have written, or that is damaged, is no
verdict; nothing here fails a start.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Final

from llmbackend import __version__
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.weight_cache.cache_folder import (
    CacheFolder,
    FolderRefusedError,
    limit_bytes_of,
    usable_directory,
)

from .tokenizer_files import FILES

logger = logging.getLogger(__name__)

_FORMAT: Final = b"llmbackend tokenizer verdict 1\n"
_DIGEST_BYTES: Final = 32
_ENDING: Final = ".tokenizer"
MAX_VERDICTS: Final = 32
"""The oldest ones go."""


class Verdicts:
    """Of one tokenizer: the text of another tokenizer.json, "" where the file is used as it is."""

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        """directory: of the tokenizer's files"""
        self._config = config
        self._path = usable_directory(config)
        self._name = ""
        try:
            self._name = f"{_key(directory)}{_ENDING}"
        except (OSError, ImportError):  # a library is missing
            self._path = None

    def read(self) -> str | None:
        """None: there is none."""
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
        """Raises FolderRefusedError where there is none."""
        if self._path is None:
            raise FolderRefusedError("there is no cache")
        folder = CacheFolder(self._path, limit_bytes_of(self._config))
        stack.callback(folder.close)
        return folder


def _key(directory: Path) -> str:
    """Of the files that decide what AutoTokenizer makes, and of the libraries."""
    digest = hashlib.sha256(f"{__version__} {version('tokenizers')} {version('transformers')}".encode())
    for path in sorted(directory.iterdir()):
        if any(fnmatch(path.name, pattern) for pattern in FILES) and path.is_file():
            content = path.read_bytes()
            digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
