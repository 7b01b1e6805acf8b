"""Tensors of safetensors files as read-only views of the mapped files, which are read only when used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open


def mapped_tensors(files: Iterable[Path]) -> Mapping[str, torch.Tensor]:
    """All by name. Raises SafetensorError or OSError."""
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors
