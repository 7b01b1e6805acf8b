"""Chat templates of real models, read at test time from packages that contain them, and never part of this repository.

`make test` downloads the two small packages, `make formats` also the large one, into the environment's folder
`chat_templates`; nothing in them is installed or run.
"""

from __future__ import annotations

import functools
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "chat_templates"
TRL = "trl"
AXOLOTL = "axolotl"
LLAMA_CPP = "llama_cpp_python"
_INSIDE = {TRL: "trl/chat_templates/", AXOLOTL: "templates/", LLAMA_CPP: "vendor/llama.cpp/models/templates/"}


def chat_template(package: str, name: str) -> str:
    """Skips the test where the package has not been downloaded."""
    texts = _templates(package)
    if texts is None:
        pytest.skip(f"no {package} in {FOLDER}: `make {'formats' if package == LLAMA_CPP else 'test'}` downloads it")
    return texts[name]


@functools.cache
def _templates(package: str) -> dict[str, str] | None:
    """By name, without the ending."""
    archives = sorted(FOLDER.glob(f"{package}-*"))
    if not archives:
        return None
    read = _read_zip if archives[-1].suffix == ".whl" else _read_tar
    return {
        Path(path).stem: text.decode() for path, text in read(archives[-1], _INSIDE[package]) if path.endswith(".jinja")
    }


def _read_zip(archive: Path, inside: str) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as file:
        yield from ((path, file.read(path)) for path in file.namelist() if inside in path)


def _read_tar(archive: Path, inside: str) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as file:
        for member in file:
            if inside in member.name and (content := file.extractfile(member)):
                yield member.name, content.read()
