"""Which matrices of a checkpoint in 4 bits `quantization: int4` keeps as stored.

Used by the loader.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from ..config import EngineConfig
from ..cpu.linear import StoredMatrices
from .int4_formats import Int4Format, Mxfp4Format, PackedFormat
from .stored_int4 import StoredInt4
from .stored_mxfp4 import StoredMxfp4

logger = logging.getLogger(__name__)


def kept_matrices(
    config: EngineConfig, form: PackedFormat, tensors: Mapping[str, torch.Tensor]
) -> StoredMatrices | None:
    """tensors: the checkpoint's, by module names. None = int4 rounds all weights. Raises CheckpointError."""
    if config.quantization is None and config.device == "cpu" and isinstance(form, Int4Format):
        logger.info("weights in 4 bits become plain ones: quantization 'int4' would keep them")
    if config.quantization != "int4":
        return None
    if isinstance(form, Mxfp4Format):
        return StoredMxfp4(tensors)
    return StoredInt4(form, tensors) if isinstance(form, Int4Format) and form.linears(tensors) else None
