"""Locates a checkpoint's weight files: in a directory, or in the hub's cache for a hub id.

Used by the loader and by ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import cached_files

from ..config import EngineConfig
from ..errors import CheckpointError
from ..load_progress import download_bar
from .checkpoint_files import bad_checkpoint, weight_files


def files_of(config: EngineConfig) -> list[Path]:
    """The checkpoint's weight files. Raises ValueError or OSError."""
    directory = Path(config.model)
    if not directory.is_dir():
        return hub_files(config)
    try:
        return weight_files(directory)
    except CheckpointError as error:
        raise bad_checkpoint(config.model, error) from None


def hub_files(config: EngineConfig) -> list[Path]:
    """The safetensors files of a hub id, downloaded. Raises OSError."""
    bar = download_bar()
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        path = cached_file(config.model, name, _raise_exceptions_for_missing_entries=False, tqdm_class=bar)
        if path is not None and name == SAFE_WEIGHTS_NAME:
            return [Path(path)]
        if path is not None:
            shards = sorted(set(json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"].values()))
            return [Path(file) for file in cached_files(config.model, shards, tqdm_class=bar) or ()]
    raise ValueError(f"engine argument 'model' is '{config.model}', which has no safetensors file")
