"""What a client may say in a load request: a model's name, a configuration, and files.

For: the repository (before it touches a disk) and the server. Does not know: repositories, what a configuration means.
Invariant: what passes here names nothing outside of the directory it is looked up or written in, and is shallow enough
for any parser; everything else is an INVALID_ARG that says why. Source: Triton's ModelRepositoryManager (path
traversal) and its JSON nesting limit.
"""

from __future__ import annotations

import os
from pathlib import Path

from llmbackend.core.errors import ErrorCode, TritonError, invalid_argument
from llmbackend.core.messages import LoadParameters

FILE_PREFIX = "file:"
LONGEST_NAME_BYTES = 255
LONGEST_PATH_BYTES = 1024
LARGEST_CONFIG_BYTES = 1 << 20
DEEPEST_JSON = 100
_SHOWN_CHARACTERS = 100


class OverrideError(TritonError):
    """An override that could not be used whatever the model is; it reaches the client as it is."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INVALID_ARG) -> None:
        super().__init__(message, code)


def check_model_name(name: str) -> None:
    """Raises TritonError INVALID_ARG for a name that could leave the repository, or that no directory can have."""
    if not name:
        raise invalid_argument("model name must not be empty")
    if "/" in name or "\\" in name or name in (".", ".."):
        raise invalid_argument(f"invalid model name '{_shown(name)}': must not contain path traversal characters")
    if not name.isprintable():
        raise invalid_argument(f"invalid model name {_shown(name)!a}: must not contain unprintable characters")
    if len(name.encode()) > LONGEST_NAME_BYTES:
        raise invalid_argument(f"invalid model name '{_shown(name)}': longer than {LONGEST_NAME_BYTES} bytes")


def check_load_parameters(parameters: LoadParameters) -> None:
    """Raises OverrideError for a configuration too large or nested too deeply, and for a file outside of the model."""
    config = parameters.get("config", "")
    if len(config) > LARGEST_CONFIG_BYTES:
        raise OverrideError(f"Invalid config override: larger than {LARGEST_CONFIG_BYTES} bytes")
    if json_depth(config) > DEEPEST_JSON:
        raise OverrideError(
            f"Invalid config override: JSON nesting depth exceeds maximum allowed limit ({DEEPEST_JSON})"
        )
    for key in parameters:
        if key.startswith(FILE_PREFIX):
            _check_path(_relative(key))


def json_depth(text: str | bytes) -> int:
    """How deeply brackets are nested in JSON text; those inside of strings do not count."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    depth = deepest = 0
    in_string = escaped = False
    for byte in data:
        if in_string:
            in_string = escaped or byte != 0x22
            escaped = not escaped and byte == 0x5C
        elif byte == 0x22:
            in_string = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


def write_files(directory: Path, parameters: LoadParameters) -> None:
    """Writes every `file:` parameter below `directory`. Raises OverrideError for one that can not be a file there, such
    as one below another file."""
    for key, content in parameters.items():
        if not key.startswith(FILE_PREFIX):
            continue
        relative = _relative(key)
        _check_path(relative)
        target = directory / relative
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.encode() if isinstance(content, str) else content)
        except (OSError, ValueError) as error:
            cause = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__
            raise OverrideError(f"file override path '{_shown(relative)}' can not be written: {cause}") from None


def _relative(key: str) -> str:
    """The path in the model's directory; as in Triton it may begin with a slash."""
    return key.removeprefix(FILE_PREFIX).lstrip("/")


def _check_path(relative: str) -> None:
    path = Path(relative)
    if ".." in path.parts or "\\" in relative or not path.parts:
        raise OverrideError(f"file override path '{_shown(relative)}' must stay inside the model directory")
    if not relative.isprintable():
        raise OverrideError(f"file override path {_shown(relative)!a} must not contain unprintable characters")
    longest_part_bytes = max(len(part.encode()) for part in path.parts)
    if longest_part_bytes > LONGEST_NAME_BYTES or len(relative.encode()) > LONGEST_PATH_BYTES:
        raise OverrideError(f"file override path '{_shown(relative)}' is too long")


def _shown(text: str) -> str:
    """A client's text, short enough for an error."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
