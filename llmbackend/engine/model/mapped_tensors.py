"""Tensors of safetensors files as views of the mapped files: nothing is read of one before it is used.

For: what reads a checkpoint without transformers. Does not know: models, what tensors mean. Invariant: the views are
never written to.
"""

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
