"""A GGUF file as a model directory: a checkpoint's small files, next to links to the file and its parts.

Used by the code that reads the engine argument `model`. Invariants: a directory appears complete, by a rename; it is
used only for the same files (size, times, inode) and the same program; the least recently used are removed, unless a
process holds them. Takes seconds for a new file, milliseconds for a known one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import llmbackend

from .errors import GgufError
from .fields import Fields
from .files import SUFFIX, files_in, is_gguf, model_name, parts_of, read_parts, stamp
from .header import Header
from .model_config import model_config
from .tokenizer_files import MARKER, TEMPLATE_FILES, chat_template, tokenizer_config, tokenizer_json
from .vocabulary import Vocabulary

CheckTemplate = Callable[[str, dict[str, str]], None]
MAX_DIRECTORIES: Final = 32
"""Beyond this, the least recently used are removed."""
_CONFIG: Final = "config.json"
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_NO_TOKENS: Final = {"bos_token_id": None, "pad_token_id": None}
"""Replaces the family's defaults, which may be outside this vocabulary."""
_UNFINISHED: Final = ".unfinished-"
_SAMPLING: Final = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat",
}  # fmt: skip
"""Fields of generation_config.json, with their names in a file."""


def gguf_files(path: Path) -> list[Path]:
    """The files of the GGUF model that `path` is or contains, the first part first; [] if it is something else. Raises
    GgufError."""
    if path.is_dir():
        return [] if is_made_of_gguf(path) else files_in(path)
    return parts_of(path) if is_gguf(path) else []


def model_directory(
    files: Sequence[Path], parent: Path, check_template: CheckTemplate = lambda _source, _tokens: None
) -> Path:
    """The directory of this model in `parent`, created if needed. check_template: called with the chat template and its
    special tokens; raises ValueError to refuse it. Raises GgufError or OSError."""
    paths = [Path(os.path.abspath(path)) for path in files]
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", model_name(paths[0])).lstrip(".")[:80] or "model"
    directory = parent / f"{name}-{_key(paths)}"
    if not (directory / _CONFIG).is_file():
        _make(paths, directory, check_template)
        _remove_old(parent, directory)
    with contextlib.suppress(OSError):  # a read-only file system
        os.utime(directory)
    return directory


def is_made_of_gguf(directory: Path) -> bool:
    """Whether this is a directory of `model_directory`."""
    try:
        config = json.loads((directory / _TOKENIZER_CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and MARKER in config


def source_of(model: str) -> str:
    """For messages: the GGUF file from which a directory was made, or its first part; anything else unchanged."""
    directory = Path(model)
    if not is_made_of_gguf(directory):
        return model
    links = sorted(path for path in directory.iterdir() if path.is_symlink())
    return os.readlink(links[0]) if links else model


def _key(paths: Sequence[Path]) -> str:
    code = sorted(Path(__file__).parent.glob("*.py"))
    program = [llmbackend.__version__, *((path.name, *stamp(path)[:2]) for path in code)]
    depends_on = [program, [(str(path), *stamp(path)) for path in paths]]
    return hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:20]


def _make(paths: Sequence[Path], directory: Path, check_template: CheckTemplate) -> None:
    contents = _contents(read_parts(paths), paths[0].name, check_template)
    unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=directory.parent))
    try:
        for name, content in contents.items():
            (unfinished / name).parent.mkdir(exist_ok=True)
            (unfinished / name).write_text(content, encoding="utf-8")
        for path in paths:
            (unfinished / (path.name.removesuffix(SUFFIX) + SUFFIX)).symlink_to(path)
        if directory.exists() and not (directory / _CONFIG).is_file():
            _remove(directory)  # something has removed a part of it
        unfinished.rename(directory)
    except OSError:
        if not (directory / _CONFIG).is_file():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _contents(header: Header, file_name: str, check_template: CheckTemplate) -> dict[str, str]:
    """Files by name. Raises GgufError."""
    tokenizer, vocabulary = tokenizer_json(header.fields)
    _check_vocabulary(header, vocabulary)
    ids = _token_ids(vocabulary)
    ends = vocabulary.ends
    objects = {
        _CONFIG: model_config(header, {**_NO_TOKENS, **ids, "eos_token_id": ends[0] if ends else None}),
        "generation_config.json": {**ids, **({"eos_token_id": ends} if ends else {}), **_sampling(header.fields)},
        _TOKENIZER_CONFIG: tokenizer_config(vocabulary, file_name),
    }
    contents = {name: json.dumps(value, indent=2) for name, value in objects.items()}
    contents["tokenizer.json"] = json.dumps(tokenizer, ensure_ascii=False)
    texts = {name: value for name, value in objects[_TOKENIZER_CONFIG].items() if name.endswith("_token")}
    for field, name in TEMPLATE_FILES.items():
        if template := chat_template(header.fields, field):
            contents[name] = template
            try:
                check_template(template, texts)
            except ValueError as error:
                raise GgufError(f"its field 'tokenizer.{field}' is refused: {error}") from None
    return contents


def _check_vocabulary(header: Header, vocabulary: Vocabulary) -> None:
    info = header.tensors.get("token_embd.weight")
    if info is not None and len(vocabulary.tokens) > info.shape[0]:
        raise GgufError(
            f"its field 'tokenizer.ggml.tokens' has {len(vocabulary.tokens)} entries, but its tensor "
            f"'token_embd.weight' has {info.shape[0]} rows"
        )


def _token_ids(vocabulary: Vocabulary) -> dict[str, int]:
    return {f"{name}_token_id": vocabulary.special[name] for name in ("bos", "pad") if name in vocabulary.special}


def _sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    reader = Fields(fields, "general.sampling")
    found = {name: reader.value(field) for name, field in _SAMPLING.items()}
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return {
        name: value if isinstance(value, int) else reader.number(_SAMPLING[name]) for name, value in numbers.items()
    }


def _remove_old(parent: Path, new: Path) -> None:
    """Keeps the newest directories, and removes what killed processes left unfinished."""
    found = []
    for path in parent.iterdir():
        with contextlib.suppress(OSError):  # another process removes it, too
            if path.is_dir() and not path.is_symlink() and path != new:
                found.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(found)[: max(len(found) - MAX_DIRECTORIES + 1, 0)]:
        if not _is_held(path):
            _remove(path)


def _remove(directory: Path) -> None:
    """Under another name, so that a kill leaves no directory with a part of its files."""
    with contextlib.suppress(OSError):  # another process removes it, too
        removed = directory.rename(tempfile.mkdtemp(prefix=_UNFINISHED, dir=directory.parent))
        shutil.rmtree(removed, ignore_errors=True)


def hold(directory: Path) -> int:
    """A descriptor; as long as it is open, no process removes the directory. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits only for `_is_held`
    return descriptor


def _is_held(directory: Path) -> bool:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # another process has removed it
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False
