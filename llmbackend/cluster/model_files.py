"""The folders that an engine's configuration names, on the machine that runs it: as they are there, or a copy.

For: who asks for an engine, and the actors of engines and ranks. Does not know: Ray, how copies are kept. Invariants:
a folder is used where it is as long as it has the files that the asking machine has; else this machine is sent them,
once for all of its engines; an error names the folder.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from llmbackend.engine.config import EngineConfig

from .model_cache import SIZE, Connect, HeldModel, machine_cache
from .model_manifest import ModelManifest, manifest

log = logging.getLogger(__name__)


class ModelFilesError(Exception):
    """Why a machine does not have a model's files."""


class LocalFiles(msgspec.Struct, frozen=True):
    """paths        folder that a configuration names -> folder that has its files on this machine
    descriptors  the copies among them stay as long as these are open, see HeldModel
    """

    paths: dict[str, str]
    descriptors: tuple[int, ...]


def manifests(config: EngineConfig) -> tuple[ModelManifest, ...]:
    """Of the folders that the configuration names by their full path; others are of the hub, or of no file. Raises
    ModelFilesError."""
    named = {"model": config.model} | {f"LoRA adapter '{name}'": path for name, path in config.lora_modules.items()}
    found = []
    for what, path in named.items():
        if os.path.isabs(path):
            try:
                found.append(manifest(Path(path)))
            except OSError as error:
                raise ModelFilesError(f"the {what} '{path}' cannot be read: {error.strerror}") from None
    return tuple(found)


def local_files(models: Sequence[ModelManifest], connect: Connect) -> LocalFiles:
    """Blocks while files are sent. Raises ModelFilesError."""
    held: dict[str, HeldModel] = {}
    try:
        for model in models:
            if problem := _problem(model):
                held[model.path] = _copy(model, problem, connect)
    except BaseException:
        for copy in held.values():
            copy.close()
        raise
    paths = {path: str(copy.folder) for path, copy in held.items()}
    return LocalFiles(paths, tuple(copy.descriptor for copy in held.values()))


def _problem(model: ModelManifest) -> str:
    """Why the folder is not used where it is, "" when it is."""
    try:
        return model.difference(Path(model.path))
    except OSError as error:
        return error.strerror or str(error)


def _copy(model: ModelManifest, problem: str, connect: Connect) -> HeldModel:
    """Raises ModelFilesError."""
    what = f"'{model.path}' cannot be used where this machine has it ({problem})"
    try:
        cache = machine_cache()
        if cache is None:
            raise ModelFilesError(
                f"{what}. Expected the same files at the same path on each machine of the cluster, or {SIZE} above 0, "
                "so that they are sent"
            )
        held = cache.hold(model, connect)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelFilesError(f"{what}, and a copy cannot be kept: {reason}") from None
    log.info("%s: its copy '%s' is used", what, held.folder)
    return held
